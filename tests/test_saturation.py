"""Derivatives where activations have saturated, against ball arithmetic at the λ and u returned."""

import math
import sys

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import taut
from fuzzing.blocks import make_block
from fuzzing.gradients import (
    POSED,
    Asked,
    Case,
    allowed,
    case_of,
    check_gradients,
    differentiate,
    distance,
    gradients_of,
)
from fuzzing.laws import law_of
from fuzzing.precise import Precise, column, independent, matrix
from tables import SEED, needs_cpu
from taut.analysis.sifting import sift
from taut.backends import pull_stably
from taut.maps import as_map
from taut.systems import EVEN, pull, solve_stably
from taut.systems.stable import rebase

pytestmark = pytest.mark.usefixtures("as_user")
LOGITS = {"sigmoid": 60.0, "tanh": 30.0, "exp": 20.0}
forward_mode = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
each_law = pytest.mark.parametrize("name", LOGITS)


def pulled(w, A, g_z=None, g_u=None, g_ν=None, whole=False):
    """`pull` of samples with these slopes; what is not given is 0."""
    g_z, g_u = (torch.zeros_like(w) if g is None else g for g in (g_z, g_u))
    g_ν = w.new_zeros(len(w), A.shape[-2]) if g_ν is None else g_ν
    prepared = taut.prepare(A.detach(), "exp")
    return pull(w, as_map(A), None, g_z, g_u, g_ν, prepared, whole)


@pytest.fixture
def routes(monkeypatch):
    """How many samples went to Gauss–Jordan, call by call."""
    counts = []

    def counted(A, w, *given):
        counts.append(len(w))
        return pull_stably(A, w, *given)

    monkeypatch.setattr(taut.Prepared, "pull_stably", staticmethod(counted))
    return counts


def off(name, v, A, b, init=None):
    """For each sample that is well-posed: how far its derivatives are off, of what is allowed."""
    rng, found = np.random.default_rng([SEED, 5]), []
    own = A if A.ndim == 3 else A.expand(len(v), *A.shape)
    asked = Asked.draw(rng, own.double().numpy(), v.numpy().dtype.type)
    solution, first, second = differentiate(
        lambda v, A, b: taut.project(v, A, b, activation=name, init=init, on_failure="return"),
        [v, own, b],
        asked,
    )
    law, eps = law_of(name, v.shape[-1]), torch.finfo(v.dtype).eps
    for row in solution.converged.nonzero().flatten().tolist():
        known = case_of(law, own[row].numpy(), solution, asked, row).truth()
        if known is None:  # slopes that underflow, or gradients beyond the numbers there are
            continue
        truth, product, effect = known
        pairs = [(truth, first)] + ([(product, second)] if eps < 1e-10 else [])
        gaps = [max(distance(x, gradients_of(y, row)).values()) for x, y in pairs]
        found.append(max(gaps) / allowed(effect, eps))
    return found


def test_a_well_conditioned_number_is_right():
    A = torch.tensor([[1.0, 1, 0], [1, 0, 1]])
    v = torch.tensor([0.0, 34, 37], requires_grad=True)
    b = (A @ torch.sigmoid(v.detach())).requires_grad_()
    dv, db = torch.autograd.grad(taut.project(v, A, b, activation="sigmoid").z[0], (v, b))
    assert_close(db, torch.tensor([0.04742587, 0.95257413]), rtol=0, atol=1e-8)
    assert_close(dv, 8.12836039e-17 * torch.tensor([1.0, -1, -1]), rtol=1e-8, atol=0)


@each_law
@pytest.mark.parametrize("where", ["interior", "at σ(v)"])
def test_first_and_second_derivatives_are_right_wherever_a_sample_converges(name, where):
    n, (I, K) = 80, (3, 6)
    row = taut.activations.ACTIVATIONS[name]
    v, A = (2 * torch.rand(n, K) - 1) * LOGITS[name], torch.randn(n, I, K)
    z = row.sigma(v if where == "at σ(v)" else torch.randn(n, K))
    found = off(name, v, A, (A @ z.unsqueeze(-1)).squeeze(-1))
    assert len(found) > 0.8 * n and max(found) <= 1


@pytest.mark.parametrize(
    "A",
    [
        torch.tensor([[1.0, 1, 0, 1, 0, 0], [0, 1, 1, 0, 1, 0], [1, 2, 1, 1, 1, 0]]),
        torch.tensor([[1.0, 1, 1, 0, 0, 0], [1, 1, 1 + 1e-6, 0, 0, 0], [0, 0, 0, 1, 1, 1]]),
        torch.tensor([[1e5, 1e5, 1e5, 0, 0, 0], [0, 0, 1e-5, 1e-5, 1e-5, 1e-5]]),
        torch.tensor(
            [[1.0, 2, 1, 1, 0, 0], [1, 0, -1, 1, 0, 0], [1, 1, 0, 1, 0, 0], [0, 1, 1, 0, 0, 0]]
        )
        * torch.tensor([[2.0**13], [2.0**5], [1.0], [2.0**-13]]),
    ],
    ids=["redundant", "nearly redundant", "of very different size", "redundant, of different size"],
)
@pytest.mark.filterwarnings("ignore:A is ill-conditioned")
def test_whatever_the_equations(A):
    v, A = (2 * torch.rand(40, 6) - 1) * 40, A.double()
    found = off("sigmoid", v, A, torch.rand(40, 6) @ A.mT)
    assert len(found) > 30 and max(found) <= 1


def test_an_output_that_an_equation_pins():
    """There t = 0, and second derivatives divide its rounding by the slope."""
    A, u = torch.tensor([[0.0, 0, 0, 1]]), torch.tensor([[-12.2, 14.7, 10.1, -10.6]]).double()
    v = u.expand(20, 4).contiguous()
    found = off("tanh", v, A.double(), v[:, 3:].tanh())
    assert len(found) == 20 and max(found) <= 1


def test_float32_is_differentiated_in_float64():
    v, A = (2 * torch.rand(40, 6) - 1).float() * 25, torch.randn(40, 3, 6).float()
    b = (A @ torch.rand(40, 6, 1).float()).squeeze(-1)
    found = off("sigmoid", v, A, b)
    assert len(found) > 30 and max(found) <= 1


def precisely(A, w, g_z=None, g_u=None, g_ν=None):
    """∂v and ∂b in ball arithmetic, with these very slopes."""
    (I, K), zero = A.shape, column(np.zeros(len(w)))
    sample = Precise(matrix(A.numpy()), column(np.zeros(I)), zero, column(w), zero, tuple(range(I)))
    sizes = {"g_z": K, "g_ν": I, "g_u": K}
    given = [g_z, g_ν, g_u]
    g = [np.zeros(n) if g is None else g for g, n in zip(given, sizes.values(), strict=True)]
    found = sample.gradients(*map(column, g))
    return torch.from_numpy(found.v[:, 0]), torch.from_numpy(found.b[:, 0])


def gap(one, other):
    """The largest difference, of the largest entry."""
    return ((one - other).abs().max() / other.abs().max()).item()


def test_dense_problems_are_right_to_ten_digits():
    slope, n = taut.activations.sigmoid.slope, 400
    w, A, g = slope(60 * (2 * torch.rand(n, 6) - 1)), torch.randn(n, 3, 6), torch.randn(n, 6)
    x, s, _ = pulled(w, A, g)
    for i in range(n):
        bound = 1e-13 * max(1e3, torch.linalg.cond(heaviest(A[i], w[i])).item())
        true_x, true_s = precisely(A[i], w[i], g[i])
        assert gap(x[i], true_x) < bound and gap(s[i], true_s) < bound


@pytest.mark.parametrize("solve", [solve_stably, pull_stably], ids=["torch", "compiled"])
@pytest.mark.parametrize("small", [1e-20, 1e-40, 1e-80])
def test_heavy_columns_that_depend_on_each_other(solve, small):
    """Rounding that elimination leaves of them must not pass for a light column."""
    A = torch.tensor([[3.0, 6, 1, 2, 0], [1, 2, 1 / 3, 0, 5], [7, 14, 7 / 3, 1, 1]])[None] * 3
    w = torch.tensor([[1.0, 0.7, 0.4, 2 * small, small]])
    g = torch.tensor([[0.3, -1.0, 0.5, 0.2, 0.9]])
    A = A.round()
    x, s, _ = solve(A, w, None, g, torch.zeros_like(g), torch.zeros(1, 3))
    true_x, true_s = precisely(A[0], w[0], g[0])
    assert gap(x[0], true_x) < 1e-12 and gap(s[0], true_s) < 1e-12


@needs_cpu
def test_a_line_keeps_its_digits_where_the_gradient_is_nearly_one_of_b():
    """∂v is then a small part of what it is summed from, and A's inverse is made once for all."""
    generator, heavy = torch.Generator().manual_seed(SEED), 6
    g = torch.eye(26, dtype=torch.float64)[-heavy:]
    for _ in range(24):
        A = torch.randn(8, 26, generator=generator).double() * 10 ** torch.linspace(-4, 4, 26)
        v = torch.randn(heavy, 26, generator=generator).double().requires_grad_()
        solution = taut.project(v, A, torch.zeros(heavy, 8).double(), activation="linear")
        (found,) = torch.autograd.grad(solution.z, v, g)
        for i in range(heavy):
            assert gap(found[i], precisely(A, torch.ones(26).double(), g[i])[0]) < 1e-8


def test_small_pivots_in_a_chain_are_noticed(routes):
    """Their smallest ratio to the diagonal is 5e-7 only, yet Cholesky is off by 1e-4."""
    c = 1e-6
    A = torch.tensor([[1.0, 1, 0, 0, 1], [1, 0, 1, 0, 1], [0, 1, 0, 1, 0]])
    w, g = torch.tensor([[1.0, c, c**2, c**2, 1.0]]), torch.randn(1, 5)
    pulled(w, A, g)
    assert routes == [1]


@pytest.mark.parametrize("solve", [solve_stably, pull_stably], ids=["torch", "compiled"])
def test_gradients_of_u_and_of_multipliers_alone(solve):
    A, w = torch.randn(50, 3, 6), 10.0 ** -(30 * torch.rand(50, 6))
    zeros = torch.zeros(50, 6), torch.zeros(50, 3)
    for g_u, g_ν in ((torch.randn(50, 6), zeros[1]), (zeros[0], torch.randn(50, 3))):
        x, s, _ = solve(A, w, None, zeros[0], g_u, g_ν)
        for i in range(50):
            given = A[i], w[i], g_u[i], g_ν[i]
            true = precisely(A[i], w[i], None, g_u[i], g_ν[i])
            bound = 1e-13 * torch.linalg.cond(heaviest(A[i], w[i])).item()
            gaps = [gap(one, other) for one, other in zip((x[i], s[i]), true, strict=True)]
            assert max(gaps) < bound or max(gaps) < 10 * effect(given, true)


def effect(given, true):
    """How far changes of 2^-52 in A, w, g_u and g_ν move the answer, at most, in five trials."""
    found = 0.0
    for _ in range(5):
        A, w, g_u, g_ν = (x * (1 + 2.0**-52 * torch.randn_like(x).sign()) for x in given)
        moved = precisely(A, w, None, g_u, g_ν)
        found = max(found, *(gap(one, other) for one, other in zip(moved, true, strict=True)))
    return found


def heaviest(A, w):
    return A[:, rebase(A[None], w[None], None).place[0]]


@pytest.mark.parametrize("solve", [solve_stably, pull_stably], ids=["torch", "compiled"])
def test_the_gradient_in_v_obeys_the_equations(solve):
    A, w = torch.randn(50, 3, 6), 10.0 ** -(40 * torch.rand(50, 6))
    g_ν = torch.randn(50, 3)
    x, _, _ = solve(A, w, None, torch.randn(50, 6), torch.randn(50, 6), g_ν)
    left = (A @ x.unsqueeze(-1)).squeeze(-1) + g_ν
    condition = torch.stack([torch.linalg.cond(heaviest(a, b)) for a, b in zip(A, w, strict=True)])
    size = (A.abs() @ x.abs().unsqueeze(-1)).squeeze(-1) + g_ν.abs()
    assert (left.abs() <= 1e-14 * condition.unsqueeze(-1) * size.amax(-1, True)).all()


@forward_mode
@pytest.mark.parametrize("even", [EVEN, math.inf], ids=["Cholesky", "Gauss–Jordan"])
@pytest.mark.parametrize("own", [False, True], ids=["shared A", "A per sample"])
def test_pull_is_differentiable_twice(even, own, monkeypatch, routes):
    monkeypatch.setattr(sys.modules[pull.__module__], "EVEN", even)
    n, I, K = 2, 2, 4
    w = (0.5 + torch.rand(n, K)).requires_grad_()
    A = torch.randn(*([n] * own), I, K, requires_grad=True)
    given = [torch.randn(n, m, requires_grad=True) for m in (K, K, I)]

    def f(w, A, *given):
        return tuple(pulled(w, A, *given, whole=True))

    assert gradcheck(f, (w, A, *given), check_forward_ad=True)
    assert gradgradcheck(f, (w, A, *given))
    assert bool(routes) == math.isinf(even)


def margins(rows, columns):
    """The sums of a table; the last equation follows from the others."""
    ones = torch.ones(1, columns), torch.ones(1, rows)
    return torch.cat(
        [torch.kron(torch.eye(rows), ones[0]), torch.kron(ones[1], torch.eye(columns))]
    )


@pytest.mark.parametrize("name", LOGITS)
@pytest.mark.parametrize("kind", ["margins", "patchy"])
def test_a_sparse_A_is_differentiated_like_a_dense_one(name, kind):
    A = margins(3, 4) if kind == "margins" else torch.eye(4, 9) + (torch.rand(4, 9) < 0.3)
    (I, K), n = A.shape, 10
    row = taut.activations.ACTIVATIONS[name]
    v = (2 * torch.rand(n, K) - 1) * LOGITS[name]
    b, g = row.sigma(torch.randn(n, K)) @ A.mT, torch.randn(n, K)
    law, direction = law_of(name, K), np.ones(K)
    v, b = v.requires_grad_(), b.requires_grad_()
    solution = taut.project(v, A.to_sparse(), b, activation=name, on_failure="return")
    first = torch.autograd.grad((solution.z * g).sum(), (v, b), create_graph=True)
    second = torch.autograd.grad(first[0].sum(), (v, b))
    checked = 0
    for i in solution.converged.nonzero().flatten().tolist():
        at = (x[i].detach().numpy() for x in (solution.multipliers, solution.u))
        given = g[i].numpy(), np.zeros(I), np.zeros(K)
        along = direction, np.zeros(I), np.zeros((I, K))
        truth = Case(law, A.numpy(), *at, given, along, independent(A.numpy()), True).truth()
        for true, found in zip(truth[:2], (first, second), strict=True):
            parts = dict(zip(("∂v", "∂b"), (x.detach() for x in found), strict=True))
            gaps = distance(true, gradients_of(parts, i))
            assert max(gaps["∂v"], gaps["∂b"]) <= allowed(truth[2], 0.0)
        checked += 1
    assert checked >= 8


def test_redundant_equations_of_a_sparse_A_are_found():
    A = margins(3, 4)
    sifted = sift(as_map(A.to_sparse()), 1e-16)
    assert int(sifted.left_out.sum()) == 1
    assert_close(sifted.project(A.mT), A.mT, rtol=0, atol=1e-14)
    assert torch.linalg.matrix_rank(A[~sifted.left_out]) == 6
    nearly = torch.tensor([[1.0, 1, 0], [1, 1 + 1e-7, 0], [0, 1, 1]])
    assert sift(as_map(nearly.to_sparse()), 1e-16).left_out is None


def test_held_outputs_and_equations_left_out_take_no_part():
    A, g = torch.randn(1, 3, 6), torch.randn(4, 6)
    w = torch.rand(4, 6) + 0.1
    w[:, 4] = 0
    mask = torch.tensor([True, False, True]).expand(4, 3)
    zeros = torch.zeros(4, 6), torch.zeros(4, 3)
    without = A[0][[0, 2]].contiguous(), w
    expected = pulled(without[1], without[0], g)
    prepared = taut.prepare(A[0], "exp")
    for whole in (False, True):
        found = pull(w, as_map(A[0]), mask, g, *zeros, prepared, whole)
        stable = pull_stably(A, w, ~mask, g, *zeros)
        for one in (found, stable):
            assert_close(one.x, expected.x, rtol=0, atol=1e-13)
            assert_close(one.s[:, [0, 2]], expected.s, rtol=0, atol=1e-12)
            assert (one.x[:, 4] == 0).all() and (one.s[:, 1] == 0).all()


def test_equations_whose_slopes_are_all_zero_have_no_gradient():
    A = torch.tensor([[[1.0, 1, 0, 0], [0, 0, 1, 1]]])
    w, g = torch.tensor([[1.0, 1, 0, 0]]), torch.ones(1, 4)
    for solve in (solve_stably, pull_stably):
        x, s, t = solve(A, w, None, g, 0 * g, torch.zeros(1, 2))
        assert s.tolist() == [[1, 0]] and x.tolist() == [[0, 0, 0, 0]] and t.isfinite().all()


def test_a_sample_has_the_same_bits_alone_and_in_a_batch():
    K, I, n = 12, 5, 33
    A, u, g = torch.randn(I, K), (2 * torch.rand(n, K) - 1) * 40, torch.randn(n, K)
    prepared = taut.prepare(A, "sigmoid")
    taut.project(u, prepared, torch.rand(n, K) @ A.mT)  # makes the plan
    status = torch.zeros(n, dtype=torch.long)
    together = prepared.backend.pullback(u, status, (g, None, None))
    if together is None:
        pytest.skip("no compiled kernel")
    for i in range(n):
        one = slice(i, i + 1)
        alone = prepared.backend.pullback(u[one], status[one], (g[one], None, None))
        assert alone[0].equal(together[0][one]) and alone[1].equal(together[1][one])


def test_compiled_and_torch_agree():
    A, w = torch.randn(40, 4, 9), 10.0 ** -(60 * torch.rand(40, 9))
    given = torch.randn(40, 9), torch.randn(40, 9), torch.randn(40, 4)
    for one, other in zip(
        pull_stably(A, w, None, *given), solve_stably(A, w, None, *given), strict=True
    ):
        for i in range(40):
            assert gap(one[i], other[i]) < 1e-13 * torch.linalg.cond(heaviest(A[i], w[i]))


@each_law
def test_ordinary_samples_are_left_to_cholesky(name, routes):
    row, bound = taut.activations.ACTIVATIONS[name], 1.0 if name == "tanh" else 2.0
    for K in (4, 10, 30):
        A, u = torch.randn(K // 2, K), (2 * torch.rand(500, K) - 1) * bound
        pulled(row.slope(u), A, torch.randn(500, K))
    assert not routes


@forward_mode
def test_forward_mode_is_reverse_mode():
    A, v = torch.randn(3, 6), (2 * torch.rand(6) - 1) * 30
    b = A @ torch.rand(6)

    def f(v, A, b):
        solution = taut.project(v, A, b, activation="sigmoid")
        return solution.z, solution.multipliers

    for inputs in range(3):
        forward = torch.func.jacfwd(f, inputs)(v, A, b)
        reverse = torch.func.jacrev(f, inputs)(v, A, b)
        for one, other in zip(forward, reverse, strict=True):
            assert_close(one, other, rtol=1e-7, atol=1e-9 * other.abs().max().item())


def test_gradients_in_a_batch_are_those_one_by_one():
    """Of all directions of one z at once; some need another basis and some do not."""
    A, v = torch.randn(3, 6), ((2 * torch.rand(4, 6) - 1) * 15).requires_grad_()
    z = taut.project(v, A, torch.rand(4, 6) @ A.mT, activation="sigmoid").z
    directions = torch.randn(5, 4, 6)
    (together,) = torch.autograd.grad(z, v, directions, is_grads_batched=True, retain_graph=True)
    for found, direction in zip(together, directions, strict=True):
        (alone,) = torch.autograd.grad(z, v, direction, retain_graph=True)
        assert_close(found, alone, rtol=0, atol=1e-8 * alone.abs().max().item())


def test_the_fuzzer_notices_a_wrong_gradient(monkeypatch):
    blocks = [make_block(SEED, number, 16) for number in range(12)]
    assert not any(check_gradients(block)[0] for block in blocks)
    wrong = lambda *given: pull(given[0] * (1 + 1e-6 * torch.rand_like(given[0])), *given[1:])  # noqa: E731
    monkeypatch.setattr("taut.problems.linear.pull", wrong)
    assert any(check_gradients(block)[0] for block in blocks)


def test_exact_rank_of_equations():
    assert independent(np.array([[1.0, 2], [2, 4], [0, 1]])) == (0, 2)
    assert POSED < 1e-8
