"""Laws of the projection, under hypothesis."""

import pytest
import torch
from hypothesis import assume, given, strategies as st
from torch.testing import assert_close

from measures import output_rounding
from tables import ROWS, K, apply, target
from taut import project

# hundreds of solves: the shapes are checked elsewhere
pytestmark = pytest.mark.usefixtures("as_user")

rows = st.sampled_from(sorted(ROWS))
seeds = st.integers(0, 2**31)
counts = st.integers(1, 3)
sizes = st.floats(0.1, 8.0)


def problem(name, seed, count, size, n=4):
    torch.manual_seed(seed)
    row = ROWS[name]
    v, A = size * (2 * torch.rand(n, K) - 1), torch.randn(count, K)
    # A z = b pins z down only as well as A is conditioned; the laws are about the rest
    assume(torch.linalg.cond(A) < 20)
    return row, v, A, apply(A, target(row, n))


def same(one, other, digits=1e-8):
    assert_close(one, other, rtol=digits, atol=digits)


@given(rows, seeds, counts, sizes)
def test_moving_v_along_the_rows_of_A_changes_nothing(name, seed, count, size):
    """v → v + Aᵀμ: z and u stay, λ → λ − μ."""
    row, v, A, b = problem(name, seed, count, size)
    shift = torch.randn(4, count)
    one = project(v, A, b, activation=row)
    other = project(v + shift @ A, A, b, activation=row)
    same(other.z, one.z)
    same(row.sigma(other.u), row.sigma(one.u))
    same(other.z, row.sigma(v + (other.multipliers + shift) @ A))


@given(rows, seeds, counts, sizes)
def test_writing_the_equations_differently_changes_nothing(name, seed, count, size):
    """(A, b) → (MA, Mb): z stays, λ → M⁻ᵀλ."""
    row, v, A, b = problem(name, seed, count, size)
    M = torch.eye(count) + 0.4 * torch.randn(count, count)
    assume(torch.linalg.cond(M) < 20)
    one = project(v, A, b, activation=row)
    other = project(v, M @ A, b @ M.mT, activation=row)
    same(other.z, one.z)
    same(other.z, row.sigma(v + (other.multipliers @ M) @ A))


@given(rows, seeds, counts, st.floats(0.1, 3.0))
def test_what_is_feasible_comes_back_at_once(name, seed, count, size):
    row, v, A, _ = problem(name, seed, count, size)
    solution = project(v, A, apply(A, row.sigma(v)), activation=row)
    assert solution.iterations.max() == 0
    assert ((solution.z - row.sigma(v)).abs() <= output_rounding(row, solution.z)).all()
    assert_close(solution.multipliers, torch.zeros(4, count), rtol=0, atol=0)


@given(rows, seeds, counts, sizes)
def test_projecting_twice_is_projecting_once(name, seed, count, size):
    row, v, A, b = problem(name, seed, count, size)
    one = project(v, A, b, activation=row)
    other = project(one.u, A, b, activation=row)
    same(other.z, one.z, 1e-10)


@given(rows, seeds, counts, sizes)
def test_a_batch_is_its_rows(name, seed, count, size):
    row, v, A, b = problem(name, seed, count, size)
    together = project(v, A, b, activation=row)
    for i in range(4):
        alone = project(v[i], A, b[i], activation=row)
        same(together.z[i], alone.z)
        assert together.status[i] == alone.status
        assert abs(together.iterations[i] - alone.iterations) <= 1


@given(rows, seeds, counts, sizes)
def test_an_A_for_each_sample_is_the_shared_A(name, seed, count, size):
    row, v, A, b = problem(name, seed, count, size)
    shared = project(v, A, b, activation=row)
    own = project(v, A.expand(4, count, K), b, activation=row)
    same(own.z, shared.z)
    assert own.multipliers.shape == shared.multipliers.shape


@given(rows, seeds, counts, sizes, st.permutations(range(4)))
def test_permuting_the_batch_permutes_the_result(name, seed, count, size, order):
    row, v, A, b = problem(name, seed, count, size)
    one = project(v, A, b, activation=row)
    other = project(v[order], A, b[order], activation=row)
    same(other.z, one.z[order])


@given(st.sampled_from(["exp", "linear", "sigmoid", "srlu", "tanh"]), seeds, counts, sizes)
def test_permuting_the_outputs_permutes_the_result(name, seed, count, size):
    """With one row for all coordinates, their order means nothing."""
    row, v, A, b = problem(name, seed, count, size)
    order = torch.randperm(K)
    one = project(v, A, b, activation=row)
    other = project(v[:, order], A[:, order], b, activation=row)
    same(other.z, one.z[:, order])


@given(st.sampled_from(["tanh", "linear", "srlu"]), seeds, counts, sizes)
def test_odd_activations_are_odd(name, seed, count, size):
    """(v, b) → (−v, −b) turns z and λ around."""
    row, v, A, b = problem(name, seed, count, size)
    one = project(v, A, b, activation=row)
    other = project(-v, A, -b, activation=row)
    same(other.z, -one.z)


@given(rows, seeds, counts, sizes)
def test_pythagoras(name, seed, count, size):
    """B(y‖σ(v)) = B(y‖z) + B(z‖σ(v)) for every feasible y."""
    row, v, A, _ = problem(name, seed, count, size)
    y = target(row, 4)
    solution = project(v, A, apply(A, y), activation=row)
    whole = row.divergence(y, v).sum(-1)
    parts = row.divergence(y, solution.u).sum(-1) + row.divergence(solution.z, v).sum(-1)
    same(parts, whole, 1e-8)
