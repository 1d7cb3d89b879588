"""The conformance suite for inequalities and bounds: the compiled backend answers as torch does."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import taut
from measures import spread
from tables import STRUCTURES, apply, both_dtypes, few_activations, needs_cpu, problem
from taut import Status
from taut.activations import ACTIVATIONS
from taut.backends import Rules, Torch
from taut.pose import fitted_sides, pose_sides

pytestmark = [needs_cpu, pytest.mark.usefixtures("as_user")]
each_structure = pytest.mark.parametrize("structure", STRUCTURES)
#: In the others rows depend on each other: many multipliers give the same z.
UNIQUE = ("plain", "pairs", "boxes")


def draw(activation, structure="plain", **options):
    return problem(activation, kind="inequalities", structure=structure,
                   **{"n": 13, "I": 2, "M": 3, **options})  # fmt: skip


def prepared(given):
    """With the compiled backend, and with torch alone."""
    ours = taut.prepare(given.A, given.activation, G=given.constraints["G"])
    return ours, replace(ours, backend=Torch(), alone=replace(ours.alone, backend=Torch()))


def sides(given):
    return {name: given.constraints[name] for name in ("lower", "upper")}


def attempt(known, given, init=None, rules=None):
    """What the backend alone says; it must keep its contract."""
    inputs = fitted_sides(given.v, given.A, given.b, given.constraints["G"], *sides(given).values(),
                          init)  # fmt: skip
    flat, _ = pose_sides(known, inputs, False)
    before = [x.clone() for x in flat.inputs]
    found = known.backend.attempt(flat, rules or Rules())
    for x, y in zip(before, flat.inputs, strict=True):
        assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    done = found.status == Status.CONVERGED
    assert (done | (found.status == -1)).all(), "a backend gives no verdict but CONVERGED"
    assert found.failed == int((~done).sum())
    return found


def rows(given, found):
    """The rows that are active in each sample, 0 for others, and the sides they are held at."""
    C = torch.cat([given.A, given.constraints["G"]])
    low, high = (torch.cat([given.b, given.constraints[x]], -1) for x in ("lower", "upper"))
    ν = found.multipliers.detach()
    active = (ν != 0) | (low == high)
    side = torch.where((ν > 0) | (low == high), low, high).where(active, 0.0)
    return C * active.unsqueeze(-1), side


def assert_same(one, other, given, unique):
    assert one.status.tolist() == other.status.tolist()
    C, side = rows(given, other)
    z_most, ν_most = spread(other, given.v, C, side, given.activation)
    ok = other.converged
    assert ((one.z - other.z).abs() <= z_most)[ok].all()
    size = 1 + (side.abs() + apply(C.abs(), other.z.abs())).amax(-1)
    most = 32 * torch.finfo(given.v.dtype).eps * size
    assert ((one.residual - other.residual).abs() <= most)[ok].all()
    if unique:
        assert torch.equal(one.active, other.active)
        assert ((one.multipliers - other.multipliers).abs() <= ν_most)[ok].all()


STARTS = {
    "none": lambda found: None,
    "zero": torch.zeros_like,
    "the solution": lambda found: found,
    "near": lambda found: found + 0.1 * torch.randn_like(found),
    "wrong signs": lambda found: -found,
    "far": lambda found: 1e3 * torch.randn_like(found),
    "not finite": lambda found: torch.where(torch.rand_like(found) < 0.5, torch.nan, found),
}
each_start = pytest.mark.parametrize("start", STARTS)


@both_dtypes
@few_activations
@each_structure
def test_conformance(structure, activation, dtype):
    given = draw(activation, structure, dtype=dtype)
    ours, theirs = prepared(given)
    attempt(ours, given)
    one, other = (
        taut.project(given.v, known, given.b, **sides(given), on_failure="return")
        for known in (ours, theirs)
    )
    assert_same(one, other, given, structure in UNIQUE)


@each_start
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_conformance_from_every_start(name, start):
    given = draw(name)
    ours, theirs = prepared(given)
    found = taut.project(given.v, theirs, given.b, **sides(given)).multipliers
    init = STARTS[start](found)
    attempt(ours, given, init)
    one, other = (
        taut.project(given.v, known, given.b, **sides(given), init=init, on_failure="return")
        for known in (ours, theirs)
    )
    assert_same(one, other, given, True)


@both_dtypes
@each_structure
@pytest.mark.parametrize("name", ["linear", "exp", "sigmoid", "tanh"])
@pytest.mark.parametrize("shape", [(5, 2, 3), (30, 4, 12), (40, 0, 7)], ids=str)
def test_what_it_knows_it_solves(name, structure, shape, dtype):
    """None is left to torch."""
    K, I, M = shape
    if structure == "weak" and dtype == torch.float32:
        pytest.skip("rounded to float32, a row that others imply is another row")
    given = draw(name, structure, n=21, K=K, I=I, M=M, dtype=dtype, size=1.0)
    found = attempt(prepared(given)[0], given)
    assert found.failed == 0
    assert (found.multipliers[:, I:] != 0).any()


def around(given, width=0.05):
    """Bounds on z that leave it some room, and clip it in places."""
    y = given.y.to(given.v.dtype)
    middle = given.activation.sigma(given.v)
    gap = width * y.std(0)
    return torch.minimum(middle, y) - gap, torch.maximum(middle, y) + 0 * gap


@both_dtypes
@few_activations
def test_conformance_of_bounds(activation, dtype):
    given = draw(activation, n=21, dtype=dtype)
    low, high = around(given)
    known = taut.prepare(given.A, activation)
    one, other = (
        taut.project(given.v, x, given.b, lower=low, upper=high, on_failure="return")
        for x in (known, replace(known, backend=Torch()))
    )
    assert one.status.tolist() == other.status.tolist()
    assert ((one.z >= low) & (one.z <= high))[one.converged].all()
    at = one.active
    assert torch.equal(one.z[at > 0], low[at > 0])
    assert torch.equal(one.z[at < 0], high[at < 0])
    at = other.active
    free = given.A * (at == 0).unsqueeze(-2)
    size = given.b.abs() + apply(given.A.abs(), other.z.abs())  # rounded with clipped outputs too
    z_most, λ_most = spread(other, given.v, free, size, activation)
    residual = (apply(given.A.double(), one.z.double()) - given.b).abs()
    rule = 1e-12 if dtype == torch.float64 else 4 * torch.finfo(dtype).eps
    assert (residual <= rule * size)[one.converged].all()
    # In a corner fewer outputs than equations are free: many λ give a z by the rule.
    free = torch.minimum((one.active == 0).sum(-1), (at == 0).sum(-1))
    told = other.converged & (free >= len(given.A))
    assert told.sum() > 3
    assert torch.equal(one.active[told], at[told])
    assert ((one.z - other.z).abs() <= z_most)[told].all()
    assert ((one.multipliers - other.multipliers).abs() <= λ_most)[told].all()


def gradients(known, given, bounds=None, **options):
    """Of v, b, the sides or bounds, from a function of z, u and the multipliers; and the loss."""
    low, high = sides(given).values() if bounds is None else bounds
    inputs = [x.detach().clone().requires_grad_() for x in (given.v, given.b, low, high)]
    v, b, low, high = inputs
    found = taut.project(v, known, b, lower=low, upper=high, on_failure="return", **options)
    ok = found.converged
    value = sum(getattr(found, x)[ok].sin().sum() for x in ("z", "u", "multipliers"))
    made = torch.autograd.grad(value, inputs, retain_graph=True)
    y = given.y.to(v.dtype)
    loss = taut.matched_loss(found, y, reduction="none")
    return found, [*made, loss.detach(), *torch.autograd.grad(loss[ok].sum(), inputs)]


def assert_same_gradients(given, ours, theirs, bounds=None):
    """As far as rounding determines them: it grows with the condition of the active rows."""
    (found, one), (other, two) = (gradients(x, given, bounds) for x in (ours, theirs))
    assert found.status.tolist() == other.status.tolist()
    told = other.converged
    if bounds is not None:  # in a corner, fewer outputs than equations are free: many λ are right
        free = torch.minimum((found.active == 0).sum(-1), (other.active == 0).sum(-1))
        told = told & (free >= len(given.A))
    assert told.sum() > 3
    C = rows(given, other)[0] if bounds is None else given.A.expand(len(given.v), -1, -1)
    # Outputs that are clipped have no slope: what is left of C may be conditioned worse.
    free = torch.ones_like(given.v) if bounds is None else (other.active == 0).to(given.v.dtype)
    w = (given.activation.slope(other.u.detach().double()) * free).unsqueeze(-2)
    values = torch.linalg.eigvalsh((C.double() * w) @ C.double().mT)
    least = values.where(values > 1e-12 * values[:, -1:], torch.inf).amin(-1)
    digits = 64 * sum(C.shape[-2:]) * torch.finfo(given.v.dtype).eps * (values[:, -1] / least) ** 2
    for x, y in zip(one, two, strict=True):
        x, y = (a.reshape(len(given.v), -1).double() for a in (x, y))
        far = (x - y).abs().amax(-1) > digits * (1 + y.abs().amax(-1))
        assert not (far & told).any()


@both_dtypes
@few_activations
@pytest.mark.parametrize("structure", UNIQUE)
def test_derivatives_are_those_of_torch(structure, activation, dtype):
    given = draw(activation, structure, dtype=dtype)
    assert_same_gradients(given, *prepared(given))


@pytest.mark.filterwarnings("ignore::taut.FailureWarning")  # rounded to float32, a corner is none
@both_dtypes
@few_activations
def test_derivatives_of_bounds_are_those_of_torch(activation, dtype):
    given = draw(activation, n=16, dtype=dtype)
    known = taut.prepare(given.A, activation)
    alone = replace(known, backend=Torch())
    assert_same_gradients(given, known, alone, around(given))


@pytest.mark.parametrize("name", ["exp", "sigmoid", "tanh"])
def test_derivatives_keep_their_digits_where_outputs_have_saturated(name):
    """By Gauss–Jordan, as without the kernel."""
    given = draw(name, size=40.0, n=24, K=12, I=2, M=5)
    ours, theirs = prepared(given)
    found = taut.project(given.v, theirs, given.b, **sides(given), on_failure="return")
    flat = pose_sides(ours, fitted_sides(given.v, given.A, given.b, given.constraints["G"],
                      *sides(given).values(), None), False)[0]  # fmt: skip
    attempt(ours, given)
    g = torch.randn_like(given.v)
    made, left, count = ours.backend.pull_within(
        flat, found.multipliers, found.u, found.status, (g, None, None), [True] * 4
    )
    assert count == int(left.sum()) == int((found.u.isinf().any(-1)).sum())
    with torch.no_grad():
        right = replace(flat, prepared=theirs).pullback(
            found.multipliers, found.u, found.status, (g, None, None), [True, False, True, True]
        )
    ok = found.converged & ~left
    for i in (0, 2, 3):
        size = right[i].abs().amax(-1, keepdim=True)
        assert ((made[i] - right[i]).abs() <= 1e-9 * size)[ok].all()


@few_activations
def test_a_sample_has_the_bits_that_it_has_alone(activation):
    """In any place among any neighbours, also those that fail."""
    given = draw(activation, n=19)
    known, _ = prepared(given)
    whole = attempt(known, given)
    order = torch.randperm(19)
    v, (low, high) = given.v.clone(), sides(given).values()
    low, spoilt = low.clone(), torch.arange(19) % 5 == 3
    v[spoilt] = torch.nan
    low[torch.arange(19) % 5 == 4] = torch.inf
    for index in (order, order[:7], order[:1]):
        part = replace(
            given,
            v=v[index],
            constraints=given.constraints
            | {"b": given.b[index], "lower": low[index], "upper": high[index]},
        )
        found = attempt(known, part)
        fine = index % 5 < 3
        for name in ("z", "u", "multipliers", "residual", "iterations", "status"):
            assert torch.equal(getattr(found, name)[fine], getattr(whole, name)[index][fine]), name
        assert (found.status[~fine] == -1).all()


def test_threads_find_the_same_bits():
    given = draw("linear", n=300, K=40, I=10, M=12)
    known, _ = prepared(given)
    before, found = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(attempt(known, given))
    torch.set_num_threads(before)
    for name in ("z", "u", "multipliers", "residual", "iterations", "status"):
        assert torch.equal(*(getattr(x, name) for x in found)), name


def test_what_it_does_not_solve_it_leaves():
    """Infeasible, not finite, out of iterations: verdicts are torch's."""
    given = draw("linear", n=5)
    known, theirs = prepared(given)
    b, low, v = given.b.clone(), given.constraints["lower"].clone(), given.v.clone()
    high = given.constraints["upper"]
    low[1, 0], v[2], low[3] = 1e9, torch.nan, torch.nan
    both = [
        taut.project(v, x, b, lower=low, upper=high, on_failure="return").status.tolist()
        for x in (known, theirs)
    ]
    assert both[0] == both[1]
    assert both[0][:4] == [Status.CONVERGED, Status.INFEASIBLE, Status.NONFINITE, Status.NONFINITE]
    assert attempt(known, given, rules=Rules(max_iterations=0)).failed > 0


def test_redundant_equations_beside_inequalities():
    given = draw("linear", "plain", I=4, K=9, M=5, n=16)
    A = torch.cat([given.A, given.A[:2] + given.A[2:]])
    b = torch.cat([given.b, given.b[:, :2] + given.b[:, 2:]], -1)
    right = taut.project(given.v, given.A, given.b, **sides(given), G=given.constraints["G"])
    known = taut.prepare(A, G=given.constraints["G"])
    found = taut.project(given.v, known, b, **sides(given))
    assert_close(found.z, right.z, rtol=1e-11, atol=1e-11)
    assert torch.equal(found.active, right.active)


def test_tensors_of_any_layout():
    given = draw("linear", n=12)
    known, _ = prepared(given)
    right = taut.project(given.v, known, given.b, **sides(given))
    turned = given.v.mT.contiguous().mT
    wide = given.b.repeat_interleave(2, -1)[:, ::2]
    found = taut.project(turned, known, wide, **sides(given))
    assert torch.equal(found.z, right.z)
    assert torch.equal(found.multipliers, right.multipliers)


def test_a_row_that_asks_for_an_end_holds_its_output_there():
    """Though 1e-318, as the equations alone have it, is within rounding of 0."""
    A, G = torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([[0.0, -1.0, 0.0]])
    v = torch.tensor([[0.0, -730.0, 0.0]])
    found = taut.project(v, A, torch.tensor([2.0]), G=G, lower=0.0, activation="exp")
    assert found.z.tolist() == [[1.0, 0.0, 1.0]] and found.u[0, 1] == -torch.inf
