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
each_line = pytest.mark.parametrize("activation", LINES.values(), ids=LINES.keys())
each_endless = pytest.mark.parametrize("activation", ENDLESS.values(), ids=ENDLESS.keys())
#: How A and G are held, the dtype, and whether the kernel may help.
WAYS = {
    "kernel": ("shared", torch.float64, True),
    "torch": ("shared", torch.float64, False),
    "own": ("own", torch.float64, False),
    "sparse": ("sparse", torch.float64, False),
    "float32": ("shared", torch.float32, True),
    "float32, own": ("own", torch.float32, False),
}
each_way = pytest.mark.parametrize("way", WAYS)
TENS = 10.0 ** torch.arange(-12, 13, dtype=torch.float64)
#: The nearest powers of 2: v, b and sides keep their digits, where the answer hangs on the last.
TWOS = 2.0 ** TENS.log2().round()
HANGS = ("redundant", "ill-conditioned", "weak", "empty interior")
ONE = 12  # the place of 1


@pytest.fixture(autouse=True)
def chosen(request, monkeypatch):
    """Without the kernel, where the way is so."""
    if not WAYS[request.node.callspec.params["way"]][2]:
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


def draw(activation, way, change=lambda found: found, **options):
    held_as, dtype, _ = WAYS[way]
    return change(problem(activation, own=held_as == "own", dtype=dtype, n=4, **options))


def solve(found, way, scales=TENS, init=None):
    given = at_all_scales(found, scales, init)
    if WAYS[way][0] == "sparse":
        given = {name: x.to_sparse() if name in ("A", "G") else x for name, x in given.items()}
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
        assert_close(
            z[ok], z[ONE].expand_as(z)[ok], rtol=0, atol=digits * float(z[ONE].abs().max())
        )


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


@each_way
@pytest.mark.parametrize("regime", EQUATIONS)
@each_line
def test_equations_at_every_scale(activation, regime, way):
    options = {"regime": regime, "seed": 3, **EQUATIONS[regime]}
    I = 4 if regime in ("redundant", "inconsistent") else 2
    scales = TWOS if regime in HANGS else TENS
    found = draw(activation, way, I=I, **options)
    digits = 1e-4 if regime == "v alone" else 1e-8
    assert_scaled(solve(found, way, scales), found, scales, digits)


@each_way
@each_line
def test_a_start_is_as_good_at_every_scale(activation, way):
    found = draw(activation, way, seed=6, size=0.0)
    init = solve(found, way).multipliers[ONE]
    assert (solve(found, way, init=init).iterations <= 1).all()
    assert_scaled(solve(found, way, init=1e9 * init), found, TENS)


@each_way
@pytest.mark.parametrize("size", [0.0, 2.0])
@each_endless
def test_endless_equations_converge_at_every_scale(activation, size, way):
    if way == "sparse" and activation in (ENDLESS["mixed with exp"], ENDLESS["mixed with srlu"]):
        pytest.skip("beyond 1e10, exp and lines in one sparse matrix are too far apart")
    found = draw(activation, way, seed=4, size=size, matrix=_reached)
    solution = solve(found, way)
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


def inequality(activation, name, way, **options):
    structure, change = INEQUALITIES[name]
    options = {"structure": structure, "seed": 5, "size": 0.5, **options}
    return draw(activation, way, change, kind="inequalities", **options)


@each_way
@pytest.mark.parametrize("name", INEQUALITIES)
@pytest.mark.parametrize("activation", ["linear", "mixed of lines"])
def test_inequalities_at_every_scale(activation, name, way):
    found = inequality(LINES[activation], name, way)
    scales = TWOS if name in HANGS else TENS
    solution = solve(found, way, scales)
    assert_scaled(solution, found, scales)
    if solution.status.max() == Status.INFEASIBLE and way != "sparse":
        radius, which = refuted(solution, found, scales)
        assert (radius >= 1e7)[which].all()


@each_way
@pytest.mark.parametrize("name", ["plain", "pairs", "G alone", "conflict", "bounds", "too tight"])
@pytest.mark.parametrize("activation", ["srlu(0.5, 2)", "weighted srlu", "mixed with sigmoid"])
def test_endless_inequalities_at_every_scale(activation, name, way):
    if "mixed" in activation and name in ("conflict", "bounds", "too tight"):
        pytest.skip("a sigmoid that has no room is promised nothing")
    found = inequality(ENDLESS[activation], name, way, matrix=_reached, M=1)
    solution = solve(found, way)
    assert solution.status.tolist() == found.status.expand(len(TENS), -1).tolist()
