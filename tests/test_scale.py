"""Scale is a law: v, b and sides times a power of ten have the same verdicts, and z times it."""

import importlib

import pytest
import torch
from torch.testing import assert_close

import taut
from tables import (
    BACKENDS,
    STRUCTURES,
    TEMPERATURES,
    WEIGHTS,
    K,
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
SCALES = 10.0 ** torch.arange(-12, 13, dtype=torch.float64)
ONE = 12  # the place of 10⁰


@pytest.fixture(autouse=True)
def chosen(request, monkeypatch):
    """The backend of each test that names one."""
    if request.node.callspec.params.get("backend") == "torch":
        module = importlib.import_module("taut.prepare")
        for name in ("backend_for", "backend_within"):
            monkeypatch.setattr(module, name, lambda *_: BACKENDS["torch"](*_[:2]))


def at_all_scales(found, init=None):
    """The problem at each scale, as arguments of `project`: (scales, n, …)."""
    far = SCALES.reshape(-1, 1, 1)
    given = {"v": found.v, **found.constraints, "init": init}
    matrices = {name: given[name] for name in ("A", "G") if name in given}
    sides = {name: x for name, x in given.items() if name not in matrices and x is not None}
    dtype = found.v.dtype
    made = {name: (far * x.double()).to(dtype) for name, x in sides.items()}
    for name, x in matrices.items():
        made[name] = x.expand(len(SCALES), *x.shape) if x.ndim == 3 else x
    return made


def as_map(given, held_as):
    """With sparse matrices, if so they are held."""
    if held_as != "sparse":
        return given
    return {name: x.to_sparse() if name in ("A", "G") else x for name, x in given.items()}


def solve(found, held_as="shared", init=None):
    given = as_map(at_all_scales(found, init), held_as)
    return taut.project(**given, activation=found.activation, on_failure="return")


def assert_scaled(solution, found, digits=1e-8):
    """One verdict at all scales, the right one; and for lines one answer, in as many steps."""
    expected = found.status.expand(len(SCALES), -1)
    assert solution.status.tolist() == expected.tolist()
    ok = solution.converged
    steps = solution.iterations.double()
    assert (steps <= 2 * steps[ONE].max() + 4)[ok].all()
    if found.activation in LINES.values():
        far = SCALES.to(solution.z.dtype).reshape(-1, 1, 1)
        z = solution.z / far
        digits = max(digits, 1e4 * torch.finfo(z.dtype).eps)
        assert_close(z[ok], z[ONE].expand_as(z)[ok], rtol=0, atol=digits * float(z[ONE].abs().max()))


def refuted(solution, found):
    """The certificates of the INFEASIBLE samples, as far as they say that they go."""
    given = at_all_scales(found)
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
    return radius / SCALES.unsqueeze(-1), which


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
    assert_scaled(solve(found, held_as), found, 1e-4 if regime == "v alone" else 1e-8)


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
