"""lower ≤ G z ≤ upper and bounds on z: optimality, closed forms, symmetries, shapes."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.isotonic import isotonic_regression
from torch.testing import assert_close

import taut
from dc3 import problems
from tables import STRUCTURES, K, apply, few_activations, problem
from taut import Status, project
from taut.activations import ACTIVATIONS, sigmoid, weighted
from taut.backends import Torch

# many solves: the shapes are checked elsewhere
pytestmark = pytest.mark.usefixtures("as_user")

each_structure = pytest.mark.parametrize("structure", STRUCTURES)
paper_s = pytest.mark.parametrize("name", ACTIVATIONS)


def draw(activation, structure="plain", **options):
    return problem(
        activation, kind="inequalities", structure=structure, **{"n": 8, "I": 1, **options}
    )


def assert_optimal(found, given, tol=1e-12):
    """Feasible; z = σ(v + Aᵀλ + Gᵀν); ν signed, and 0 unless its row is at that side."""
    assert found.converged.all(), found.report()
    G, lower, upper = (given.constraints[x] for x in ("G", "lower", "upper"))
    I = given.A.shape[-2]
    λ, ν = found.multipliers[..., :I], found.multipliers[..., I:]
    assert_rows(apply(given.A, found.z) - given.b, given.A, given.b, found.z, tol)
    r = apply(G, found.z)
    for off, side in ((lower - r, lower), (r - upper, upper)):
        assert_rows(off.clamp_min(0), G, side.where(side.isfinite(), 0.0), found.z, tol)
    at_lower, at_upper = (x.where(x.isfinite(), 0.0) for x in (lower, upper))
    assert_rows((r - at_lower).where(ν > 0, 0.0), G, at_lower, found.z, tol)
    assert_rows((r - at_upper).where((ν < 0) & (lower < upper), 0.0), G, at_upper, found.z, tol)
    assert not ((ν > 0) & (lower == -torch.inf)).any()
    assert not ((ν < 0) & (upper == torch.inf)).any()
    u = given.v + apply(given.A.mT, λ) + apply(G.mT, ν)
    rounded = given.v.abs() + apply(given.A.mT.abs(), λ.abs()) + apply(G.mT.abs(), ν.abs())
    z = given.activation.sigma(u)
    bound = 1e-11 * (z.abs() + given.activation.slope(u) * (1 + rounded))
    assert ((z - found.z).abs() <= bound).all()


def assert_rows(off, C, side, z, tol):
    size = side.abs() + apply(C.abs(), z.abs())
    assert (off.abs() <= tol * size.clamp_min(1e-290)).all()


@paper_s
@each_structure
@pytest.mark.parametrize("size", [2.0, 10.0, 60.0])
def test_every_sample_is_solved(name, structure, size):
    given = draw(name, structure, size=size)
    if name == "exp":  # a bounded set
        given = draw(name, structure, size=size, matrix=lambda d, *s: torch.ones(1, s[-1]).double())
    assert_optimal(given.solve(on_failure="return"), given)


@pytest.mark.slow
@paper_s
@each_structure
@pytest.mark.parametrize("size", [2.0, 10.0, 60.0])
@pytest.mark.parametrize("shape", [(10, 2, 4), (30, 4, 12), (60, 20, 20), (100, 50, 50)], ids=str)
def test_every_sample_of_larger_problems_is_solved(name, structure, size, shape):
    outputs, I, M = shape
    n = 30 if outputs < 100 else 6

    def matrix(d, *s):
        A = d.randn(*s)
        A[..., 0, :] = 1  # a bounded set under exp
        return A

    given = draw(name, structure, size=size, n=n, K=outputs, I=I, M=M, matrix=matrix)
    assert_optimal(given.solve(on_failure="return"), given)


@pytest.mark.parametrize("size", [2.0, 60.0])
def test_every_sample_is_solved_where_nothing_bounds_the_set(size):
    """Under exp z is then of any size: a violation counts by that of its own terms."""
    given = draw("exp", size=size, n=20, K=12, I=2, M=6)
    assert_optimal(given.solve(on_failure="return"), given)


@few_activations
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own matrices"])
def test_every_activation(activation, own):
    given = draw(activation, n=6, own=own)
    assert_optimal(given.solve(), given)


@few_activations
def test_inactive_inequalities_change_no_bit(activation):
    given = draw(activation)
    alone = project(given.v, given.A, given.b, activation=activation)
    r = apply(given.constraints["G"], alone.z)
    sides = {"G": given.constraints["G"], "lower": r - 0.1, "upper": r + 0.1}
    found = project(given.v, given.A, given.b, **sides, activation=activation)
    for name in ("z", "u"):
        assert torch.equal(getattr(found, name), getattr(alone, name))
    assert torch.equal(found.multipliers[:, :1], alone.multipliers)
    assert not found.active.any()
    least, most = alone.z.amin(0) - 0.1, alone.z.amax(0) + 0.1
    found = project(given.v, given.A, given.b, lower=least, upper=most, activation=activation)
    assert torch.equal(found.z, alone.z)
    assert torch.equal(found.multipliers, alone.multipliers)


@few_activations
def test_a_row_with_equal_sides_is_an_equation(activation):
    given = problem(activation, I=2)
    A, b = given.A, given.b
    whole = given.solve()
    found = project(
        given.v, A[:1], b[:, :1], G=A[1:], lower=b[:, 1:], upper=b[:, 1:], activation=activation
    )
    assert_close(found.z, whole.z, rtol=1e-9, atol=1e-11)
    assert_close(found.multipliers, whole.multipliers, rtol=1e-7, atol=1e-8)
    found = project(given.v, G=A, lower=b, upper=b, activation=activation)
    assert_close(found.z, whole.z, rtol=1e-9, atol=1e-11)


@few_activations
def test_a_row_twice_or_turned_around_is_that_row(activation):
    given = draw(activation)
    G, lower, upper = (given.constraints[x] for x in ("G", "lower", "upper"))
    right = given.solve()
    doubled = {"G": [G, G], "lower": [lower, lower], "upper": [upper, upper]}
    turned = {"G": [-G], "lower": [-upper], "upper": [-lower]}
    scales = torch.tensor([0.01, 1.0, 30.0])
    scaled = {"G": [scales[:, None] * G], "lower": [scales * lower], "upper": [scales * upper]}
    for change in (doubled, turned, scaled):
        sides = {name: torch.cat(x, -2 if name == "G" else -1) for name, x in change.items()}
        found = project(given.v, given.A, given.b, **sides, activation=activation)
        assert_close(found.z, right.z, rtol=1e-9, atol=1e-11)
    assert (found.active == right.active).all()


@few_activations
def test_only_what_the_equations_do_not_see_of_v_matters(activation):
    """v → v + Aᵀμ and (A, b) → (M A, M b) leave z alone."""
    given = draw(activation, I=2, K=K)
    right = given.solve()
    sides = {name: given.constraints[name] for name in ("G", "lower", "upper")}
    moved = given.v + apply(given.A.mT, torch.randn(len(given.v), 2))
    mix = torch.tensor([[2.0, 1.0], [-1.0, 1.0]])
    for v, A, b in (
        (moved, given.A, given.b),
        (given.v, mix @ given.A, given.b @ mix.T),
    ):
        found = project(v, A, b, **sides, activation=activation)
        assert_close(found.z, right.z, rtol=1e-8, atol=1e-10)


@few_activations
def test_rows_of_one_entry_are_bounds_on_z(activation):
    """The same z, exactly at its bounds; bounds have no multipliers, rows have, and u with them."""
    given = draw(activation, "boxes")
    lower, upper = given.constraints["lower"], given.constraints["upper"]
    rows = given.solve()
    clipped = project(given.v, given.A, given.b, lower=lower, upper=upper, activation=activation)
    assert clipped.multipliers.shape[-1] == 1
    assert (clipped.z >= lower).all()
    assert (clipped.z <= upper).all()
    assert_close(rows.z, clipped.z, rtol=1e-9, atol=1e-11)
    assert torch.equal(rows.active, clipped.active)
    at = clipped.active
    assert torch.equal(clipped.z[at > 0], lower[at > 0])
    assert torch.equal(clipped.z[at < 0], upper[at < 0])
    assert_close(activation.sigma(rows.u), rows.z, rtol=1e-9, atol=1e-11)
    # Each row twice, scaled, and some of them as rows with a second, tiny entry
    G = torch.cat([2 * torch.eye(K), -3 * torch.eye(K)])
    sides = torch.cat([2 * lower, -3 * upper], -1), torch.cat([2 * upper, -3 * lower], -1)
    found = project(
        given.v, given.A, given.b, G=G, lower=sides[0], upper=sides[1], activation=activation
    )
    assert_close(found.z, clipped.z, rtol=1e-9, atol=1e-11)


def test_sparsemax():
    """Σz = 1, z ≥ 0, nearest to v: by sorting (Martins and Astudillo)."""
    v = 2 * torch.randn(50, 8)
    ordered = v.sort(-1, descending=True).values
    total = ordered.cumsum(-1) - 1
    count = torch.arange(1, 9)
    support = (ordered > total / count).sum(-1, keepdim=True)
    right = (v - total.gather(-1, support - 1) / support).clamp_min(0)
    found = project(v, torch.ones(1, 8), torch.ones(1), lower=0.0)
    assert_close(found.z, right, rtol=0, atol=1e-13)
    assert (found.z >= 0).all()


def test_at_most_one_in_all_under_exp():
    v = torch.randn(40, 4) - 1
    z = project(v, G=torch.ones(1, 4), upper=1.0, activation="exp").z
    right = torch.where(v.exp().sum(-1, keepdim=True) > 1, v.softmax(-1), v.exp())
    assert_close(z, right, rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", ["linear", "exp"])
def test_isotonic_regression(name):
    """Monotone outputs: pool adjacent violators; under exp the geometric means of blocks."""
    v = torch.randn(6, 12) * (1 if name == "linear" else 3)
    G = torch.diff(torch.eye(12), dim=0)
    z = project(v, G=G, lower=0.0, activation=name).z
    pooled = torch.from_numpy(np.stack([isotonic_regression(row) for row in v.numpy()]))
    right = pooled if name == "linear" else pooled.exp()
    assert_close(z, right, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("all_rows", [False, True])
@pytest.mark.parametrize("K", [3, 10])
def test_monotone_and_not_below_zero(K, all_rows):
    """0 ≤ z₁ ≤ … ≤ z_K: sides and most of z are 0, and leave the rule no size of its own."""
    v = 3 * torch.randn(400, K) - 4
    G = torch.cat([torch.eye(K) if all_rows else torch.eye(K)[:1], torch.diff(torch.eye(K), dim=0)])
    pooled = torch.from_numpy(np.stack([isotonic_regression(row) for row in v.numpy()]))
    known = taut.prepare(torch.zeros(0, K), "linear", G=G)
    for A in (known, replace(known, backend=Torch(), alone=replace(known.alone, backend=Torch()))):
        z = project(v, A, torch.zeros(0), lower=0.0).z
        assert_close(z, pooled.clamp_min(0), rtol=1e-12, atol=1e-13)
    assert (project(v.float(), G=G.float(), lower=0.0).z[pooled.amax(-1) < -1e-3] == 0).all()


@pytest.mark.slow
def test_the_quadratic_programs_of_dc3():
    """The objective of its 833 test problems, to the digits that are known of it."""
    Q, p, A, G, h, x = problems()
    activation = weighted("linear", 1 / Q)
    z = project(-p.expand(833, -1), A, x, G=G, upper=h, activation=activation).z
    objective = (0.5 * Q * z.square() + p * z).sum(-1).mean()
    assert abs(objective.item() - -15.046859) < 1e-6


@few_activations
@each_structure
def test_a_batch_is_its_samples(activation, structure):
    given = draw(activation, structure)
    whole = given.solve()
    for i in range(0, 8, 3):
        one = given.take(torch.tensor([i])).solve()
        assert_close(one.z[0], whole.z[i], rtol=1e-10, atol=1e-12)
        if structure in ("plain", "pairs", "boxes"):  # elsewhere several rows ask for the same
            assert torch.equal(one.active[0], whole.active[i])


def test_shapes():
    given = draw("sigmoid", n=(2, 3))
    found = given.solve()
    assert found.z.shape == (2, 3, K)
    assert found.multipliers.shape == (2, 3, 4)
    assert found.active.shape == (2, 3, 3)
    assert found.active.dtype is torch.int8
    assert found.residual.shape == found.radius.shape == (2, 3)
    one = draw("sigmoid", n=())
    assert one.solve().z.shape == (K,)
    none = draw("sigmoid", n=0)
    assert none.solve().z.shape == (0, K)
    plain = problem("sigmoid")
    assert plain.solve().active.shape == (6, 0)
    assert plain.solve().radius.isnan().all()


def test_a_G_for_each_sample():
    given = draw("exp", n=5, own=True)
    right = given.solve()
    shared = given.A[0]
    b = apply(shared, given.y)
    sides = {name: given.constraints[name] for name in ("G", "lower", "upper")}
    mixed = project(given.v, shared, b, **sides, activation="exp")
    expanded = project(given.v, shared.expand(5, 1, K), b, **sides, activation="exp")
    assert_close(mixed.z, expanded.z, rtol=1e-12, atol=1e-13)
    each = [
        project(
            given.v[i],
            given.A[i],
            given.b[i],
            activation="exp",
            **{k: x[i] for k, x in sides.items()},
        ).z
        for i in range(5)
    ]
    assert_close(right.z, torch.stack(each), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["linear", "exp", "sigmoid"])
def test_dtypes(name, dtype):
    given = draw(name, dtype=dtype)
    found = given.solve()
    assert found.z.dtype is dtype
    exact = project(
        given.v.double(), **{k: x.double() for k, x in given.constraints.items()}, activation=name
    )
    eps = torch.finfo(dtype).eps
    assert_close(found.z.double(), exact.z, rtol=4 * eps, atol=4 * eps)
    least = torch.full((K,), 0.3, dtype=dtype)
    assert (project(given.v, lower=least, activation=name).z >= least).all()


@few_activations
def test_warm_starts(activation):
    """A neighbour's multipliers help; garbage and wrong signs do no harm."""
    given = draw(activation)
    right = given.solve()
    again = given.solve(init=right)
    assert again.iterations.double().mean() <= 1
    assert_close(again.z, right.z, rtol=1e-10, atol=1e-12)
    for start in (-right.multipliers, 100 * torch.randn(8, 4), torch.full((4,), torch.nan)):
        assert_close(given.solve(init=start).z, right.z, rtol=1e-9, atol=1e-11)


def test_a_warm_start_of_a_quadratic_program_takes_two_steps():
    given = draw("linear", n=50, K=20, I=4, M=10)
    near = project(given.v + 0.01 * torch.randn(50, 20), **given.constraints, init=given.solve())
    assert near.iterations.double().mean() <= 2


def test_held_outputs():
    """A structural zero: v = −inf under exp, with a capacity on what is left."""
    v = torch.tensor([[-torch.inf, 1.0, 2.0, 0.5]])
    found = project(v, torch.ones(1, 4), torch.ones(1), upper=0.5, activation="exp")
    part = project(v[:, 1:], torch.ones(1, 3), torch.ones(1), upper=0.5, activation="exp")
    assert found.z[0, 0] == 0
    assert_close(found.z[:, 1:], part.z, rtol=1e-13, atol=0)
    G = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    found = project(v, torch.ones(1, 4), torch.ones(1), G=G, upper=0.6, activation="exp")
    part = project(
        v[:, 1:], torch.ones(1, 3), torch.ones(1), G=G[:, 1:], upper=0.6, activation="exp"
    )
    assert_close(found.z[:, 1:], part.z, rtol=1e-13, atol=0)
    assert found.u[0, 0] == -torch.inf


@pytest.mark.parametrize("own", [False, True], ids=["equations too", "inequalities alone"])
def test_rows_that_ask_for_an_end_of_the_range_hold_their_outputs_there(own):
    """A capacity of 0 under exp: exact zeros, u = −inf, and the rest as if they were not there."""
    v = torch.randn(5, 4)
    G, upper = torch.tensor([[2.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]), torch.tensor([0.0, 0.7])
    A, b = torch.tensor([[1.0, 1.0, 1.0, 2.0]]), torch.tensor([1.0])
    whole = {"A": A, "b": b} if not own else {}
    part = {"A": A[:, 2:], "b": b} if not own else {}
    found = project(v, **whole, G=G, upper=upper, activation="exp")
    alone = project(v[:, 2:], **part, G=G[1:, 2:], upper=upper[1:], activation="exp")
    assert (found.z[:, :2] == 0).all()
    assert (found.u[:, :2] == -torch.inf).all()
    assert not found.active[:, 0].any()
    assert_close(found.z[:, 2:], alone.z, rtol=1e-12, atol=1e-14)
    both = project(v, G=torch.eye(4), lower=torch.tensor([1.0, 0.2, 0, 0]), activation="sigmoid")
    assert (both.z[:, 0] == 1).all()
    expected = v[:, 1:].sigmoid().clamp_min(torch.tensor([0.2, 0, 0]))
    assert_close(both.z[:, 1:], expected, rtol=4 * torch.finfo(v.dtype).eps, atol=0)


def test_an_infinite_v_holds_its_output_without_equations():
    v = torch.tensor([[-torch.inf, 0.0, 1.0]])
    found = project(v, G=torch.ones(1, 3), upper=1.0, activation="exp")
    assert_close(found.z[:, 1:], v[:, 1:].softmax(-1), rtol=1e-13, atol=0)
    assert found.z[0, 0] == 0
    assert project(v, upper=2.0, activation="exp").z[0].tolist() == [0.0, 1.0, 2.0]
    none = project(v, torch.zeros(0, 3), torch.zeros(0), activation="exp")
    assert torch.equal(none.z, v.exp())
    for A, b in ((None, None), (torch.ones(1, 3), torch.ones(1))):
        assert project(v, A, b, lower=0.1, activation="exp").z[0, 0] == 0.1  # as of v = −1e9
        clash = project(v, A, b, G=torch.eye(3), lower=0.1, activation="exp", on_failure="return")
        assert clash.status.tolist() == [Status.INFEASIBLE]


@few_activations
def test_bounds_at_the_ends_of_the_range_are_none(activation):
    given = problem(activation, n=5)
    least, most = (x.expand(K) for x in activation.range.bounds(given.v))
    found = given.solve()
    bounded = project(given.v, given.A, given.b, lower=least, upper=most, activation=activation)
    assert torch.equal(bounded.z, found.z)
    assert not bounded.active.any()


def test_bounds_beyond_the_range_are_none():
    v = torch.randn(5, K)
    found = project(v, lower=-1.0, upper=2.0, activation="sigmoid")
    assert torch.equal(found.z, sigmoid.sigma(v))
    rows = project(v, G=torch.eye(K), lower=-1.0, upper=1.0, activation="sigmoid")
    assert_close(rows.z, sigmoid.sigma(v), rtol=1e-15, atol=0)  # the kernel has an exp of its own
    assert not rows.active.any()


@pytest.mark.parametrize("own", [False, True], ids=["one A", "one for each sample"])
@paper_s
def test_equations_that_are_nearly_dependent_beside_inequalities(name, own):
    """M A z = M b says the same as A z = b, also with an M whose condition is 1e7."""
    given = draw(name, n=12, I=3, size=10.0)
    A, b, sides = given.A, given.b, {k: given.constraints[k] for k in ("G", "lower", "upper")}
    right = project(given.v, A, b, **sides, activation=name)
    M = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0 + 1e-7, 0.0], [1.0, 0.0, 1.0]])
    A, b = M @ A, b @ M.mT
    A = A.expand(12, *A.shape[-2:]).clone() if own else A
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", taut.ConditionWarning)
        found = project(given.v, A, b, **sides, activation=name)
    size = b.abs() + apply(A.abs(), found.z.abs())
    assert ((apply(A, found.z) - b).abs() <= 1e-12 * size).all()
    assert_close(found.z, right.z, rtol=1e-6, atol=1e-7)
