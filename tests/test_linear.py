"""A as an operator: apply, adjoint, gram and outer against einsum, and alike whatever the batch."""

import pytest
import torch
from torch.testing import assert_close

from tables import apply
from taut.maps import BatchedMap, DenseMap, as_map, dense

BATCHES = [(), (1,), (3,), (20,), (2, 3), (0,)]
SHAPES = [(2, 5), (1, 5), (5, 5), (7, 5), (0, 5), (1, 1), (3, 1)]


def maps(batch, shape):
    yield DenseMap(torch.randn(*shape))
    if batch:
        yield BatchedMap(torch.randn(*batch, *shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_products(batch, shape):
    rows, columns = shape
    z, multipliers = torch.randn(*batch, columns), torch.randn(*batch, rows)
    for A in maps(batch, shape):
        assert_close(A.apply(z), apply(A.data, z))
        assert_close(A.adjoint(multipliers), apply(A.data.mT, multipliers))
        gram = torch.einsum("...ik,...k,...jk->...ij", A.data, z, A.data)
        assert_close(A.gram(z), gram)
        assert_close(A.gram(z), A.gram(z).mT)
        assert_close(A.abs().apply(z), apply(A.data.abs(), z))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_adjoint_is_the_adjoint(batch, shape):
    """⟨A z, λ⟩ = ⟨z, Aᵀλ⟩."""
    z, multipliers = torch.randn(*batch, shape[1]), torch.randn(*batch, shape[0])
    for A in maps(batch, shape):
        left, right = A.apply(z) * multipliers, z * A.adjoint(multipliers)
        assert_close(left.sum(-1), right.sum(-1))


@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_outer_is_the_gradient_of_a_bilinear_form(batch):
    z, multipliers = torch.randn(*batch, 5), torch.randn(*batch, 2)
    for A in maps(batch, (2, 5)):
        data = A.data.clone().requires_grad_()
        (apply(data, z) * multipliers).sum().backward()
        assert_close(A.outer(multipliers, z), data.grad)
        assert A.outer(multipliers, z).shape == A.data.shape


def test_rows_selects_samples():
    index = torch.tensor([3, 0])
    z = torch.randn(4, 5)
    for A in maps((4,), (2, 5)):
        assert_close(A.take(index).apply(z[index]), A.apply(z)[index])
        assert_close(A.take(index).gram(z[index]), A.gram(z)[index])


def test_as_map_looks_at_the_dimensions():
    assert isinstance(as_map(torch.ones(2, 3)), DenseMap)
    assert isinstance(as_map(torch.ones(4, 2, 3)), BatchedMap)


@pytest.mark.parametrize("limits", [(0, 2**24), (0, 1)], ids=["one block", "sample by sample"])
def test_gram_in_blocks_is_the_same(limits, monkeypatch):
    A, s = torch.randn(3, 5), torch.rand(2, 7, 5)
    whole = DenseMap(A).gram(s)
    monkeypatch.setattr(dense, "_TABLE_LIMIT", limits[0])
    monkeypatch.setattr(dense, "_BLOCK_LIMIT", limits[1])
    assert_close(DenseMap(A).gram(s), whole)


def test_gram_in_blocks_of_an_empty_batch(monkeypatch):
    monkeypatch.setattr(dense, "_TABLE_LIMIT", 0)
    assert DenseMap(torch.randn(3, 5)).gram(torch.rand(0, 5)).shape == (0, 3, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2, 5), (1, 5), (5, 1), (6, 40)], ids=str)
def test_a_sample_is_the_same_in_every_batch(shape, dtype):
    """To the rounding of its own sum: no term may depend on the neighbours."""
    rows, columns = shape
    z, multipliers = torch.randn(50, columns, dtype=dtype), torch.randn(50, rows, dtype=dtype)
    shared = DenseMap(torch.randn(rows, columns, dtype=dtype))
    own = BatchedMap(torch.randn(50, rows, columns, dtype=dtype))
    # Two orders of one sum differ by a unit of rounding for each of its terms.
    most = (max(shape) + 2) * torch.finfo(dtype).eps
    for A in (shared, own):
        for size in (1, 2, 7, 9, 33):
            part = A.take(torch.arange(size))
            error = (part.apply(z[:size]) - A.apply(z)[:size]).abs()
            assert bool((error <= most * A.abs().apply(z.abs())[:size]).all())
            error = (part.adjoint(multipliers[:size]) - A.adjoint(multipliers)[:size]).abs()
            assert bool((error <= most * A.abs().adjoint(multipliers.abs())[:size]).all())
            error = (part.gram(z[:size]) - A.gram(z)[:size]).abs()
            assert bool((error <= most * A.abs().gram(z.abs())[:size]).all())
