"""float64 and a fixed seed for every test; hypothesis without a clock or a database."""

import jaxtyping
import pytest
import torch
from hypothesis import settings

# The problems of the tests are small: more threads only wait for each other, ten times as long.
torch.set_num_threads(1)

settings.register_profile("taut", deadline=None, derandomize=True, database=None, max_examples=20)
settings.load_profile("taut")


@pytest.fixture(autouse=True)
def reproducible():
    """Restored afterwards, so that the examples in docstrings see torch as their reader does."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture
def as_user(monkeypatch):
    """Without the shape checks of the test run, which fire before the library's own errors."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
