"""D(λ) = Σφ(v + Aᵀλ) − bᵀλ: its gradient is A z − b, its Hessian A diag(σ') Aᵀ."""

import pytest
import torch
from torch.testing import assert_close

from tables import ROWS, K, apply
from taut.pose import pose
from taut.prepare import prepare

each_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
shared_or_own = pytest.mark.parametrize("shape", [(2, K), (4, 2, K)], ids=["shared", "own"])


def dual_of(row, shape, v=None):
    v = torch.randn(4, K) if v is None else v
    problem, _ = pose(prepare(torch.randn(*shape), row), v, None, torch.randn(4, 2), None)
    return problem


def value(D, multipliers):
    return D.value(multipliers, predictor(D, multipliers))


def predictor(D, multipliers):
    return D.A.shifted_adjoint(D.v, multipliers)


def gradient_of(D, multipliers):
    return D.residual(D.prepared.activation.sigma(predictor(D, multipliers)))


@each_row
@shared_or_own
def test_gradient_and_hessian_are_derivatives(row, shape):
    D = dual_of(row, shape)
    multipliers = torch.randn(4, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(value(D, multipliers).sum(), multipliers, create_graph=True)
    assert_close(gradient, gradient_of(D, multipliers), rtol=1e-11, atol=1e-12)
    columns = [torch.autograd.grad(gradient[:, i].sum(), multipliers, retain_graph=True)[0]
               for i in range(2)]  # fmt: skip
    hessian = D.A.gram(row.slope(predictor(D, multipliers)))
    assert_close(torch.stack(columns, -1), hessian, rtol=1e-10, atol=1e-12)


@each_row
def test_value_is_convex(row):
    D = dual_of(row, (2, K))
    one, other = torch.randn(4, 2), torch.randn(4, 2)
    for t in torch.linspace(0.1, 0.9, 9):
        chord = t * value(D, one) + (1 - t) * value(D, other)
        assert bool((value(D, t * one + (1 - t) * other) < chord).all())


@each_row
def test_residual_is_the_gradient(row):
    D = dual_of(row, (2, K))
    multipliers = torch.randn(4, 2)
    z = row.sigma(D.v + apply(D.A.data.mT, multipliers))
    assert_close(D.residual(z), apply(D.A.data, z) - D.b)
    assert_close(gradient_of(D, multipliers), D.residual(z))


@shared_or_own
def test_take_selects_samples(shape):
    D, index = dual_of(ROWS["sigmoid"], shape), torch.tensor([2, 0])
    multipliers = torch.randn(4, 2)
    part = D.take(index)
    assert_close(value(part, multipliers[index]), value(D, multipliers)[index])
    assert_close(gradient_of(part, multipliers[index]), gradient_of(D, multipliers)[index])
