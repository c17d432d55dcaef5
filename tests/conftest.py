import os

import hypothesis
import pytest
import torch

from mixwell.lab.mnist import mnist_data
from mixwell.lab.mnist.mnist_data import Mnist

# The same examples in every run, and no limit on the time to draw or to run them: nothing fails by chance or on a
# busy machine. HYPOTHESIS_PROFILE=random looks for new ones.
untimed = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("fixed", untimed, derandomize=True)
hypothesis.settings.register_profile("random", untimed, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


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
