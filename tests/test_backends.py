"""The conformance suite: whatever backend is in `BACKENDS`, the answers are those of torch.

A backend may say CONVERGED of a sample, and leaves every other open.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import taut
from measures import (
    assert_edge_verdicts,
    assert_same_answers,
    assert_same_derivatives,
    condition,
    relative_residual,
    rounded,
    scale,
    solve_and_differentiate,
)
from tables import (
    ALL,
    BACKENDS,
    DIFFERENTIABLE,
    FEW,
    REGIMES,
    apply,
    both_dtypes,
    each_activation,
    each_backend,
    few_activations,
    has,
    margins,
    prepared,
    problem,
)
from taut import Status
from taut.backends import Rules, Torch
from taut.outcome import Outcome
from taut.pose import pose

# many solves: the shapes are checked elsewhere
pytestmark = pytest.mark.usefixtures("as_user")
OTHERS = [name for name in BACKENDS if name != "torch"]
each_other = pytest.mark.parametrize("backend", OTHERS)


# Starts, as (λ found, its size) -> init
STARTS = {
    "none": lambda found: None,
    "zero": torch.zeros_like,
    "the solution": lambda found: found,
    "near": lambda found: found + 0.1 * torch.randn_like(found),
    "far": lambda found: 1e3 * torch.randn_like(found),
    "absurd": lambda found: torch.full_like(found, torch.finfo(found.dtype).max),
    "not finite": lambda found: torch.where(torch.rand_like(found) < 0.5, torch.nan, found),
}


def assert_contract(A, given, activation, start):
    """Of what `attempt` alone returns."""
    before = [x.clone() for x in (given.v, given.b)]
    flat, _ = pose(A, given.v, None, given.b, start)
    found = A.backend.attempt(flat, Rules())
    assert (
        all(torch.equal(*pair) for pair in zip(before, (given.v, given.b), strict=True))
        or (given.status == Status.NONFINITE).any()
    )
    done = found.status == Status.CONVERGED
    assert (done | (found.status == -1)).all(), "a backend gives no verdict but CONVERGED"
    assert found.failed == int((~done).sum())
    assert not (done & given.status.bool()).any(), "it says CONVERGED of what has no solution"
    if done.any():
        eps = torch.finfo(given.v.dtype).eps
        v, b, z, u = given.v[done], given.b[done], found.z[done], found.u[done]
        # To the rounding of what it is made of; of numbers given in float32, by the rule.
        units, size = (4, z.abs()) if eps > 1e-12 else (32, rounded(z, u, v, activation))
        size = b.abs() + apply(given.A.abs(), size)
        assert ((apply(given.A.double(), z.double()) - b).abs() <= units * eps * size).all()
        assert torch.equal(u[v.isinf()], v[v.isinf()])  # held there
        u, v = (x.masked_fill(v.isinf(), 0) for x in (u - found.multipliers[done] @ given.A, v))
        assert ((u - v).abs() <= 16 * eps * (
            v.abs() + found.multipliers[done].abs() @ given.A.abs())).all()  # fmt: skip
        measured = (z.double() @ given.A.double().mT - b.double()).abs().amax(-1)
        most = 8 * eps * scale(given.A, b, z).amax(-1)
        assert ((found.residual[done] - measured).abs() <= most).all()


def conform(backend, activation, regime, dtype=torch.float64, starts=("none",), **shape):
    """One problem, by this backend and by torch, verdict by verdict."""
    given = problem(activation, regime, n=12, dtype=dtype, **shape)
    y = activation.sigma(torch.randn_like(given.v))
    ours, theirs = (prepared(given.A, activation, name) for name in (backend, "torch"))
    found = given.solve(on_failure="return").multipliers.where(given.status[:, None] == 0, 0.0)
    for start in starts:
        init = STARTS[start](found)
        assert_contract(ours, given, activation, init)
        one = solve_and_differentiate(given.v, ours, given.b, None, y, init=init)
        other = solve_and_differentiate(given.v, theirs, given.b, None, y, init=init)
        if regime != "at the edge":  # there b, rounded, may be beyond it, or undecided
            assert other.status.tolist() == given.status.tolist()
        if regime == "at the edge":  # λ is as long as it happens to be when z arrives
            assert_edge_verdicts(one.status, other.status)
            ok = one.converged
            rule = 1e-12 if dtype == torch.float64 else 4 * torch.finfo(dtype).eps
            assert relative_residual(given.A, given.b[ok], one.z[ok]) <= rule
        else:
            assert_same_answers(one, other, given)
        if regime in DIFFERENTIABLE:
            assert_same_derivatives(one, other, given)


QUICK = [(name, start) for name in ("sigmoid", "mixed of derived") for start in ("none", "absurd")]
CASES = [
    pytest.param(regime, *case, marks=() if case in QUICK else pytest.mark.slow)
    for regime in REGIMES
    for case in itertools.product(FEW, STARTS)
    if has(regime, FEW[case[0]])
]


@pytest.mark.filterwarnings("ignore::taut.ConditionWarning")
@both_dtypes
@pytest.mark.parametrize(("regime", "name", "start"), CASES)
@each_other
def test_conformance(backend, regime, name, start, dtype):
    conform(backend, FEW[name], regime, dtype, starts=(start,))


@both_dtypes
@each_activation
@each_other
def test_conformance_of_every_activation(backend, activation, dtype):
    conform(backend, activation, "plain", dtype, I=3)


@pytest.mark.parametrize("outputs", [1, 2, 3, 4, 7, 8, 9, 16, 30])
@each_other
def test_conformance_in_every_size(backend, outputs):
    for I in {1, 2, 3, 4, 5, 8, 9, outputs} & set(range(1, outputs + 1)):
        conform(backend, ALL["sigmoid"], "plain", K=outputs, I=I)


#: Large enough for a backend to begin in float32: by factors, and by conjugate gradients.
LARGER = {"few equations": (40, 8), "many equations": (60, 24), "more than outputs / 2": (37, 30)}
SCALABLE = ["sigmoid", "exp", "tanh", "bounded", "weighted by a number", "tempered by a number"]
LARGER_CASES = [
    pytest.param(size, regime, name, marks=() if name == "sigmoid" else pytest.mark.slow)
    for size in LARGER
    for regime in ("plain", "planted", "saturated", "redundant")
    for name in SCALABLE
]


@both_dtypes
@pytest.mark.parametrize(("size", "regime", "name"), LARGER_CASES)
@each_other
def test_conformance_of_larger_problems(backend, size, regime, name, dtype):
    K, I = LARGER[size]
    conform(backend, ALL[name], regime, dtype, starts=("none", "near"), K=K, I=I)


@both_dtypes
@pytest.mark.parametrize("name", SCALABLE)
@pytest.mark.parametrize("size", LARGER)
@each_other
def test_bits_of_larger_problems_are_a_samples_own(backend, size, name, dtype):
    """Alone, or in any place beside any others: decisions are made sample by sample."""
    K, I = LARGER[size]
    given = problem(ALL[name], n=41, I=I, K=K, dtype=dtype, size=3.0)
    A, rules = prepared(given.A, ALL[name], backend), Rules()

    def attempt(index, start):
        start = None if start is None else start[index]
        flat, _ = pose(A, given.v[index], None, given.b[index], start)
        return A.backend.attempt(flat, rules)

    everyone = torch.arange(41)
    found = attempt(everyone, None)
    near = found.multipliers + 0.03 * torch.randn_like(found.multipliers)
    for start in (None, near):
        whole = attempt(everyone, start)
        for index in (torch.randperm(41), torch.tensor([17]), torch.arange(3, 9)):
            part = attempt(index, start)
            assert torch.equal(part.status, whole.status[index])
            ok = part.status == Status.CONVERGED
            for field in ("z", "multipliers", "u", "residual", "iterations"):
                one, other = getattr(part, field), getattr(whole, field)[index]
                assert torch.equal(one[ok], other[ok]), field


@pytest.mark.parametrize("limit", [0, 1, 2, 40])
@each_other
def test_iterations_of_larger_problems_are_counted(backend, limit):
    given = problem("sigmoid", n=20, I=24, K=60, dtype=torch.float32)
    A = prepared(given.A, "sigmoid", backend)
    solver = taut.Newton(max_iterations=limit)
    found = taut.project(given.v, A, given.b, solver=solver, on_failure="return")
    assert (found.iterations <= limit).all()
    assert found.converged.all() == (limit > 2)
    assert (found.iterations[found.converged] > 0).all()


def hierarchy():
    """total = Σ regions, region = Σ towns, with 5 regions of 3 towns."""
    towns = torch.eye(5).repeat_interleave(3, 1)
    total = torch.cat([-torch.ones(1, 1), torch.ones(1, 5), torch.zeros(1, 15)], 1)
    return torch.cat([total, torch.cat([torch.zeros(5, 1), -torch.eye(5), towns], 1)])


MOSTLY_ZEROS = {
    "margins": lambda: margins(8, 6),
    "square": lambda: margins(10, 10),
    "hierarchy": hierarchy,
}


@pytest.mark.parametrize("name", MOSTLY_ZEROS)
@each_other
def test_conformance_where_A_is_mostly_zeros(backend, name):
    A = MOSTLY_ZEROS[name]()
    conform(backend, ALL["exp"], "plain", starts=("none", "near"), K=A.shape[1],
            I=len(A), matrix=lambda *_: A)  # fmt: skip


# What must fail


class Liar:
    """A backend whose answers are right, but for one thing."""

    def __init__(self, lie):
        self.lie = lie

    def attempt(self, problem, rules):
        torch_alone = replace(problem, prepared=replace(problem.prepared, backend=Torch()))
        with torch.no_grad():
            found = taut.Newton().solve(torch_alone)
        fields = {name: getattr(found, name).clone() for name in
                  ("z", "multipliers", "u", "residual", "iterations", "status")}  # fmt: skip
        open_ = fields["status"] != Status.CONVERGED
        fields["status"][open_] = -1
        fields["failed"] = int(open_.sum())
        self.lie(fields)
        return Outcome(**fields)

    def pullback(self, u, status, grads):
        return None

    def loss(self, v, b, y, u, multipliers):
        return None


def _says_converged(fields):
    fields["status"][:] = Status.CONVERGED
    fields["failed"] = 0


def _spoil(name, by):
    return lambda fields: fields[name].add_(by)


LIES = {
    "all is solved": ("infeasible", _says_converged),
    "a verdict of its own": ("infeasible", lambda f: f["status"].masked_fill_(f["status"] < 0, 2)),
    "z": ("plain", _spoil("z", 1e-9)),
    "λ": ("plain", _spoil("multipliers", 1e-9)),
    "u": ("plain", _spoil("u", 1e-9)),
    "residual": ("plain", _spoil("residual", 1e-9)),
    "a wrong count": ("plain", lambda f: f.update(failed=1)),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_the_suite_notices_a_backend_that_lies(lie, monkeypatch):
    regime, spoil = LIES[lie]
    monkeypatch.setitem(BACKENDS, "liar", lambda basis, activation: Liar(lambda fields: None))
    conform("liar", ALL["sigmoid"], regime)
    monkeypatch.setitem(BACKENDS, "liar", lambda basis, activation: Liar(spoil))
    with pytest.raises(AssertionError):
        conform("liar", ALL["sigmoid"], regime)


# Of every backend, torch included


@few_activations
@each_backend
def test_float32_is_the_rounding_of_the_right_answer(backend, activation):
    v, A, b = problem(activation, n=21, I=3, dtype=torch.float32)
    solution = taut.project(v, prepared(A, activation, backend), b)
    exact = taut.project(v.double(), prepared(A.double(), activation, "torch"), b.double())
    assert ((solution.z - exact.z).abs() <= 1e-5 * (1 + exact.z.abs())).all()
    residual = (solution.z @ A.mT - b).abs().amax(-1)
    assert_close(solution.residual, residual, rtol=0, atol=1e-5)


@each_activation
@each_backend
def test_float32_gradients_are_those_of_float64(backend, activation):
    v, A, b = problem(activation, n=21, I=3, dtype=torch.float32)
    found = []
    for dtype in (torch.float32, torch.float64):
        inputs = [x.to(dtype).requires_grad_() for x in (v, b)]
        solution = taut.project(inputs[0], prepared(A.to(dtype), activation, backend), inputs[1])
        loss = solution.z.square().sum() + solution.u.sin().sum()
        found.append([g.double() for g in torch.autograd.grad(loss, inputs)])
    # Both start from the u found, rounded to float32; derivatives magnify that by κ.
    digits = torch.finfo(torch.float32).eps * condition(solution, A, activation).max().item()
    for single, double in zip(*found, strict=True):
        assert_close(single, double, rtol=0, atol=64 * digits * double.abs().max().item())


@each_backend
def test_what_it_does_not_solve_it_leaves(backend):
    """Infeasible, inconsistent, not finite, and out of iterations: verdicts are torch's."""

    def status(v, A, b, activation, **options):
        A = prepared(A, activation, backend)
        return taut.project(v, A, b, on_failure="return", **options).status.tolist()

    v, b = torch.zeros(4, 3), torch.tensor([[1.0], [4.0], [torch.nan], [2.0]])
    expected = [Status.CONVERGED, Status.INFEASIBLE, Status.NONFINITE, Status.CONVERGED]
    assert status(v, torch.ones(1, 3), b, "sigmoid") == expected
    twice = torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]])
    b = torch.tensor([[1.0, 2.0], [1.0, 2.1], [1.5, 3.0]])
    expected = [Status.CONVERGED, Status.INCONSISTENT, Status.CONVERGED]
    assert status(v[:3], twice, b, "exp") == expected
    few = status(*problem(n=21, I=3), "sigmoid", solver=taut.Newton(max_iterations=1))
    assert Status.MAX_ITERATIONS in few


@each_other
def test_a_line_that_overflows(backend):
    A, b = 1e-10 * torch.eye(40, 80), torch.full((20, 40), 1e300)
    ours, theirs = (
        taut.project(torch.zeros(20, 80), prepared(A, "linear", name), b, on_failure="return")
        for name in (backend, "torch")
    )
    assert ours.status.tolist() == theirs.status.tolist()
    assert Status.CONVERGED not in ours.status.tolist()


@each_other
def test_a_weight_that_makes_the_system_singular(backend):
    activation = taut.activations.weighted("linear", torch.tensor([1e-20, 1.0, 1e-20]))
    A = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]])
    ours, theirs = (
        taut.project(
            torch.zeros(2, 3), prepared(A, activation, name), torch.ones(2), on_failure="return"
        )
        for name in (backend, "torch")
    )
    assert_close(ours.z, theirs.z)


@both_dtypes
@each_other
def test_loss_at_the_ends_of_a_bounded_activation(backend, dtype):
    activation = taut.activations.bounded(0.1, 0.3)
    v, A = torch.zeros(1, 3, dtype=dtype), torch.ones(1, 3, dtype=dtype)
    b, y = torch.full((1, 1), 0.6, dtype=dtype), torch.tensor([[0.3, 0.1, 0.2]], dtype=dtype)
    ours, theirs = (
        taut.matched_loss(taut.project(v, prepared(A, activation, name), b), y)
        for name in (backend, "torch")
    )
    assert_close(ours, theirs, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=0)
