"""What is taken as a tensor, and in which dtype it comes back."""

import pytest
import torch

import taut
from tables import problem
from taut import project


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("kind", [torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.long])
def test_lists_arrays_and_integers_are_numbers(which, kind):
    """Of v's dtype; a v that is one keeps its own, and a list has the default."""
    if which == 0 and kind is torch.Tensor.long:
        pytest.skip("a v of integers is refused")
    v, A, b = torch.tensor([0.5, 1.5, 2.5]), torch.tensor([[1.0, 2.0, 1.0]]), torch.tensor([3.0])
    given = [v, A, b]
    given[which] = kind(given[which])
    solution = project(*given, activation="exp")
    assert solution.z.dtype == v.dtype
    assert torch.equal(solution.z, project(v, A, b, activation="exp").z)


HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", ["linear", "sigmoid", "exp"])
def test_half_precision_is_solved_in_float64_and_comes_back_in_float32(activation, dtype):
    """As torch's own softmax and losses do under autocast; gradients have the dtype of v."""
    given = problem(activation, n=5, I=3, K=8, dtype=torch.float32)
    v = given.v.to(dtype).requires_grad_()
    wide = v.detach().float().requires_grad_()
    half = project(v, given.A, given.b, activation=activation)
    full = project(wide, given.A, given.b, activation=activation)
    assert half.z.dtype == half.residual.dtype == torch.float32
    assert torch.equal(half.z, full.z)
    weights = torch.randn(half.z.shape)
    (found,) = torch.autograd.grad((weights * half.z).sum(), v)
    (expected,) = torch.autograd.grad((weights * full.z).sum(), wide)
    assert found.dtype == dtype
    assert torch.equal(found, expected.to(dtype))


@pytest.mark.parametrize("solver", [taut.Newton(), taut.Newton(dtype=None)], ids=str)
@pytest.mark.parametrize("kind", ["dense", "each", "sparse"])
def test_autocast_does_not_reach_inside(kind, solver):
    """Values and first derivatives are those of without it, bit for bit.

    So are second ones, as torch asks for all of them, after its end: products that torch itself
    differentiates would be cast.
    """
    given = problem("sigmoid", n=4, K=6, own=kind == "each", dtype=torch.float32)
    v, A, b = given.v, given.A, given.b
    A = A.to_sparse() if kind == "sparse" else A

    def derivatives(enabled):
        inputs = [x.clone().requires_grad_() for x in (v, A, b)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            solution = project(*inputs, activation="sigmoid", solver=solver)
            first = torch.autograd.grad(solution.z.square().sum(), inputs, create_graph=True)
            loss = taut.matched_loss(solution, torch.full_like(v, 0.5))
            matched = torch.autograd.grad(loss, inputs, retain_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), inputs[0])
        found = (solution.z, solution.residual, loss, *first, *second, *matched)
        return [x.to_dense() for x in found]

    plain, cast = derivatives(False), derivatives(True)
    for expected, found in zip(plain, cast, strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(expected, found)
