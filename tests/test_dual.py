"""D(λ) = Σφ(v + Aᵀλ) − bᵀλ: its gradient is A z − b, its Hessian A diag(σ') Aᵀ."""

import pytest
import torch
from torch.testing import assert_close

from tables import ROWS, K, apply
from taut.dual import Dual
from taut.linear import dense_map

each_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
shared_or_own = pytest.mark.parametrize("shape", [(2, K), (4, 2, K)], ids=["shared", "own"])


def dual_of(row, shape, v=None):
    v = torch.randn(4, K) if v is None else v
    return Dual(row, dense_map(torch.randn(*shape)), v, torch.randn(4, 2))


@each_row
@shared_or_own
def test_gradient_and_hessian_are_derivatives(row, shape):
    D = dual_of(row, shape)
    multipliers = torch.randn(4, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(D.value(multipliers).sum(), multipliers, create_graph=True)
    assert_close(gradient, D.gradient(multipliers), rtol=1e-11, atol=1e-12)
    columns = [torch.autograd.grad(gradient[:, i].sum(), multipliers, retain_graph=True)[0]
               for i in range(2)]  # fmt: skip
    hessian = D.hessian(D.predictor(multipliers))
    assert_close(torch.stack(columns, -1), hessian, rtol=1e-10, atol=1e-12)


@each_row
def test_value_is_convex(row):
    D = dual_of(row, (2, K))
    one, other = torch.randn(4, 2), torch.randn(4, 2)
    for t in torch.linspace(0.1, 0.9, 9):
        chord = t * D.value(one) + (1 - t) * D.value(other)
        assert bool((D.value(t * one + (1 - t) * other) < chord).all())


@each_row
def test_residual_is_the_gradient(row):
    D = dual_of(row, (2, K))
    multipliers = torch.randn(4, 2)
    z = row.sigma(D.v + apply(D.A.data.mT, multipliers))
    assert_close(D.residual(z), apply(D.A.data, z) - D.b)
    assert_close(D.gradient(multipliers), D.residual(z))


@shared_or_own
def test_rows_selects_samples(shape):
    D, index = dual_of(ROWS["sigmoid"], shape), torch.tensor([2, 0])
    multipliers = torch.randn(4, 2)
    assert_close(D.rows(index).value(multipliers[index]), D.value(multipliers)[index])
    assert_close(D.rows(index).gradient(multipliers[index]), D.gradient(multipliers)[index])
