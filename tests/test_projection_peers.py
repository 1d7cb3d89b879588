"""Second methods, by other people: SciPy on the primal and on the dual, Sinkhorn's."""

import numpy as np
import pytest
import torch
from scipy import optimize
from torch.testing import assert_close

from tables import K, few_activations, margins, problem
from taut import matched_loss, project

# many solves: the shapes are checked elsewhere
pytestmark = pytest.mark.usefixtures("as_user")


@few_activations
def test_the_dual_by_bfgs(activation):
    v, A, b = problem(activation, n=(), size=1.5)

    def D(multipliers):
        u = v + torch.from_numpy(multipliers) @ A
        value = activation.phi(u).sum() - b @ torch.from_numpy(multipliers)
        return value.item(), (A @ activation.sigma(u) - b).numpy()

    found = optimize.minimize(D, np.zeros(2), jac=True, method="BFGS", options={"gtol": 1e-9})
    solution = project(v, A, b, activation=activation)
    assert_close(solution.multipliers, torch.from_numpy(found.x), rtol=1e-6, atol=1e-6)
    assert_close(
        solution.z, activation.sigma(v + torch.from_numpy(found.x) @ A), rtol=1e-7, atol=1e-7
    )


@few_activations
def test_the_primal_by_slsqp(activation):
    """min B(z‖σ(v)) subject to A z = b, without any λ."""
    v, A, b = problem(activation, n=(), size=1.5)
    lower, upper = (end.expand(K) for end in activation.range.bounds(v))
    margin = 1e-9
    bounds = [
        (lo + margin if np.isfinite(lo) else None, hi - margin if np.isfinite(hi) else None)
        for lo, hi in zip(lower.tolist(), upper.tolist(), strict=True)
    ]

    def objective(z):
        z = torch.from_numpy(z)
        return activation.divergence(z, v).sum().item(), (activation.inverse(z) - v).numpy()

    constraint = {
        "type": "eq",
        "fun": lambda z: A.numpy() @ z - b.numpy(),
        "jac": lambda z: A.numpy(),
    }
    found = optimize.minimize(
        objective,
        activation.sigma(torch.zeros(K)).numpy(),
        jac=True,
        bounds=bounds,
        constraints=[constraint],
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    z = project(v, A, b, activation=activation).z
    assert np.abs(A.numpy() @ found.x - b.numpy()).max() < 1e-8
    assert_close(torch.from_numpy(found.x), z, rtol=0, atol=2e-5)
    assert activation.divergence(z, v).sum() <= found.fun + 1e-8


@few_activations
def test_the_equations_by_a_root_finder(activation):
    """The K + I optimality conditions u(z) = v + Aᵀλ, A z = b, as plain nonlinear equations."""
    v, A, b = problem(activation, n=(), size=1.5)

    def residual(multipliers):
        return (A @ activation.sigma(v + torch.from_numpy(multipliers) @ A) - b).numpy()

    solution = project(v, A, b, activation=activation)
    found = optimize.root(residual, solution.multipliers.numpy() + 0.05, tol=1e-12)
    assert np.abs(found.fun).max() < 1e-10
    assert_close(solution.multipliers, torch.from_numpy(found.x), rtol=1e-8, atol=1e-8)


@few_activations
def test_gradients_by_finite_differences_of_scipy_solutions(activation):
    """Neither our solver nor our backward: derivatives of an independent solve."""
    v, A, b = problem(activation, n=(), size=1.5)
    weights = torch.randn(K)
    start = project(v, A, b, activation=activation).multipliers.numpy()

    def value(v, b):
        def residual(m):
            return (A @ activation.sigma(v + torch.from_numpy(m) @ A) - b).numpy()

        m = optimize.root(residual, start, tol=1e-14).x
        return (activation.sigma(v + torch.from_numpy(m) @ A) @ weights).item()

    v.requires_grad_(), b.requires_grad_()
    z = project(v, A, b, activation=activation).z
    dv, db = torch.autograd.grad(z @ weights, (v, b))
    v, b, h = v.detach(), b.detach(), 1e-5
    for k in range(K):
        e = h * torch.eye(K)[k]
        assert (value(v + e, b) - value(v - e, b)) / (2 * h) == pytest.approx(
            dv[k].item(), rel=1e-5, abs=1e-6
        )
    for i in range(2):
        e = h * torch.eye(2)[i]
        assert (value(v, b + e) - value(v, b - e)) / (2 * h) == pytest.approx(
            db[i].item(), rel=1e-5, abs=1e-6
        )


def test_training_with_the_matched_loss_is_logistic_regression():
    """The minimum over W of the matched loss with Σz = 1 is multinomial logit, by SciPy."""
    x = torch.randn(60, 3)
    y = torch.eye(3)[torch.randint(3, (60,))]

    def nll(w):
        W = torch.from_numpy(w.reshape(3, 3)).requires_grad_()
        loss = -(y * (x @ W).log_softmax(-1)).sum(-1).mean() + 0.01 * W.square().sum()
        (g,) = torch.autograd.grad(loss, W)
        return loss.item(), g.numpy().ravel()

    def ours(w):
        W = torch.from_numpy(w.reshape(3, 3)).requires_grad_()
        solution = project(x @ W, torch.ones(1, 3), torch.ones(1), activation="exp")
        loss = matched_loss(solution, y) + 0.01 * W.square().sum()
        (g,) = torch.autograd.grad(loss, W)
        return loss.item(), g.numpy().ravel()

    one = optimize.minimize(nll, np.zeros(9), jac=True)
    other = optimize.minimize(ours, np.zeros(9), jac=True)
    assert other.fun == pytest.approx(one.fun, rel=1e-9)
    assert np.abs(one.x - other.x).max() < 1e-4


def test_margins_of_a_table_against_sinkhorn():
    n = 12
    cost = torch.rand(n, n)
    z = project(
        -cost.flatten() / 0.1, margins(n, n).to_sparse(), torch.ones(2 * n), activation="exp"
    ).z
    table = torch.exp(-cost / 0.1)
    for _ in range(2000):
        table = table / table.sum(1, keepdim=True)
        table = table / table.sum(0)
    assert_close(z.reshape(n, n), table, rtol=0, atol=1e-11)
