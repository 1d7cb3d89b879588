"""The lemmas and corollaries of the paper, one by one, as numbers."""

import pytest
import torch
from torch.testing import assert_close

from tables import ROWS, K, apply, target
from taut import matched_loss, project

# many solves: the shapes are checked elsewhere
pytestmark = pytest.mark.usefixtures("as_user")
N, J = 7, 4
each_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())


def data(row, rows=2):
    """x, W, A and targets y with A y = b: one layer on top of J features."""
    x, W, A = torch.randn(N, J), torch.randn(J, K), torch.randn(rows, K)
    y = target(row, N)
    return x, W.requires_grad_(), A, apply(A, y), y


def test_lemma_mclr_eliminating_z_and_lambda_gives_the_softmax_nll():
    """Lemma (Lag_MC-LR_zlamsol): λ = −log Σ exp(w_kᵀx), z is softmax, R is −log p of the class."""
    x, W = torch.randn(N, J), torch.randn(J, K, requires_grad=True)
    y = torch.eye(K)[torch.randint(K, (N,))]
    v = x @ W
    solution = project(v, torch.ones(1, K), torch.ones(1), activation="exp")
    assert_close(solution.multipliers, -v.logsumexp(-1, keepdim=True))
    assert_close(solution.z, v.softmax(-1))
    nll = -(y * v).sum(-1) + v.logsumexp(-1)
    assert_close(matched_loss(solution, y, reduction="none"), nll)
    # (W, λ(W)) in eq. MC-LR_lambda differs from the NLL by the constant Σz = 1
    R = -(y * (v + solution.multipliers)).sum(-1) + (v + solution.multipliers).exp().sum(-1)
    assert_close(R - nll, torch.ones(N))
    (ours,) = torch.autograd.grad(matched_loss(solution, y, reduction="sum"), W, retain_graph=True)
    (theirs,) = torch.autograd.grad(nll.sum(), W)
    assert_close(ours, theirs)


def test_lemma_l2_the_gradient_lies_in_the_nullspace_of_A():
    """λ = (AAᵀ)⁻¹(b − AWᵀx), P² = P, PQ = 0, AP = 0, AQ = I, and A ∇_W R = 0 when A y = b."""
    x, W, A, b, y = data(ROWS["linear"])
    gram = A @ A.mT
    P = torch.eye(K) - A.mT @ torch.linalg.solve(gram, A)
    Q = A.mT @ torch.linalg.inv(gram)
    zero = {"rtol": 0, "atol": 1e-12}
    assert_close(P @ P, P)
    assert_close(P @ Q, torch.zeros(K, 2), **zero)
    assert_close(A @ P, torch.zeros(2, K), **zero)
    assert_close(A @ Q, torch.eye(2))
    v = x @ W
    solution = project(v, A, b)
    assert_close(solution.multipliers, torch.linalg.solve(gram, (b - v @ A.mT).mT).mT)
    assert_close(solution.z, v @ P.mT + b @ Q.mT)
    # eq. RL2_final, up to terms without W
    R = -(y * v).sum(-1) + (v * (b @ Q.mT)).sum(-1) + 0.5 * (v @ P * v).sum(-1)
    (expected,) = torch.autograd.grad(R.sum(), W, retain_graph=True)
    (gradient,) = torch.autograd.grad(matched_loss(solution, y, reduction="sum"), W)
    assert_close(gradient, expected)
    assert_close(gradient, x.mT @ (solution.z - y).detach())
    assert_close(A @ gradient.mT, torch.zeros(2, J), rtol=0, atol=1e-11)


@each_row
def test_corollary_psi_is_convex(row):
    """ψ'(z) = u(z) and ψ''(z) = u'(z) = 1/σ'(u(z)) > 0."""
    u = torch.linspace(-3, 3, 31)[:, None].repeat(1, K)
    z = row.sigma(u).requires_grad_()
    (first,) = torch.autograd.grad(row.psi(z).sum(), z, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z)
    assert_close(first.detach(), u, rtol=1e-9, atol=1e-10)
    assert_close(second, row.slope(u).reciprocal(), rtol=1e-7, atol=0)
    one, other = target(row, 200), target(row, 200)
    chord = 0.5 * (row.psi(one) + row.psi(other))
    assert bool((row.psi(0.5 * (one + other)) < chord).all())


@each_row
def test_corollary_bregman_divergence_is_convex_in_z(row):
    one, other, v = target(row, 40), target(row, 40), target(row, 40)
    for t in (0.25, 0.5, 0.75):
        chord = t * row.bregman(one, v) + (1 - t) * row.bregman(other, v)
        assert bool((row.bregman(t * one + (1 - t) * other, v) < chord).all())


@each_row
def test_lemma_difference_of_bregman_divergences_is_linear_in_W(row):
    """B(y‖σ(Wᵀx)) − B(z‖σ(Wᵀx)) = (z − y)ᵀWᵀx − eᵀψ(z) + eᵀψ(y): no curvature in W."""
    y, z = target(row, N), target(row, N)
    x = torch.randn(N, J)
    one, other = 0.3 * torch.randn(2, J, K)  # B is computed from σ(Wᵀx): it must not saturate

    def difference(W):
        v = row.sigma(x @ W)
        return (row.bregman(y, v) - row.bregman(z, v)).sum(-1)

    closed = ((z - y) * (x @ one)).sum(-1) - row.psi(z).sum(-1) + row.psi(y).sum(-1)
    assert_close(difference(one), closed, rtol=1e-8, atol=1e-9)
    for t in (-0.5, 0.3):
        line = t * difference(one) + (1 - t) * difference(other)
        assert_close(difference(t * one + (1 - t) * other), line, rtol=1e-7, atol=1e-8)


def test_corollary_l2_difference_of_bregman_divergences_is_that_of_squared_norms():
    row = ROWS["linear"]
    y, z, v = torch.randn(3, N, K)
    difference = row.bregman(y, v) - row.bregman(z, v)
    assert_close(difference, 0.5 * (y - v).square() - 0.5 * (z - v).square())
    assert_close(difference, (z - y) * v + 0.5 * y.square() - 0.5 * z.square())


@each_row
def test_lemma_dual_objective(row):
    """max over z of the Lagrangian is E(W, λ) = −yᵀWᵀx − bᵀλ + eᵀφ(Wᵀx + Aᵀλ), at z = σ(u)."""
    x, W, A, b, y = data(row)
    v, multipliers = (x @ W).detach(), torch.randn(N, 2)

    def lagrangian(z):
        slack = ((apply(A, z) - b) * multipliers).sum(-1)
        return ((z - y) * v).sum(-1) - row.psi(z).sum(-1) + slack

    u = v + multipliers @ A
    dual = -(y * v).sum(-1) - (b * multipliers).sum(-1) + row.phi(u).sum(-1)
    best = row.sigma(u)
    assert_close(lagrangian(best), dual, rtol=1e-8, atol=1e-9)
    for _ in range(20):
        assert bool((lagrangian(target(row, N)) < dual).all())
    # since A y = b, it is −yᵀu + eᵀφ(u)
    assert_close(dual, -(y * u).sum(-1) + row.phi(u).sum(-1), rtol=1e-9, atol=1e-9)


@each_row
def test_lemma_dual_objective_is_least_at_the_multipliers(row):
    """Solving for λ by minimisation: no other λ is better, and there is no duality gap."""
    x, W, A, b, y = data(row)
    v = (x @ W).detach()
    solution = project(v, A, b, activation=row)

    def E(multipliers):
        u = v + multipliers @ A
        return -(y * v).sum(-1) - (b * multipliers).sum(-1) + row.phi(u).sum(-1)

    least = E(solution.multipliers)
    for size in (1e-2, 1.0):
        assert bool((E(solution.multipliers + size * torch.randn(N, 2)) > least).all())
    z = solution.z
    primal = ((z - y) * v).sum(-1) - row.psi(z).sum(-1)
    assert_close(primal, least, rtol=1e-8, atol=1e-8)


@each_row
def test_corollary_the_predictor_satisfies_the_constraints(row):
    x, W, A, b, _ = data(row)
    solution = project(x @ W, A, b, activation=row)
    assert_close(apply(A, solution.z), b, rtol=0, atol=1e-11)
    assert_close(solution.z, row.sigma(x @ W + solution.multipliers @ A), rtol=1e-9, atol=1e-10)


@each_row
def test_dual_objective_is_jointly_convex_in_W_and_lambda(row):
    """Stated without proof in the paper: midpoints lie below chords in (W, {λ_n}) together."""
    x, _, A, _, y = data(row)

    def E(W, multipliers):
        u = x @ W + multipliers @ A
        return (-(y * u).sum(-1) + row.phi(u).sum(-1)).sum()

    for _ in range(20):
        one = torch.randn(J, K), torch.randn(N, 2)
        other = torch.randn(J, K), torch.randn(N, 2)
        middle = [0.5 * (p + q) for p, q in zip(one, other, strict=True)]
        assert E(*middle) < 0.5 * (E(*one) + E(*other))


@pytest.mark.parametrize("name", ["exp", "sigmoid", "tanh", "linear", "srlu"])
def test_eq_1_is_the_matched_loss_up_to_a_constant(name):
    """ℓ = −yᵀu + eᵀφ(u), the paper's loss; ours adds ψ(y)."""
    row = ROWS[name]
    x, W, A, b, y = data(row)
    solution = project(x @ W, A, b, activation=row)
    paper = -(y * solution.u).sum(-1) + row.phi(solution.u).sum(-1)
    ours = matched_loss(solution, y, reduction="none")
    assert_close(ours - row.psi(y).sum(-1), paper, rtol=1e-9, atol=1e-9)
