"""Laws of the projection: a batch is its samples; symmetries of (v, A, b), under hypothesis."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, strategies as st
from torch.testing import assert_close

import taut
from measures import (
    assert_edge_verdicts,
    assert_same_answers,
    assert_same_derivatives,
    output_rounding,
    solve_and_differentiate,
    spread,
)
from tables import (
    ALL,
    DIFFERENTIABLE,
    FEW,
    REGIMES,
    K,
    apply,
    both_dtypes,
    each_backend,
    has,
    prepared,
    problem,
    target,
)
from taut import Status, project
from taut.backends import Rules
from taut.maps import BatchedMap, DenseMap
from taut.pose import pose

# hundreds of solves: the shapes are checked elsewhere
pytestmark = pytest.mark.usefixtures("as_user")

# A batch is its samples


class Batch:
    """A problem on a backend, of which any samples can be asked for, in any order."""

    def __init__(self, problem, backend, warm=False):
        self.problem, self.backend = problem, backend
        self.start = 0.1 * torch.randn_like(problem.b) if warm else None
        self.target = problem.activation.sigma(torch.randn_like(problem.v))
        self.shared = None if problem.A.ndim == 3 else self.prepare(problem.A)
        redundant = torch.linalg.matrix_rank(problem.A).min() < problem.A.shape[-2]
        # With redundant equations torch finds the gradient of λ, the smallest of many.
        self.through = ("z", "u") if redundant else ("z", "u", "multipliers")

    def prepare(self, A):
        return prepared(A, self.problem.activation, self.backend)

    def arguments(self, part):
        given = self.problem.take(part)
        start = None if self.start is None else self.start[part]
        return given.v, self.shared or self.prepare(given.A), given.b, start

    def bits(self, part):
        """Of which samples does a compiled backend say CONVERGED? Their bits are its own."""
        v, A, b, start = self.arguments(part)
        status = A.backend.attempt(pose(A, v, None, b, start)[0], Rules()).status
        return status == Status.CONVERGED

    def solve(self, part):
        v, A, b, start = self.arguments(part)
        y = self.target[part]
        return solve_and_differentiate(v, A, b, None, y, init=start, through=self.through)


def assert_is_its_samples(batch, parts, regime="plain"):
    """Bit for bit where a compiled backend decides; elsewhere as far as rounding determines."""
    everything = torch.arange(len(batch.problem.v))
    whole, bits = batch.solve(everything), batch.bits(everything)
    for part in parts:
        given, alone, same = batch.problem.take(part), batch.solve(part), bits[part]
        expected = SimpleNamespace(**{name: x[part] for name, x in vars(whole).items()})
        assert torch.equal(batch.bits(part), same)
        for name, x in vars(alone).items():
            assert torch.equal(x[same], getattr(expected, name)[same]), name
        if regime == "at the edge":
            assert_edge_verdicts(alone.status, expected.status)
        else:
            assert alone.status.tolist() == expected.status.tolist()
        if regime == "plain":
            assert (alone.iterations - expected.iterations).abs().max() <= 1
        if regime != "at the edge":  # where λ is as long as it happens to be when z arrives
            assert_same_answers(alone, expected, given)
        if regime in DIFFERENTIABLE:
            assert_same_derivatives(alone, expected, given)


QUICK = ("sigmoid", "exp", "mixed of derived")
CASES = [("plain", name) for name in ALL]
CASES += [(regime, name) for regime in REGIMES for name in FEW if regime != "plain"]


@pytest.mark.filterwarnings("ignore::taut.ConditionWarning")
@each_backend
@pytest.mark.parametrize(
    ("regime", "name"),
    [
        pytest.param(
            *case, marks=() if case[0] == "plain" or case[1] in QUICK else pytest.mark.slow
        )
        for case in CASES
        if has(case[0], ALL[case[1]])
    ],
)
def test_a_batch_is_its_samples(regime, name, backend):
    """Alone, beside some neighbours, without those that fail, elsewhere; also from a start."""
    parts = torch.tensor([4]), torch.arange(2, 9), torch.arange(0, 12, 2), torch.randperm(12)
    given = problem(ALL[name], regime, n=12)
    assert_is_its_samples(Batch(given, backend), parts, regime)
    given = problem(ALL[name], regime, n=12, dtype=torch.float32)
    assert_is_its_samples(Batch(given, backend, warm=True), parts, regime)
    if backend == "torch":
        given = problem(ALL[name], regime, n=12, own=True)
        assert_is_its_samples(Batch(given, backend, warm=True), parts, regime)


@each_backend
@pytest.mark.parametrize(("K", "I", "n"), [(12, 5, 300), (30, 6, 70), (60, 40, 70)])
@pytest.mark.parametrize("activation", ["sigmoid", "exp"])
def test_threads_change_nothing(activation, K, I, n, backend):
    given = problem(activation, n=n, I=I, K=K, size=5.0)
    batch, everything = Batch(given, backend), torch.arange(n)
    assert_is_its_samples(batch, (torch.arange(9), torch.randperm(n)))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(batch.solve(everything))
    finally:
        torch.set_num_threads(before)
    bits = batch.bits(everything)
    assert bits.all() or backend == "torch"
    for other in found[1:]:
        assert_same_answers(other, found[0], given)
        for name, x in vars(other).items():
            assert torch.equal(x[bits], getattr(found[0], name)[bits]), name


def test_a_line_with_a_neighbour_that_is_done():
    """One slope for all samples, also when the first of them needs no step any more."""
    activation = taut.activations.tempered("linear", 0.1)
    v, A, b = given = problem(activation, n=5, I=3, K=8, size=3.0)
    b[0] = activation.sigma(v[0]) @ A.mT
    A = prepared(A, activation, "torch")
    together = project(v, A, b)
    assert together.iterations.tolist() == [0, 1, 1, 1, 1]
    rest = torch.arange(1, 5)
    alone = project(v[rest], A, b[rest])
    most, _ = spread(alone, *given.take(rest), activation)
    assert ((together.z[1:] - alone.z).abs() <= most).all()


def test_verdicts_and_signs_do_not_know_their_neighbours():
    A = torch.full((1, 8), 2e38, dtype=torch.float32)
    A[0, 4:] *= -1
    v = torch.full((2, 8), 3.0, dtype=torch.float32)
    v[1] = 2e6
    b = torch.zeros(2, 1, dtype=torch.float32)
    alone = taut.project(v[:1], A, b[:1], on_failure="return")
    assert alone.status[0] == taut.project(v, A, b, on_failure="return").status[0]
    v = torch.tensor([[-0.0, 0.0], [1.0, 2.0]])
    alone = taut.project(v[:1], torch.ones(1, 2), torch.zeros(1, 1)).z
    beside = taut.project(v, torch.ones(1, 2), torch.zeros(2, 1)).z[:1]
    assert torch.equal(alone.signbit(), beside.signbit())


def test_infeasible_in_every_batch_is_infeasible_alone():
    v, A, b = torch.randn(6, K), torch.ones(1, K), torch.tensor([[1.0], [9.0]] * 3)
    together = project(v, A, b, activation="sigmoid", on_failure="return")
    for i in range(6):
        alone = project(v[i], A, b[i], activation="sigmoid", on_failure="return")
        assert alone.status == together.status[i]
        assert_close(alone.z, together.z[i], rtol=1e-9, atol=1e-10)


@both_dtypes
@pytest.mark.parametrize("shape", [(2, 5), (1, 5), (5, 1), (6, 40)], ids=str)
def test_a_product_is_the_same_in_every_batch(shape, dtype):
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


# Symmetries

names = st.sampled_from(sorted(ALL))
seeds = st.integers(0, 2**31)
counts = st.integers(1, 3)
sizes = st.floats(0.1, 8.0)


def make(name, seed, count, size):
    """A z = b pins z down only as well as A is conditioned; the laws are about the rest."""
    torch.manual_seed(seed)
    given = problem(ALL[name], n=4, I=count, size=size)
    assume(torch.linalg.cond(given.A) < 20)
    return given.activation, *given


def same(one, other, digits=1e-8):
    assert_close(one, other, rtol=digits, atol=digits)


@given(names, seeds, counts, sizes)
def test_moving_v_along_the_equations_changes_nothing(name, seed, count, size):
    """v → v + Aᵀμ: z and u stay, λ → λ − μ."""
    activation, v, A, b = make(name, seed, count, size)
    shift = torch.randn(4, count)
    one = project(v, A, b, activation=activation)
    other = project(v + shift @ A, A, b, activation=activation)
    same(other.z, one.z)
    same(activation.sigma(other.u), activation.sigma(one.u))
    same(other.z, activation.sigma(v + (other.multipliers + shift) @ A))


@given(names, seeds, counts, sizes)
def test_writing_the_equations_differently_changes_nothing(name, seed, count, size):
    """(A, b) → (MA, Mb): z stays, λ → M⁻ᵀλ."""
    activation, v, A, b = make(name, seed, count, size)
    M = torch.eye(count) + 0.4 * torch.randn(count, count)
    assume(torch.linalg.cond(M) < 20)
    one = project(v, A, b, activation=activation)
    other = project(v, M @ A, b @ M.mT, activation=activation)
    same(other.z, one.z)
    same(other.z, activation.sigma(v + (other.multipliers @ M) @ A))


@given(names, seeds, counts, st.floats(0.1, 3.0))
def test_what_is_feasible_comes_back_at_once(name, seed, count, size):
    activation, v, A, _ = make(name, seed, count, size)
    solution = project(v, A, apply(A, activation.sigma(v)), activation=activation)
    assert solution.iterations.max() == 0
    assert (
        (solution.z - activation.sigma(v)).abs() <= output_rounding(activation, solution.z)
    ).all()
    assert_close(solution.multipliers, torch.zeros(4, count), rtol=0, atol=0)


@given(names, seeds, counts, sizes)
def test_projecting_twice_is_projecting_once(name, seed, count, size):
    activation, v, A, b = make(name, seed, count, size)
    one = project(v, A, b, activation=activation)
    other = project(one.u, A, b, activation=activation)
    same(other.z, one.z, 1e-10)


@given(names, seeds, counts, sizes)
def test_an_A_for_each_sample_is_the_shared_A(name, seed, count, size):
    activation, v, A, b = make(name, seed, count, size)
    shared = project(v, A, b, activation=activation)
    own = project(v, A.expand(4, count, K), b, activation=activation)
    same(own.z, shared.z)
    assert own.multipliers.shape == shared.multipliers.shape


@given(names, seeds, counts, sizes, st.permutations(range(4)))
def test_permuting_the_batch_permutes_the_result(name, seed, count, size, order):
    activation, v, A, b = make(name, seed, count, size)
    one = project(v, A, b, activation=activation)
    other = project(v[order], A, b[order], activation=activation)
    same(other.z, one.z[order])


@given(st.sampled_from(["exp", "linear", "sigmoid", "srlu", "tanh"]), seeds, counts, sizes)
def test_permuting_the_outputs_permutes_the_result(name, seed, count, size):
    """With one activation for all coordinates, their order means nothing."""
    activation, v, A, b = make(name, seed, count, size)
    order = torch.randperm(K)
    one = project(v, A, b, activation=activation)
    other = project(v[:, order], A[:, order], b, activation=activation)
    same(other.z, one.z[:, order])


@given(st.sampled_from(["tanh", "linear", "srlu"]), seeds, counts, sizes)
def test_odd_activations_are_odd(name, seed, count, size):
    """(v, b) → (−v, −b) turns z and λ around."""
    activation, v, A, b = make(name, seed, count, size)
    one = project(v, A, b, activation=activation)
    other = project(-v, A, -b, activation=activation)
    same(other.z, -one.z)


@given(names, seeds, counts, sizes)
def test_pythagoras(name, seed, count, size):
    """B(y‖σ(v)) = B(y‖z) + B(z‖σ(v)) for every feasible y."""
    activation, v, A, _ = make(name, seed, count, size)
    y = target(activation, 4)
    solution = project(v, A, apply(A, y), activation=activation)
    whole = activation.divergence(y, v).sum(-1)
    parts = activation.divergence(y, solution.u).sum(-1) + activation.divergence(solution.z, v).sum(
        -1
    )
    same(parts, whole, 1e-8)
