"""The Ray of the tests of sweeps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from helpers.commands import PATIENCE

CLUSTER = """
import ray, sys
ray.init(address="local", num_cpus=3, include_dashboard=False, object_store_memory=2**27, logging_level="ERROR")
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray with three CPUs that another process has, in another folder.

    Yields:
        ``host:port``.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        cwd=tmp_path_factory.mktemp("cluster"),
        env={**os.environ, "CLUSTER": "yes", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate(timeout=PATIENCE)  # its input ends, and so does it
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
