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

GROUPS = {"ray_cluster": "ray", "browser": "browser"}
"""Tests that use these session fixtures run in the same process of ``--dist loadgroup``, so each is made once."""
SLOW_FIRST = ("unit/training", "distributed", "integrations", "golden", "unit/lab", "unit/test_cli.py", "examples",
              "browser", "unit/report", "conformance")  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a module that share a fixture together, so that it is made once; slow tests come first."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None and (name := _group(item)):
            item.add_marker(pytest.mark.xdist_group(name))
    items.sort(key=lambda item: _place(item.path))


def _group(item: pytest.Item) -> str | None:
    made: dict[str, Any] = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    shared = [group for name, group in GROUPS.items() if name in made]
    own = any(definitions[-1].scope == "module" for definitions in made.values())
    return shared[0] if shared else item.nodeid.split("::")[0] if own else None


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
