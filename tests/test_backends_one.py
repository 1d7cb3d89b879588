"""What the kernel's blocks leave open is worked on sample by sample, as torch would do it."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import taut
from tables import needs_cpu, problem
from taut import Status
from taut.activations import ACTIVATIONS
from taut.activations.codes import is_line
from taut.backends import One, Rules
from taut.maps import as_map
from taut.solvers.arc import newton
from taut.solvers.interior import interior
from taut.solvers.sides import Sides

RULES = Rules()
each_structure = pytest.mark.parametrize("structure", ["pairs", "redundant", "empty interior"])
_D = {"dtype": torch.float64}
EVERY_SIGMA = {
    **ACTIVATIONS,
    "tempered srlu": taut.activations.tempered(taut.activations.srlu(2.0, 0.5), 0.7),
    "weighted tanh": taut.activations.weighted("tanh", torch.linspace(0.5, 2, 5, **_D)),
    "bounded": taut.activations.bounded(-1.0, 3.0),
    "mixed": taut.activations.mixed(["exp", "srlu", "linear", "sigmoid", "tanh"]),
}
each_sigma = pytest.mark.parametrize("sigma", EVERY_SIGMA.values(), ids=EVERY_SIGMA.keys())


def posed(sigma, structure="plain", own=False, boxed=False, n=4):
    """Equations and inequalities as the chain sees them, and the code for samples alone."""
    given = problem(sigma, kind="inequalities", structure=structure, n=n, I=2, M=3, K=5, own=own)
    G, lower, upper = (given.constraints[x] for x in ("G", "lower", "upper"))
    A = given.A
    if G.ndim < A.ndim:
        G = G.expand(*A.shape[:-2], *G.shape[-2:])
    C = as_map(torch.cat([A, G], -2))
    low, high = torch.cat([given.b, lower], -1), torch.cat([given.b, upper], -1)
    floor = ceiling = None
    if boxed:
        z = given.y.detach()
        floor, ceiling = (z + x * (z.abs() + 0.1) for x in (-0.01, 0.01))
    activation = given.activation
    sides = Sides(activation, is_line(activation), C, given.v, low, high, floor, ceiling)
    return sides, One.of(activation, sides.line, C, RULES)


def never(place, tries):
    return torch.zeros_like(place, dtype=torch.bool)


@needs_cpu
@each_sigma
@each_structure
def test_newton_ends_where_torch_does(sigma, structure):
    for own in (False, True):
        for boxed in (False, True):
            sides, one = posed(sigma, structure, own, boxed)
            ours, other = (newton(sides, None, RULES, 150, True, x) for x in (one, None))
            assert one is not None and (other.status == Status.CONVERGED).all()
            assert_close(ours.status, other.status)
            assert_close(ours.point.z, other.point.z, rtol=1e-8, atol=1e-8)
            again = sides.point(ours.point.multipliers)
            assert_close(ours.point.z, again.z, rtol=1e-8, atol=1e-8)
            assert sides.keeps(ours.point.z, 1e-12, multipliers=ours.point.multipliers).all()


@needs_cpu
@each_sigma
@each_structure
def test_the_interior_point_method_ends_where_torch_does(sigma, structure):
    for own in (False, True):
        for boxed in (False, True):
            sides, one = posed(sigma, structure, own, boxed)
            ours, other = (interior(sides, 1e-8, 100, never, one=x) for x in (one, None))
            assert one is not None and (other.iterations < 100).all()
            assert (ours.iterations - other.iterations).abs().max() <= 2
            z, expected = (sides.point(x.raw).z for x in (ours, other))
            assert_close(z, expected, rtol=1e-4, atol=1e-4)


@needs_cpu
def test_small_sparse_rows_are_as_dense_ones():
    dense, one = posed("sigmoid", "redundant")
    sides = replace(dense, C=as_map(dense.C.data.to_sparse()))
    code = One.of(sides.activation, False, sides.C, RULES)
    ours, other = (newton(x, None, RULES, 150, True, y) for x, y in ((sides, code), (dense, one)))
    assert code is not None
    for x, y in zip(ours.point, other.point, strict=True):
        assert_close(x, y, rtol=0, atol=0)


@needs_cpu
@each_sigma
def test_bits_do_not_depend_on_neighbours(sigma):
    sides, one = posed(sigma, "redundant", own=True)
    assert one is not None
    whole = newton(sides, None, RULES, 20, True, one).point.multipliers
    for i in range(len(sides.v)):
        alone = newton(sides.take(torch.tensor([i])), None, RULES, 20, True, one)
        assert_close(alone.point.multipliers[0], whole[i], rtol=0, atol=0)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_cpu)])
def test_a_size_that_overflows_proves_nothing(compiled):
    """w|v| is infinite where z is 4e306: Σz = 1 does not hold."""
    C, one = as_map(torch.ones(1, 2, **_D)), torch.ones(1, 1, **_D)
    v = torch.tensor([[706.0, 1.0]], **_D)
    sides = Sides(taut.activations.exp, False, C, v, one, one)
    code = One.of(sides.activation, False, C, RULES) if compiled else None
    found = newton(sides, None, RULES, 0, True, code)
    assert int(found.status) == -1 and float(found.level) > 0.5


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_cpu)])
def test_what_stands_still_is_given_up(compiled):
    """Where C z overflows there is no step: nor are there a hundred."""
    C = as_map(torch.tensor([[1.0, 1.0], [1.0, -1.0]], **_D))
    b = torch.tensor([[1.0, 0.5]], **_D)
    sides = Sides(taut.activations.exp, False, C, torch.full((1, 2), 800.0, **_D), b, b)
    code = One.of(sides.activation, False, C, RULES) if compiled else None
    found = newton(sides, None, RULES, 150, True, code)
    assert int(found.status) == -1 and int(found.iterations) <= 8


def hard_samples():
    """Sides apart by 1e-12, also with rows of one's own; a row that others imply; no solution;

    equations that are hard by themselves.
    """
    inf, T = torch.inf, lambda x: torch.tensor(x, **_D)
    G = T([[1, -2, 2, 0, 0, -2], [0, -2, -1, 1, -1, -2], [-2, 1, 2, 2, -2, -1],
           [-2, 0, 2, -2, -1, 0], [2, -2, -2, 1, 2, -1], [0, -1, 0, -2, -1, 0]])  # fmt: skip
    v = T([[2.650417276915559, 3.2502279089222847, -5.032799797125559, -50.30334911149924,
            212.07034248701552, 1.3921758742351118]])  # fmt: skip
    low = T([0.9100588208941315, 6.168172310329773, 2.9218023011459384, 3.52579066042514, -inf,
             2.3592534720009306])  # fmt: skip
    high = T([1.7830580311144566, 6.168172310330773, inf, 3.52579066042614, -0.20654577070680977,
              2.3592534720019307])  # fmt: skip
    edge = {"A": G[:1], "b": T([1.7830570311144567]), "G": G, "lower": low, "upper": high}
    yield v, edge, "srlu"
    yield v, {**edge, "A": G[None, :1], "b": T([[1.7830570311144567]]), "G": G[None]}, "srlu"
    implied = torch.cat([G[:3], G[:2].sum(0, keepdim=True)])
    sides = T([1.0, -2.0, inf, -1.0 + 1e-9]), T([-inf, -inf, 0.5, -inf])
    yield 60 * v.sin(), {"G": implied, "upper": sides[0], "lower": sides[1]}, "tanh"
    sides = T([1.0, -2.0, inf, inf]), T([-inf, -inf, 0.5, -1.0 + 1e-9])
    yield 60 * v.sin(), {"G": implied, "upper": sides[0], "lower": sides[1]}, "srlu"
    yield 300 * v.cos(), {"G": implied, "upper": sides[0], "lower": sides[1]}, "exp"
    A, G = T([[1e-3, 19.4, 4.1e-5, 9.9e-3]]), T([[-7.3e-3, 1.2e-3, -9.1e-3, 2.3e-2]])
    z, v = T([0.34, 0.25, 1.5, 2.3]), T([[462.3, -88.0, -653.6, 170.5]])
    sides = {"lower": G @ z - 1e-3, "upper": G @ z + 1e-3}
    yield v, {"A": A, "b": A @ z, "G": G, **sides}, "exp"


class _Counted(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@needs_cpu
def test_a_hard_sample_takes_few_calls_of_torch():
    """Each costs some µs: a sample that takes hundreds of steps is done within 50 ms."""
    for v, constraints, activation in hard_samples():
        with _Counted() as counted:
            taut.project(v, **constraints, activation=activation, on_failure="return")
        assert counted.count <= 15_000
