"""Connect to an existing Ray cluster within bounded time, or start a local Ray and shut it down.

Ray listens on all interfaces, whatever address its node is given, and runs the code of its clients. So a
Ray that is started here asks every client for a token that only this process and its workers know.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

import ray

from mixwell.training.engines.base import environment_with

CONNECT_SECONDS = 30.0
STORE_BYTES = 128 * 2**20
"""Size of the object store; settings and results are small."""
NO_STATISTICS = {"RAY_USAGE_STATS_ENABLED": "0"}


def check_reachable(address: str | None) -> None:
    """Raise if ``address`` (see :class:`mixwell.training.engines.Engine`) is a cluster that does not answer."""
    existing = _existing(address)
    if existing is not None and not ray.is_initialized():
        _expect_answer(existing)


@contextmanager
def connected(address: str | None, *, cpus: int) -> Generator[None]:
    """Connect to a cluster, or start a local Ray with ``cpus`` CPUs; an existing connection is used, and kept.

    Raises:
        ValueError: The address is invalid, or this process is connected already.
        OSError: No cluster answers, or Ray does not start.
    """
    if ray.is_initialized():
        if address is not None:
            raise ValueError(
                f"this process is connected to Ray already, so the address {address} comes too late; give none"
            )
        yield
        return
    existing = _existing(address)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if existing is None:
        options |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    else:
        _expect_answer(existing)
    # The processes of Ray inherit the token; the driver reads it with every new client.
    with environment_with(NO_STATISTICS | (_token() if existing is None else {})):
        with _explained(existing):
            ray.init(address=existing or "local", **options)
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def _explained(existing: str | None) -> Generator[None]:
    """Raise ``OSError`` with the place where Ray does not start, or cannot be connected to."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        where = (
            "start Ray on this machine" if existing is None else f"connect to the Ray cluster at {existing}"
        )
        raise OSError(f"cannot {where}: {error}") from error


@cache
def _token() -> dict[str, str]:
    """Return the environment with the token of a local Ray; one for the process, since Ray reads it once.

    Ray 2.60 asks for tokens unless ``RAY_AUTH_MODE`` is ``disabled``; without one in the environment it would
    write one to the home folder, which all runs of the user share.
    """
    given = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return {} if given else {"RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _existing(address: str | None) -> str | None:
    """Return the address of the existing cluster to use, if any."""
    found = address or os.environ.get("RAY_ADDRESS")
    return None if found == "local" else found or None


@cache
def _expect_answer(address: str) -> None:
    """Raise if no cluster answers. Ray itself would retry for minutes, so a subprocess tries first."""
    if address != "auto":
        _expect_port(address)
    code = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False)"
    try:
        tried = subprocess.run(
            [sys.executable, "-c", code, address],
            env={**os.environ, **NO_STATISTICS},
            capture_output=True,
            text=True,
            timeout=CONNECT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(_no_cluster(address, f"no reply within {CONNECT_SECONDS:g} seconds")) from error
    if tried.returncode != 0:
        closed = "Unauthenticated" in tried.stderr
        reason = "it asks for a token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN" if closed else None
        raise OSError(_no_cluster(address, reason or last_line(tried.stderr)))


def _expect_port(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or "/" in address or not port.isdigit():
        raise ValueError(
            f"the address of a Ray cluster is auto, or host:port of its head, as in 10.0.0.1:6379; got {address!r}"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise OSError(_no_cluster(address, error.strerror or str(error))) from error


def _no_cluster(address: str, reason: str) -> str:
    return (
        f"no Ray cluster answers at {address} ({reason}); `ray status` on one of its machines tells the address, "
        "and this machine must be one of them"
    )


def last_line(text: str) -> str:
    """Return the last line that is not empty; of a traceback, the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason was given"
