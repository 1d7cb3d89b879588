"""Answers that are formulas; the lemmas and corollaries of the paper, one by one, as numbers."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import taut
from tables import (
    ALL,
    BACKENDS,
    SOLVERS,
    WEIGHTS,
    K,
    apply,
    each_activation,
    generator,
    prepared,
    target,
)
from taut import matched_loss, project
from taut.activations import tempered, weighted

# many solves: the shapes are checked elsewhere
pytestmark = pytest.mark.usefixtures("as_user")
N, J = 7, 4


def _f(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@dataclass(frozen=True)
class Known:
    """A problem whose answer is a formula."""

    name: str
    activation: str | taut.Activation
    v: Tensor
    A: Tensor
    b: Tensor
    z: Tensor
    multipliers: Tensor | None = None


def known() -> list[Known]:
    """Built anew for each call, from its own seed."""
    source = generator(7)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    v, A = randn(4, K), randn(2, K)
    b = randn(4, 2)
    one, ones = torch.ones(4, 1, dtype=torch.float64), torch.ones(1, K, dtype=torch.float64)
    gain = torch.linalg.solve(A @ A.mT, (b - v @ A.mT).mT).mT
    greg = torch.linalg.solve((A * WEIGHTS) @ A.mT, (b - (WEIGHTS * v) @ A.mT).mT).mT
    square, y = torch.eye(K, dtype=torch.float64) + 0.2 * randn(K, K), torch.sigmoid(randn(4, K))
    d = WEIGHTS * v.exp()
    blocks = torch.block_diag(_f(1, 1)[None], _f(1, 1, 1)[None])
    halves = torch.cat([v[:, :2].softmax(-1), 2 * v[:, 2:].softmax(-1)], -1)
    half = torch.full((4, K), 0.5, dtype=torch.float64)
    return [
        Known("softmax", "exp", v, ones, one, v.softmax(-1), -v.logsumexp(-1, keepdim=True)),
        Known("two softmaxes", "exp", v, blocks, _f(1, 2), halves),
        Known("weighted softmax", weighted("exp", WEIGHTS), v, ones, one, d / d.sum(-1, True)),
        Known("tempered softmax", tempered("exp", 0.5), v, ones, one, (v / 0.5).softmax(-1)),
        Known("orthogonal projection", "linear", v, A, b, v + gain @ A, gain),
        Known(
            "GREG weights",
            weighted("linear", WEIGHTS),
            v,
            A,
            b,
            WEIGHTS * (v + greg @ A),
            greg,
        ),
        Known("I = K", "sigmoid", v, square, y @ square.mT, y),
        Known("I = 0", "tanh", v, A[:0], b[:, :0], v.tanh(), b[:, :0]),
        Known("equal logits", "sigmoid", 0 * v, ones, _f(2.5), half),
        Known("K = 1", "exp", v[:, :1], _f(2)[None], _f(3), 1.5 * torch.ones_like(v[:, :1])),
    ]


KNOWN = {case.name: case for case in known()}


@pytest.mark.parametrize(
    ("name", "solver"),
    # gradient descent takes thousands of steps where I = K
    [(name, solver) for name in KNOWN for solver in SOLVERS if (name, solver[0]) != ("I = K", "G")],
)
def test_known_answers(name, solver):
    case, (method, tolerance) = KNOWN[name], SOLVERS[solver]
    solution = taut.project(
        case.v, case.A, case.b, activation=case.activation, solver=method, on_failure="return"
    )
    assert_close(solution.z, case.z, rtol=0, atol=tolerance)
    if case.multipliers is not None:
        assert_close(solution.multipliers, case.multipliers, rtol=0, atol=10 * tolerance)


# The paper


def data(activation, rows=2):
    """x, W, A and targets y with A y = b: one layer on top of J features."""
    x, W, A = torch.randn(N, J), torch.randn(J, K), torch.randn(rows, K)
    y = target(activation, N)
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
    x, W, A, b, y = data(ALL["linear"])
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


@each_activation
def test_lemma_dual_objective(activation):
    """max over z of the Lagrangian is E(W, λ) = −yᵀWᵀx − bᵀλ + eᵀφ(Wᵀx + Aᵀλ), at z = σ(u)."""
    x, W, A, b, y = data(activation)
    v, multipliers = (x @ W).detach(), torch.randn(N, 2)

    def lagrangian(z):
        slack = ((apply(A, z) - b) * multipliers).sum(-1)
        return ((z - y) * v).sum(-1) - activation.psi(z).sum(-1) + slack

    u = v + multipliers @ A
    dual = -(y * v).sum(-1) - (b * multipliers).sum(-1) + activation.phi(u).sum(-1)
    best = activation.sigma(u)
    assert_close(lagrangian(best), dual, rtol=1e-8, atol=1e-9)
    for _ in range(20):
        assert bool((lagrangian(target(activation, N)) < dual).all())
    # since A y = b, it is −yᵀu + eᵀφ(u)
    assert_close(dual, -(y * u).sum(-1) + activation.phi(u).sum(-1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1e2, 1e4, 1e6, 1e9])
@pytest.mark.parametrize("way", [*BACKENDS, "sparse", "own A", "started"])
def test_masked_softmaxes(way, size, dtype):
    """Logits of −1e9 are the usual mask; of rows that are masked whole, all the same."""
    v, blocks = 3 * torch.randn(256, 8, 8), torch.kron(torch.eye(8), torch.ones(1, 8))
    v = v.masked_fill(torch.rand(v.shape) < 0.5, -size)
    v[:50, 1], v[60] = -size, -size
    v[70] -= size * torch.arange(8.0).unsqueeze(-1)
    v, A = v.to(dtype), blocks.to(dtype)
    expected, v = v.double().softmax(-1).flatten(1), v.flatten(1)
    options = {"activation": "exp"}
    if way in BACKENDS:
        A, options = prepared(A, "exp", way), {}
    if way == "sparse":
        A = A.to_sparse()
    if way == "own A":
        A = A.expand(256, 8, 64)
    if way == "started":
        options["init"] = 10 * torch.randn(256, 8, dtype=dtype)
    found = project(v, A, v.new_ones(8), **options)
    eps = 4 * torch.finfo(torch.float64).eps * size  # of u = v + λ
    rounding = 4 * torch.finfo(dtype).eps
    assert_close(found.z.double(), expected, rtol=0, atol=rounding + eps)
    assert found.iterations.max() <= 40


@each_activation
def test_lemma_dual_objective_is_least_at_the_multipliers(activation):
    """Solving for λ by minimisation: no other λ is better, and there is no duality gap."""
    x, W, A, b, y = data(activation)
    v = (x @ W).detach()
    solution = project(v, A, b, activation=activation)

    def E(multipliers):
        u = v + multipliers @ A
        return -(y * v).sum(-1) - (b * multipliers).sum(-1) + activation.phi(u).sum(-1)

    least = E(solution.multipliers)
    for size in (1e-2, 1.0):
        assert bool((E(solution.multipliers + size * torch.randn(N, 2)) > least).all())
    z = solution.z
    primal = ((z - y) * v).sum(-1) - activation.psi(z).sum(-1)
    assert_close(primal, least, rtol=1e-8, atol=1e-8)


@each_activation
def test_corollary_the_predictor_satisfies_the_constraints(activation):
    x, W, A, b, _ = data(activation)
    solution = project(x @ W, A, b, activation=activation)
    assert_close(apply(A, solution.z), b, rtol=0, atol=1e-11)
    assert_close(
        solution.z, activation.sigma(x @ W + solution.multipliers @ A), rtol=1e-9, atol=1e-10
    )


@each_activation
def test_dual_objective_is_jointly_convex_in_W_and_lambda(activation):
    """Stated without proof in the paper: midpoints lie below chords in (W, {λ_n}) together."""
    x, _, A, _, y = data(activation)

    def E(W, multipliers):
        u = x @ W + multipliers @ A
        return (-(y * u).sum(-1) + activation.phi(u).sum(-1)).sum()

    for _ in range(20):
        one = torch.randn(J, K), torch.randn(N, 2)
        other = torch.randn(J, K), torch.randn(N, 2)
        middle = [0.5 * (p + q) for p, q in zip(one, other, strict=True)]
        assert E(*middle) < 0.5 * (E(*one) + E(*other))
