"""float64 and one seed for every test, `--seed`; hypothesis without a clock or a database."""

import os

import jaxtyping
import pytest
import torch
from hypothesis import settings

# The problems of the tests are small: more threads only wait for each other, ten times as long.
torch.set_num_threads(int(os.environ.get("TAUT_TEST_THREADS", "1")))


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=0, help="another number changes every random draw")


@pytest.hookimpl(tryfirst=True)  # before hypothesis looks at its own option
def pytest_configure(config):
    seed = config.getoption("--seed")
    os.environ["TAUT_TEST_SEED"] = str(seed)  # for tables.py, and for the processes of tests
    options = {"deadline": None, "database": None, "max_examples": 20, "derandomize": seed == 0}
    settings.register_profile("taut", **options)
    settings.load_profile("taut")
    if seed and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(seed)


@pytest.fixture(autouse=True)
def reproducible(request):
    """Restored afterwards, so that the examples in docstrings see torch as their reader does."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(request.config.getoption("--seed"))
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture
def as_user(monkeypatch):
    """Without the shape checks of the test run, which fire before the library's own errors."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
