"""Scale is a law: v, b and sides times a power of ten have the same verdicts, and z times it."""

import importlib
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import taut
from tables import (
    BACKENDS,
    STRUCTURES,
    TEMPERATURES,
    WEIGHTS,
    apply,
    both_dtypes,
    conditioned,
    each_backend,
    problem,
)
from taut import Status
from taut.activations import ACTIVATIONS, mixed, srlu, tempered, weighted

pytestmark = [
    pytest.mark.usefixtures("as_user"),
    pytest.mark.filterwarnings("ignore::taut.ConditionWarning"),
]

#: σ is a line in each output: z scales with the problem.
LINES = {
    "linear": ACTIVATIONS["linear"],
    "weighted": weighted("linear", WEIGHTS),
    "tempered": tempered("linear", TEMPERATURES),
    "mixed of lines": mixed(["linear", *(weighted("linear", d) for d in (0.1, 3.0, 1.0, 20.0))]),
}
#: Enough outputs go as far as one likes: there is a solution at every scale.
ENDLESS = {
    "srlu": srlu(),
    "srlu(0.5, 2)": srlu(0.5, 2.0),
    "weighted srlu": weighted(srlu(), WEIGHTS),
    "mixed with sigmoid": mixed(["linear", "sigmoid", "linear", "tanh", "linear"]),
    "mixed with exp": mixed(["linear", "exp", "linear", "linear", "linear"]),
    "mixed with srlu": mixed(["srlu", "sigmoid", "linear", "exp", "srlu"]),
}
BOTH = {**LINES, **ENDLESS}
each_line = pytest.mark.parametrize("activation", LINES.values(), ids=LINES.keys())
each_endless = pytest.mark.parametrize("activation", ENDLESS.values(), ids=ENDLESS.keys())
each_of_both = pytest.mark.parametrize("activation", BOTH.values(), ids=BOTH.keys())
each_map = pytest.mark.parametrize("held_as", ["shared", "own", "sparse"])
TENS = 10.0 ** torch.arange(-12, 13, dtype=torch.float64)
#: The nearest powers of 2: v, b and sides keep their digits, where the answer hangs on the last.
TWOS = 2.0 ** TENS.log2().round()
HANGS = ("redundant", "ill-conditioned", "weak", "empty interior")
ONE = 12  # the place of 1


@pytest.fixture(autouse=True)
def chosen(request, monkeypatch):
    """The backend of each test that names one."""
    if request.node.callspec.params.get("backend") == "torch":
        module = importlib.import_module("taut.prepare")
        for name in ("backend_for", "backend_within"):
            monkeypatch.setattr(module, name, lambda *_: BACKENDS["torch"](*_[:2]))


def at_all_scales(found, scales=TENS, init=None):
    """The problem at each scale, as arguments of `project`: (scales, n, …)."""
    far = scales.reshape(-1, 1, 1)
    given = {"v": found.v, **found.constraints, "init": init}
    matrices = {name: given[name] for name in ("A", "G") if name in given}
    sides = {name: x for name, x in given.items() if name not in matrices and x is not None}
    dtype = found.v.dtype
    made = {name: (far * x.double()).to(dtype) for name, x in sides.items()}
    for name, x in matrices.items():
        made[name] = x.expand(len(scales), *x.shape) if x.ndim == 3 else x
    return made


def as_map(given, held_as):
    """With sparse matrices, if so they are held."""
    if held_as != "sparse":
        return given
    return {name: x.to_sparse() if name in ("A", "G") else x for name, x in given.items()}


def solve(found, held_as="shared", scales=TENS, init=None):
    given = as_map(at_all_scales(found, scales, init), held_as)
    return taut.project(**given, activation=found.activation, on_failure="return")


def assert_scaled(solution, found, scales, digits=1e-8):
    """One verdict at all scales, the right one; and for lines one answer, in as many steps."""
    expected = found.status.expand(len(scales), -1)
    assert solution.status.tolist() == expected.tolist()
    ok = solution.converged
    steps = solution.iterations.double()
    assert (steps <= 2 * steps[ONE].max() + 4)[ok].all()
    if found.activation in LINES.values():
        z = solution.z / scales.to(solution.z.dtype).reshape(-1, 1, 1)
        digits = max(digits, 1e4 * torch.finfo(z.dtype).eps)
        assert_close(z[ok], z[ONE].expand_as(z)[ok], rtol=0, atol=digits * float(z[ONE].abs().max()))


def refuted(solution, found, scales):
    """How far the proofs of the INFEASIBLE samples go at scale 1; they must be proofs."""
    given = at_all_scales(found, scales)
    known = {name: given[name] for name in ("A", "b") if name in given}
    known = {"A": None, "b": None, **known}
    rest = {name: given[name] for name in ("G", "lower", "upper") if name in given}
    which = solution.status == Status.INFEASIBLE
    radius = solution.radius.double()
    good = taut.is_certificate(
        solution.multipliers, activation=found.activation, **known, **rest,
        radius=radius.nan_to_num(0.0),
    )  # fmt: skip
    assert good[which].all()
    return radius / scales.unsqueeze(-1), which


EQUATIONS = {
    "planted": {},
    "redundant": {},
    "ill-conditioned": {},
    "inconsistent": {},
    "near v": {"regime": "plain", "size": 1e-3},
    "far from v": {"regime": "plain", "size": 0.0},
    "v alone": {"regime": "plain", "size": 1e4},
}


@each_backend
@both_dtypes
@each_map
@pytest.mark.parametrize("regime", EQUATIONS)
@each_line
def test_equations_at_every_scale(activation, regime, held_as, dtype, backend):
    if held_as == "sparse" and regime == "ill-conditioned":
        pytest.skip("conditions beyond float32 are for dense matrices")
    options = {"regime": regime, **EQUATIONS[regime]}
    I = 4 if regime in ("redundant", "inconsistent") else 2
    found = problem(activation, own=held_as == "own", I=I, dtype=dtype, seed=3, **options)
    scales = TWOS if regime in HANGS else TENS
    digits = 1e-4 if regime == "v alone" else 1e-8
    assert_scaled(solve(found, held_as, scales), found, scales, digits)


@each_backend
@both_dtypes
@each_map
@pytest.mark.parametrize("size", [0.0, 2.0, 100.0])
@each_endless
def test_endless_equations_converge_at_every_scale(activation, size, held_as, dtype, backend):
    own = held_as == "own"
    found = problem(activation, own=own, dtype=dtype, seed=4, size=size, matrix=_reached)
    solution = solve(found, held_as)
    assert solution.converged.all(), solution.status.tolist()


def _reached(draw, *shape):
    """Each equation has an output of its own with a range of ℝ: the first, and the third."""
    A = draw.randn(*shape)
    A[..., 0, 0], A[..., 0, 2], A[..., 1, 0], A[..., 1, 2] = 1.0, 0.0, 0.0, 1.0
    return A


def _conflict(found):
    """Of every other sample, G asks twice for the same row, with sides that exclude each other."""
    G, lower, upper = (found.constraints[x] for x in ("G", "lower", "upper"))
    lower, upper = lower.clone(), upper.clone()
    G = torch.cat([G, 2 * G[..., :1, :]], -2)
    middle = (G[..., 0, :] * found.y).sum(-1, keepdim=True)
    lower = torch.cat([lower, 2 * middle + 0.5], -1)
    upper = torch.cat([upper, torch.full_like(middle, torch.inf)], -1)
    lower[..., 0], upper[..., 0] = -torch.inf, middle[..., 0]
    upper[::2, 0] += 1
    status = found.status.clone()
    status[1::2] = Status.INFEASIBLE
    return _with(found, {"G": G, "lower": lower, "upper": upper}, status)


def _with(found, more, status=None):
    given = {**found.constraints, **more}
    given = {name: x.to(found.v) for name, x in given.items() if x is not None}
    return replace(found, constraints=given, status=found.status if status is None else status)


def _bounded(found):
    """Bounds on z instead of rows of G."""
    below, above = torch.rand_like(found.v), torch.rand_like(found.v)
    more = {"G": None, "lower": found.y - below, "upper": found.y + above}
    return _with(found, more)


def _too_tight(found):
    """Bounds on z that leave A z = b no room, in every other sample."""
    found, status = _bounded(found), found.status.clone()
    b = found.b.clone()
    most = torch.maximum(found.constraints["lower"].abs(), found.constraints["upper"].abs())
    reach = apply(found.A.abs(), most.to(found.v))
    b[1::2] = 1.5 * reach[1::2].to(b)
    status[1::2] = Status.INFEASIBLE
    return _with(found, {"b": b}, status)


INEQUALITIES = {
    **{name: (name, lambda found: found) for name in STRUCTURES},
    "G alone": ("plain", lambda found: _with(found, {"A": None, "b": None})),
    "conflict": ("plain", _conflict),
    "conflict of G alone": ("plain", lambda x: _with(_conflict(x), {"A": None, "b": None})),
    "bounds": ("plain", _bounded),
    "too tight": ("plain", _too_tight),
}
each_inequality = pytest.mark.parametrize("name", INEQUALITIES)


def inequality(activation, name, held_as, dtype, **options):
    structure, change = INEQUALITIES[name]
    options = {"own": held_as == "own", "dtype": dtype, "seed": 5, "size": 0.5, **options}
    return change(problem(activation, kind="inequalities", structure=structure, **options))


@each_backend
@both_dtypes
@each_map
@each_inequality
@each_line
def test_inequalities_at_every_scale(activation, name, held_as, dtype, backend):
    found = inequality(activation, name, held_as, dtype)
    scales = TWOS if name in HANGS else TENS
    solution = solve(found, held_as, scales)
    assert_scaled(solution, found, scales)
    if solution.status.max() == Status.INFEASIBLE and held_as != "sparse":
        radius, which = refuted(solution, found, scales)
        assert (radius >= 1e7)[which].all()
