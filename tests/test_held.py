"""Outputs that an infinite v holds: at an end of the range, or at a bound on z."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import taut
from tables import ALL, both_dtypes, needs_cpu, prepared, problem
from taut import Status, matched_loss, project
from taut.backends import Rules, Torch
from taut.pose import fitted_sides, pose, pose_sides

pytestmark = pytest.mark.usefixtures("as_user")
INF = torch.inf
ENDED = ["exp", "sigmoid", "tanh", "bounded", "weighted by a number", "bounded below", "mixed"]
#: Larger ones begin in float32.
SIZES = {"small": (10, 4), "in float32": (40, 8), "many equations": (60, 24)}
each_ended = pytest.mark.parametrize("name", ENDED)
each_size = pytest.mark.parametrize("size", SIZES)
forward_mode = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
each_backend = pytest.mark.parametrize("backend", ["torch", "own"])


def draw(name, size="small", **options):
    if name == "mixed":
        return problem(ALL[name], "held", **{"n": 24, "I": 2, **options})
    K, I = SIZES[size]
    return problem(ALL[name], "held", **{"n": 24, "K": K, "I": I, **options})


def known(backend, *given, **more):
    found = taut.prepare(*given, **more)
    if backend == "own":
        return found
    alone = found.alone and replace(found.alone, backend=Torch())
    return replace(found, backend=Torch(), alone=alone)


# Equations


@needs_cpu
@both_dtypes
@each_size
@each_ended
def test_the_kernel_decides_and_differentiates_them(name, size, dtype):
    """All of them: none is left to torch, whose answers and losses are the same."""
    given = draw(name, size, dtype=dtype)
    A = prepared(given.A, given.activation, "cpu")
    flat, _ = pose(A, given.v, None, given.b, None)
    found = A.backend.attempt(flat, Rules())
    assert found.failed == 0 and found.held
    ends = given.v.isinf()
    assert ends.any() and torch.equal(found.u[ends], given.v[ends])
    assert torch.equal(found.z[ends], given.y.to(dtype)[ends])
    g = torch.randn_like(given.v).masked_fill(ends, torch.nan)  # nobody reads it there
    dv, _, left = A.backend.pullback(found.u, found.status, (g, None, g))
    assert left == 0 and (dv[ends] == 0).all() and dv.isfinite().all()
    y = given.activation.sigma(torch.randn_like(given.v))
    loss = A.backend.loss(given.v, given.b, y, found.u, found.multipliers)
    theirs = prepared(given.A, given.activation, "torch")
    solution = project(given.v, theirs, given.b)
    expected = matched_loss(solution, y, reduction="none")
    size = 1 + expected.abs() + (given.b.abs() * solution.multipliers.abs()).sum(-1)
    assert ((loss - expected).abs() <= 1e3 * torch.finfo(dtype).eps * size).all()


@needs_cpu
@both_dtypes
@each_size
@each_ended
def test_a_sample_has_its_bits_beside_any_others(name, size, dtype):
    given = draw(name, size, dtype=dtype, n=41)
    A = prepared(given.A, given.activation, "cpu")

    def attempt(index):
        flat, _ = pose(A, given.v[index], None, given.b[index], None)
        return A.backend.attempt(flat, Rules())

    whole = attempt(torch.arange(41))
    g = torch.randn_like(given.v)
    back = A.backend.pullback(whole.u, whole.status, (g, None, None))
    even = torch.arange(0, 41, 2)
    for index in (torch.randperm(41), even, even + 1 - 2 * (even == 40), torch.tensor([7])):
        part = attempt(index)
        for field in ("z", "multipliers", "u", "residual", "iterations", "status"):
            assert torch.equal(getattr(part, field), getattr(whole, field)[index]), field
        again = A.backend.pullback(part.u, part.status, (g[index], None, None))
        assert torch.equal(again[0], back[0][index]) and torch.equal(again[1], back[1][index])


@both_dtypes
@each_ended
def test_the_loss_of_a_layer_is_that_of_its_solution(name, dtype):
    """In one call or in three: value, gradient, and a second derivative."""
    given = draw(name, dtype=dtype)
    layer = taut.Projection(given.A, activation=given.activation)
    y = given.activation.sigma(torch.randn_like(given.v))
    v, w = (given.v.clone().requires_grad_() for _ in range(2))
    at_once = layer.loss(v, y, given.b)
    in_three = matched_loss(layer.solve(w, given.b), y)
    digits = 1e-10 if dtype == torch.float64 else 1e-3
    assert_close(at_once, in_three, rtol=digits, atol=digits)
    found = []
    for loss, leaf in ((at_once, v), (in_three, w)):
        (g,) = torch.autograd.grad(loss, leaf, create_graph=True)
        assert (g[given.v.isinf()] == 0).all()
        found.append((g, torch.autograd.grad(g.square().sum(), leaf)[0]))
    for one, other in zip(*found, strict=True):
        assert_close(one, other, rtol=digits, atol=digits)


@each_backend
def test_a_target_that_is_none_is_told_at_a_held_output_too(backend):
    given = draw("sigmoid")
    y = torch.rand(given.v.shape)
    y[1, given.v[1].isinf()] = 5.0
    layer = taut.Projection(given.A, activation="sigmoid")
    A = known(backend, given.A, "sigmoid")
    for loss in (
        lambda: layer.loss(given.v, y, given.b),
        lambda: matched_loss(project(given.v, A, given.b), y),
    ):
        with pytest.raises(ValueError, match=r"targets must lie in .* in sample 1"):
            loss()


@each_backend
def test_an_equation_beside_held_outputs_holds_the_others(backend):
    """b is an end of what is left, though not of what the range allows."""
    A, v = torch.ones(1, 3), torch.tensor([[INF, 0.0, 0.0], [0.0, 0.0, 0.0], [-INF, 1.0, 0.0]])
    found = project(v, known(backend, A, "sigmoid"), torch.tensor([[1.0], [1.0], [2.0]]))
    assert found.z[0].tolist() == [1, 0, 0] and found.u[0].tolist() == [INF, -INF, -INF]
    assert found.z[2].tolist() == [0, 1, 1] and found.u[1].isfinite().all()


# Bounds

LINES = {
    "linear": ALL["linear"],
    "srlu": ALL["srlu"],
    "weighted": taut.activations.weighted("linear", torch.tensor([0.5, 1.0, 2.0, 3.0])),
    "mixed": taut.activations.mixed(["linear", "exp", "linear", "sigmoid"]),
    "exp": ALL["exp"],
    "sigmoid": ALL["sigmoid"],
    "tanh": ALL["tanh"],
}
each_line = pytest.mark.parametrize("activation", LINES.values(), ids=LINES)


def bounded_problem(dtype, of_v):
    """Samples with infinite entries of v, each with bounds of its own, as `of_v` has these."""
    v = torch.randn(9, 4, dtype=dtype)
    v[::2, 0], v[1::3, 2], v[2::3, 1] = -of_v, -of_v, of_v
    lower = 0.05 + 0.1 * torch.rand(9, 4, dtype=dtype)
    upper = lower + 0.2 + 0.5 * torch.rand(9, 4, dtype=dtype)
    z = torch.where(v == -of_v, lower, torch.where(v == of_v, upper, 0.5 * (lower + upper)))
    return [x.requires_grad_() for x in (v, z.sum(-1, keepdim=True), lower, upper)]


@both_dtypes
@each_backend
@each_line
def test_an_infinite_v_is_the_limit_of_a_large_one(activation, backend, dtype):
    """z, which side is active, and all gradients; that in v is 0."""
    A, g = torch.ones(1, 4, dtype=dtype), torch.randn(9, 4, dtype=dtype)
    A, found = known(backend, A, activation), []
    torch.manual_seed(1)
    state = torch.get_rng_state()
    for size in (INF, 1e5):
        torch.set_rng_state(state)
        v, b, lower, upper = given = bounded_problem(dtype, size)
        solution = project(v, A, b, lower=lower, upper=upper)
        assert solution.converged.all()
        grads = torch.autograd.grad((solution.z * g).sum(), given)
        found.append((solution.z, solution.active, *grads))
        if size == INF:
            held = v.isinf()
            side = torch.where(v < 0, lower, upper)
            assert torch.equal(solution.z[held], side[held])
            assert torch.equal(solution.u[held], v[held]) and (grads[0][held] == 0).all()
    digits = 1e-9 if dtype == torch.float64 else 1e-4
    for one, other in zip(*found, strict=True):
        assert_close(one, other, rtol=digits, atol=digits)


@forward_mode
@each_line
def test_their_derivatives_are_the_same_in_every_way(activation):
    """Eager, under transforms, forward and backward."""
    v, b, lower, upper = (x.detach() for x in bounded_problem(torch.float64, INF))
    A, g = torch.ones(1, 4), torch.randn(9, 4)

    def value(*given):
        v, b, lower, upper = given
        found = project(v, A, b, lower=lower, upper=upper, activation=activation)
        return (found.z * g).sum() + found.multipliers.sum()

    leaves = [x.clone().requires_grad_() for x in (v, b, lower, upper)]
    eager = torch.autograd.grad(value(*leaves), leaves)
    every = (0, 1, 2, 3)
    transformed = torch.func.grad(value, every)(v, b, lower, upper)
    forward = torch.func.jacfwd(value, every)(v, b, lower, upper)
    for one, *others in zip(eager, transformed, forward, strict=True):
        for other in others:
            assert_close(other, one, rtol=1e-10, atol=1e-10)


@each_backend
@each_line
def test_the_loss_beside_bounds_leaves_them_out(activation, backend):
    """It is that of the other outputs, with b less what they take."""
    if activation is LINES["mixed"] or activation is LINES["weighted"]:
        pytest.skip("it has parameters for four outputs")
    A, y = torch.ones(1, 4), 0.3 + 0.2 * torch.rand(9, 4)
    v, b, lower, upper = bounded_problem(torch.float64, INF)
    b = 0.5 * (lower + upper).detach().sum(-1, keepdim=True)
    b = b - 0.5 * (upper - lower).detach()[:, 2:3]
    v.data[:, :2] = torch.where(v[:, :2].isinf(), 0.3, v[:, :2]).detach()
    v.data[:, 2] = -INF
    found = project(v, known(backend, A, activation), b, lower=lower, upper=upper)
    free = [0, 1, 3]
    w = v.detach()[:, free].requires_grad_()
    sides = {"lower": lower.detach()[:, free], "upper": upper.detach()[:, free]}
    rest = project(w, A[:, free], (b - lower[:, 2:3]).detach(), activation=activation, **sides)
    loss, other = matched_loss(found, y), matched_loss(rest, y[:, free])
    assert_close(loss, other, rtol=1e-10, atol=1e-12)
    g, low = torch.autograd.grad(loss, (v, lower))
    assert (g[:, 2] == 0).all()
    assert_close(g[:, free], torch.autograd.grad(other, w)[0], rtol=1e-9, atol=1e-12)
    assert_close(low[:, 2], found.multipliers[:, 0].detach() / 9, rtol=1e-9, atol=1e-12)


@each_backend
@each_line
def test_without_an_end_it_is_not_finite(activation, backend):
    v = torch.tensor([[0.3, 0.2, -INF, 0.4], [0.3, 0.2, INF, 0.4], [0.3, 0.2, 0.1, 0.4]])
    upper = torch.tensor([[2.0, 2, 2, 2], [2.0, 2, INF, 2], [2.0, 2, 2, 2]])
    A = known(backend, torch.ones(1, 4), activation)
    found = project(v, A, torch.tensor([1.5]), upper=upper, on_failure="return")
    ends = [x.expand(4)[2].item() for x in activation.range.bounds(v)]
    wrong = [-INF in ends[:1], INF in ends[1:], False]
    assert found.status.tolist() == [Status.NONFINITE if x else Status.CONVERGED for x in wrong]
    if any(wrong):
        assert f"Not finite: {sum(wrong)} of the 12 entries of v." in found.report()


@needs_cpu
@each_line
def test_the_kernel_decides_them_beside_inequalities_and_bounds(activation):
    if activation is LINES["srlu"]:
        pytest.skip("the kernel does not know it")
    A, G = torch.ones(1, 4), torch.tensor([[1.0, -1.0, 0.0, 2.0]])
    v, b, lower, upper = (x.detach() for x in bounded_problem(torch.float64, INF))
    bounds = A, b, None, lower, upper
    y = 0.5 * (lower + upper)
    ended = activation.range.bounds(v)[0].expand(4).isfinite()
    w = v.masked_fill(v == INF, 0.1)
    w = w.masked_fill(w.isinf() & ~ended, 0.1)
    z = torch.where(w.isinf(), activation.range.bounds(v)[0].expand(9, 4).nan_to_num(), y)
    rows = A, z.sum(-1, keepdim=True), G, torch.full((9, 1), -INF), z @ G.mT + 0.01
    for u, (A, b, G, lower, upper) in ((v, bounds), (w, rows)):
        prepared = taut.prepare(A, activation, G=G)
        prepared = prepared.bounded if G is None else prepared
        flat, _ = pose_sides(prepared, fitted_sides(u, A, b, G, lower, upper, None), False)
        found = prepared.backend.attempt(flat, Rules())
        assert found.failed == 0 and found.held == bool(u.isinf().any())
        right = project(u, known("torch", A, activation, G=G), b, lower=lower, upper=upper)
        assert_close(found.z, right.z, rtol=1e-10, atol=1e-11)
        assert torch.equal(found.u.isinf(), u.isinf())
        g = torch.randn_like(u)
        needs = [True, False] + [True] * (len(flat.inputs) - 2)
        at = found.multipliers, found.u, found.status, (g, None, None), needs
        made, left, count = prepared.backend.pull_within(flat, *at)
        assert count == 0 and not left.any() and (made[0][u.isinf()] == 0).all()
        with torch.no_grad():
            expected = replace(flat, prepared=known("torch", A, activation, G=G)).pullback(*at)
        for i in set(range(len(made))) - {1}:
            assert_close(made[i], expected[i], rtol=1e-9, atol=1e-11)


def test_a_masked_sparsemax():
    """What is left is the sparsemax of the other outputs."""
    v = torch.tensor([[1.0, 0.5, -INF, 0.2]])
    found = project(v, torch.ones(1, 4), torch.ones(1), lower=0.0)
    assert_close(found.z, torch.tensor([[0.75, 0.25, 0.0, 0.0]]), rtol=0, atol=1e-15)
    assert found.active.tolist() == [[0, 0, 1, 1]] and found.z[0, 2] == 0
