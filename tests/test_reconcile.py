"""taut.reconcile: the nearest z that satisfies the equations, for y in the closed range."""

import math

import pytest
import torch
from torch.testing import assert_close

import taut
from tables import ALL, K, apply, each_activation, few_activations, problem
from taut import Status, project, reconcile

INF = math.inf


@each_activation
def test_it_projects_from_the_predictor_of_y(activation):
    given = problem(activation)
    y = activation.sigma(given.v)
    found = reconcile(y, given.A, given.b, activation=activation)
    expected = project(activation.inverse(y), given.A, given.b, activation=activation)
    assert_close(found.z, expected.z)


@each_activation
def test_what_agrees_already_stays(activation):
    given = problem(activation)
    y = activation.sigma(given.v)
    found = reconcile(y, given.A, (given.A @ y.unsqueeze(-1)).squeeze(-1), activation=activation)
    scale = 1 + y.abs().amax()
    assert_close(found.z, y, rtol=0, atol=1e-12 * scale.item())


@pytest.mark.parametrize("name", ["exp", "sigmoid", "tanh", "bounded each", "weighted exp"])
@pytest.mark.parametrize("side", [0, 1])
def test_outputs_at_an_end_stay_there(name, side):
    """And the others solve what is left; gradients are 0 at the ends."""
    activation = ALL[name]
    y = activation.sigma(torch.randn(6, K))
    end = activation.range.bounds(y)[side].expand(6, K)
    at_end = torch.zeros(6, K, dtype=torch.bool)
    at_end[:, 1] = True
    at_end = at_end & end.isfinite()
    y = torch.where(at_end, end, y).requires_grad_()
    A = torch.rand(2, K) + 0.1
    z = torch.where(at_end, end, activation.sigma(torch.randn(6, K)))
    found = reconcile(y, A, z @ A.T, activation=activation)
    assert torch.equal(found.z[at_end], end[at_end])
    assert_close(found.z @ A.T, z @ A.T, rtol=1e-12, atol=1e-12)
    (g,) = torch.autograd.grad(found.z.square().sum(), y)
    assert g.isfinite().all()
    assert (g[at_end] == 0).all()
    free = ~at_end[0]
    if not free.all() and name in ("exp", "sigmoid", "tanh"):
        rest = reconcile(y[:, free], A[:, free], (z * ~at_end) @ A.T, activation=activation)
        if side == 0 and name != "tanh":
            assert_close(found.z[:, free], rest.z)


def test_zeros_that_leave_nothing_are_told():
    """Held at 0, the parts cannot sum to 1: infeasible, and the message names them."""
    y = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 0.5]])
    A, b = torch.tensor([[1.0, 1.0, 0.0]]), torch.ones(1)
    solution = reconcile(y, A, b, activation="exp", on_failure="return")
    assert solution.status.tolist() == [Status.CONVERGED, Status.INFEASIBLE]
    with pytest.raises(taut.SolveError, match=r"beside outputs 0 and 1, which are held"):
        reconcile(y, A, b, activation="exp")


@pytest.mark.parametrize("name", ["exp", "sigmoid", "tanh"])
def test_the_proof_of_an_infeasible_sample_holds_beside_outputs_that_are_held(name):
    activation = ALL[name]
    A, y = torch.randint(-1, 2, (3, 8)).double(), activation.sigma(torch.randn(64, 8))
    b, low = apply(A, y), activation.range.lower
    which = torch.rand(64, 8) < 0.6
    found = reconcile(y.where(~which, low), A, b, activation=activation, on_failure="return")
    proven = found.status == Status.INFEASIBLE
    assert proven.sum() > 20 and (found.status <= Status.INFEASIBLE).all()
    assert (found.radius[proven] > 1e6).all() and found.radius[~proven].isnan().all()
    lower, upper = (torch.where(which, low, x) for x in (-torch.inf, torch.inf))
    for i in proven.nonzero().squeeze(-1).tolist():
        ends = {"lower": lower[i], "upper": upper[i], "radius": found.radius[i].item()}
        assert taut.is_certificate(found.multipliers[i], A, b[i], activation, **ends)


def test_a_y_outside_the_range():
    """An error that names it; or, where samples that fail are returned, its own failure only."""
    y, A, b = torch.tensor([[0.5, 0.2], [-0.1, 0.4]]), torch.ones(1, 2), torch.ones(1)
    with pytest.raises(ValueError, match=r"y must lie in \[0, inf\].*got -0.1 in sample 1"):
        reconcile(y, A, b, activation="exp")
    solution = reconcile(y, A, b, activation="exp", on_failure="return")
    assert solution.status.tolist() == [Status.CONVERGED, Status.NONFINITE]
    assert (
        "entries of v. (Of reconcile: y is not a number there, or out of range.)"
        in solution.report()
    )


@few_activations
def test_gradients(activation):
    given = problem(activation, n=3)
    y = activation.sigma(given.v).requires_grad_()
    b = given.b.clone().requires_grad_()

    def z(y, b):
        return reconcile(y, given.A, b, activation=activation).z

    assert torch.autograd.gradcheck(z, (y, b))


def test_a_masked_softmax():
    """v = −inf is a structural zero: what torch.softmax makes of it."""
    v = torch.randn(6, K)
    mask = torch.rand(6, K) < 0.4
    mask[:, 0] = False
    v = v.masked_fill(mask, -INF).requires_grad_()
    z = project(v, torch.ones(1, K), torch.ones(1), activation="exp").z
    assert_close(z, torch.softmax(v, -1))
    (ours,) = torch.autograd.grad(z.square().sum(), v)
    (theirs,) = torch.autograd.grad(torch.softmax(v, -1).square().sum(), v)
    assert_close(ours, theirs)
    assert_close(ours[mask], torch.zeros_like(ours[mask]))


def test_what_is_prepared():
    prepared = taut.prepare([[1.0, 1.0]], "exp")
    assert_close(reconcile([1.0, 3.0], prepared, [8.0]).z, torch.tensor([2.0, 6.0]))
