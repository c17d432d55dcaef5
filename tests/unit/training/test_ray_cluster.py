"""Sweeps on a Ray cluster that somebody else started, and what is said where there is none."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from helpers import commands
from helpers.commands import PATIENCE
from helpers.sweep_jobs import where
from helpers.text_configs import write_config
from mixwell.lab import tables
from mixwell.lab.tables import Row
from mixwell.training.engines import Engine, Job, connection
from mixwell.training.engines.ray import _Actor, _DriverState
from mixwell.training.sweeps import run_sweep
from mixwell.utils import environment

QUIET = Console(quiet=True)


def without_costs(path: Path) -> list[Row]:
    """What does not depend on how busy the machine is."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "memory")} for row in tables.read(path)]


def test_comparison_on_cluster_gives_same_tables(ray_cluster: str, tmp_path: Path) -> None:
    """The folder is given relative to where the command is, and the cluster is elsewhere."""
    words = [
        "compare",
        "tiny.yaml",
        "--methods",
        "uniform,mixwell,regmix",
        "--seeds",
        "1",
        "--no-figures",
        "--workers",
        "2",
    ]
    small = {"regmix": {"options": {"proxies": 4, "proxy_steps": 2, "samples": 200, "top": 5}}}
    write_config(tmp_path, compare=small)
    commands.mixwell(*words, "--out", "local", cwd=tmp_path)
    commands.mixwell(*words, "--out", "ray", "--engine", "ray", "--ray-address", ray_cluster, cwd=tmp_path)
    rows = without_costs(tmp_path / "local" / "compare.csv")
    assert [row["variant"] for row in rows] == ["uniform", "mixwell", "regmix"]
    assert without_costs(tmp_path / "ray" / "compare.csv") == rows
    for name in ("weights.csv", "curves.csv"):
        assert (tmp_path / "ray" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()
    told = environment.read(tmp_path / "ray" / "runs" / "uniform-0")["commands"]
    assert told == environment.read(tmp_path / "ray")["commands"]
    assert "--engine ray" in told[0]


def test_uses_ray_address_variable_and_all_cpus(
    ray_cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster)
    monkeypatch.setenv("MIXWELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    found: list[tuple[int, str, str, str]] = []
    run_sweep(
        where,
        [Job(f"job{n}", 1, (3, tmp_path)) for n in range(9)],
        workers=None,
        folder=Path("c"),
        on_done=lambda job, result: found.append(result),
        console=QUIET,
        engine=Engine("ray"),
    )
    assert len({process for process, *_ in found}) == 3
    assert {tuple(rest) for _, *rest in found} == {(str(tmp_path), "yes", str(tmp_path / "cache"))}
    assert not (tmp_path / "c").exists()


def test_other_version_on_cluster_raises(
    ray_cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other" / "mixwell-99.0.dist-info").mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: mixwell\nVersion: 99.0\n"
    (tmp_path / "other" / "mixwell-99.0.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(tmp_path / "other")
    with pytest.raises(OSError, match=r"has mixwell \S+ and not 99.0; install the same on all machines"):
        run_sweep(
            where,
            [Job("one", 1, (1, tmp_path)), Job("two", 1, (2, tmp_path))],
            workers=2,
            folder=tmp_path / "c",
            on_done=lambda job, result: pytest.fail("it was done"),
            console=QUIET,
            engine=Engine("ray", ray_cluster),
        )
    assert list((tmp_path / "c").iterdir()) == []


def test_worker_without_shared_folder_reports_error(tmp_path: Path) -> None:
    here = _DriverState(
        token=str(tmp_path / "elsewhere" / "token"),
        packages=environment.packages(),
        folder=str(tmp_path),
        path=[],
        argv=[],
        work=b"",
    )
    said = _Actor().start(here)
    assert said is not None
    assert (
        f"does not see {tmp_path / 'elsewhere'}: on a cluster give an --out on a file system that all" in said
    )


def test_unreachable_cluster_writes_nothing(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    for command in (["reproduce", "mnist"], ["reproduce", "bounds"], ["compare", "demo"], ["demo"]):
        words = [*command, "--engine", "ray", "--ray-address", address]
        _, error = commands.mixwell(*words, cwd=tmp_path, status=2)
        assert f"no Ray cluster answers at {address} (Connection refused)" in error
        assert len(error.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_silent_address_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something listens at the address, and says nothing."""
    monkeypatch.setattr(connection, "CONNECT_SECONDS", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(OSError, match=rf"answers at {address} \(no reply within 3 seconds\)"):
            Engine("ray", address).check()


def test_missing_ray_names_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        one for one in sys.modules if one == "ray" or one.startswith(("ray.", "mixwell.training.engines."))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    _, error = commands.mixwell("reproduce", "mnist", "--engine", "ray", cwd=tmp_path, status=2)
    assert "the engine ray needs Ray" in error
    assert "pip install 'mixwell[ray]'" in error
    assert len(error.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


STRANGER = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False); print('connected')"
OWNER = """
import os, sys
import ray
from mixwell.training.engines import connection

with connection.connected(None, cpus=1):
    found = ray.get(ray.remote(lambda: os.getpid()).remote())
    print(found != os.getpid(), ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    "token", [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}]
)
def test_started_ray_refuses_strangers(token: dict[str, str]) -> None:
    # In a process of its own, since Ray keeps the first token of a process, and other tests connect to a cluster.
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        worked, address = owner.stdout.readline().split()
        tried = subprocess.run(
            [sys.executable, "-c", STRANGER, address],
            env={**os.environ, **token},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        owner.communicate(timeout=PATIENCE)  # its input ends, and so does it
    finally:
        owner.kill()
        owner.wait()
    assert worked == "True"
    assert tried.returncode != 0
    assert "connected" not in tried.stdout
    assert "token" in tried.stderr
