import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from helpers import chromium
from mixwell.lab.mnist import mnist_data
from mixwell.lab.mnist.mnist_data import Mnist

# The same examples in every run, and no limit on the time to draw or to run them: nothing fails by chance or on a
# busy machine. HYPOTHESIS_PROFILE=random looks for new ones.
untimed = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("fixed", untimed, derandomize=True)
hypothesis.settings.register_profile("random", untimed, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

TOGETHER = {
    "ray": ("unit/training/test_ray_cluster.py", "unit/training/test_sweeps.py"),
    "browser": ("browser/test_report.py", "examples/test_site.py"),
}
"""Modules that share a session fixture, which is made once if they run in the same process."""
APART = ("examples/test_examples.py", "unit/test_cli.py")
"""Modules of slow tests that share nothing."""
SLOW_FIRST = ("unit/training", "distributed", "integrations", "golden", "unit/lab", "unit/test_cli.py", "examples",
              "browser", "unit/report", "conformance")  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``, send modules that share a fixture to one process, and some tests to any."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            if file.endswith(APART):
                return nodeid
            return next((group for group, files in TOGETHER.items() if file.endswith(files)), file)

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _place(item.path))


def _place(path: Path) -> int:
    here = Path(__file__).parent
    name = path.relative_to(here).as_posix() if path.is_relative_to(here) else ""
    return next((place for place, slow in enumerate(SLOW_FIRST) if name.startswith(slow)), len(SLOW_FIRST))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _short_wait_for_workers() -> Iterator[None]:
    """Workers of a DataLoader that is garbage in a cycle are never told to end, and are killed after 5 seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def mnist_images() -> Mnist:
    """The real images, from the cache or a registry; tests that need them are skipped where none answers."""
    try:
        return mnist_data.load()
    except OSError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One Chromium for all tests that look at pages."""
    with chromium.launched() as running:
        yield running
