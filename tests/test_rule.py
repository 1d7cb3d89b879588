"""What CONVERGED promises: |A z − b| ≤ tol·(|b| + |A||z|) for each equation, at the z returned."""

import math
from dataclasses import replace

import pytest
import torch
from scipy.optimize import linprog
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import taut
from tables import both_dtypes
from taut import Status, is_certificate, project
from taut.backends import Rules

TOLERANCE = {torch.float64: 1e-12, torch.float32: 4 * torch.finfo(torch.float32).eps}


def ratio(solution, A, b):
    """|A z − b| over |b| + |A||z|, in float64; the largest of each sample."""
    A, b, z = A.double(), b.double(), solution.z.detach().double()
    size = b.abs() + (A.abs() @ z.abs().unsqueeze(-1)).squeeze(-1)
    gap = ((A @ z.unsqueeze(-1)).squeeze(-1) - b).abs()
    return (gap / size.clamp_min(1e-300)).amax(-1)


dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])
paths = pytest.mark.parametrize("alone", [False, True], ids=["one A", "an A each"])


def test_the_rule_is_what_the_documents_say():
    assert Rules().rule(torch.float64) == 1e-12
    assert Rules().rule(torch.float32) == TOLERANCE[torch.float32]
    assert Rules(tol=1e-3).rule(torch.float64) == 1e-3


@dtypes
@paths
def test_zero_b_with_small_terms(dtype, alone):
    """Traces beside large flows: in and out are the geometric mean of what was predicted."""
    A = torch.tensor([[1.0, -1, -1, 0, 0], [0, 0, 0, 1, -1]], dtype=dtype)
    v = torch.tensor([[3.0, 1, 2, 2e-7, 1e-7]], dtype=dtype).log()
    A, b = A.expand(1, -1, -1) if alone else A, torch.zeros(2, dtype=dtype)
    solution = project(v, A, b, activation="exp")
    expected = math.sqrt(2) * 1e-7
    assert_close(solution.z[0, 3:].double(), torch.full((2,), expected).double(), rtol=1e-6, atol=0)
    assert (ratio(solution, A, b) <= TOLERANCE[dtype]).all()


@dtypes
@paths
@pytest.mark.parametrize("size", [1e-12, 1e-20, 1e-30])
def test_a_tiny_b_on_one_output(dtype, alone, size):
    A, b = torch.ones(1, 1, dtype=dtype), torch.tensor([[size]], dtype=dtype)
    A = A.expand(1, 1, 1) if alone else A
    solution = project(torch.ones(1, 1, dtype=dtype), A, b)
    assert_close(solution.z, b, rtol=TOLERANCE[dtype], atol=0)


@pytest.mark.filterwarnings("ignore::taut.ConditionWarning")
@dtypes
@paths
@pytest.mark.parametrize("name", ["linear", "srlu", "mixed"])
@pytest.mark.parametrize("redundant", [False, True])
def test_straight_outputs_far_from_v(dtype, alone, name, redundant):
    """v is a million times z: rounding v + Aᵀλ alone would break the rule."""
    row = taut.activations.mixed(3 * ["linear", "sigmoid"]) if name == "mixed" else name
    A = torch.randn(20, 5, 6) if alone else torch.randn(5, 6)
    if redundant:
        A = (64 * A[..., :4, :]).round() / 64  # so that float32 has the sum exactly
        A = torch.cat([A, A[..., :2, :].sum(-2, keepdim=True)], -2)
    z = taut.activations.resolve(row).sigma(torch.randn(20, 6))
    v = 1e6 * (torch.randn(20, 1, A.shape[-2]) @ A).squeeze(-2)
    b = (A @ z.unsqueeze(-1)).squeeze(-1)
    v, A, b = (x.to(dtype) for x in (v, A, b))
    if redundant:
        b[..., 4] = b[..., :2].sum(-1)
    solution = project(v, A, b, activation=row, on_failure="return")
    assert solution.converged.all()
    assert (ratio(solution, A, b) <= TOLERANCE[dtype]).all()


def test_a_tolerance_of_ones_own_takes_its_place():
    v, A, b = torch.randn(50, 8), torch.randn(3, 8), torch.rand(50, 3)
    solution = project(v, A, b, activation="tanh", solver=taut.Newton(tol=1e-3))
    assert (ratio(solution, A, b) <= 1e-3).all() and (ratio(solution, A, b) > 1e-12).any()


# Outputs at an end of their range.


def margins(rows, columns):
    eye, one = torch.eye(rows), torch.ones(columns)
    return torch.cat([torch.kron(eye, one), torch.kron(torch.ones(rows), torch.eye(columns))])


@dtypes
@pytest.mark.parametrize("layout", ["dense", "each", "sparse"])
def test_a_total_of_nothing(dtype, layout):
    """Σz = 0 with exp: exact zeros, and the other outputs as if they were alone."""
    A = torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, 1]], dtype=dtype)
    held = {"dense": A, "each": A.expand(3, -1, -1), "sparse": A.to_sparse()}[layout]
    v, b = torch.randn(3, 4, dtype=dtype), torch.tensor([1.0, 0.0], dtype=dtype)
    solution = project(v, held, b, activation="exp")
    assert_close(solution.z[:, :2], v[:, :2].softmax(-1))
    assert (solution.z[:, 2:] == 0).all() and (solution.u[:, 2:] == -torch.inf).all()
    assert (solution.multipliers[:, 1] == 0).all()


@pytest.mark.parametrize(("name", "end"), [("sigmoid", 1.0), ("tanh", 1.0), ("bounded", 0.3)])
def test_the_most_there_can_be(name, end):
    row = taut.activations.bounded(0.1, 0.3) if name == "bounded" else name
    A = torch.tensor([[1.0, 2.0, 3.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    b = torch.tensor([6 * end, end + 0.15])
    solution = project(torch.randn(5, 4), A, b, activation=row)
    assert (solution.z[:, :3] == end).all() and (solution.u[:, :3] == torch.inf).all()
    assert_close(solution.z[:, 3], torch.full((5,), 0.15))


@pytest.mark.parametrize("name", ["exp", "sigmoid"])
def test_one_fixed_output_fixes_the_next(name):
    A = torch.tensor([[1.0, 1, 0, 0, 0], [0, -1, 1, 1, 0], [0, 0, 0, 1, 1]])
    b = torch.tensor([0.0, 0.0, 0.75])
    solution = project(torch.randn(6, 5), A, b, activation=name)
    assert (solution.z[:, :4] == 0).all()
    assert_close(solution.z[:, 4], torch.full((6,), 0.75))
    assert (solution.multipliers[:, :2] == 0).all()


def test_a_table_with_empty_margins_is_the_smaller_table():
    A, v, y = margins(4, 5), torch.randn(30, 20), torch.rand(30, 4, 5)
    y[:, 2], y[:, :, 1] = 0, 0
    y[::3, 0] = 0
    b = torch.cat([y.sum(-1), y.sum(-2)], -1)
    solution = project(v, A, b, activation="exp")
    assert (solution.z.reshape(30, 4, 5)[y == 0] == 0).all()
    rows, columns = [0, 1, 3], [0, 2, 3, 4]
    few = torch.arange(1, 30, 3)
    part = v.reshape(30, 4, 5)[few][:, rows][:, :, columns].flatten(1)
    smaller = torch.cat([y.sum(-1)[few][:, rows], y.sum(-2)[few][:, columns]], -1)
    expected = project(part, margins(3, 4), smaller, activation="exp").z
    found = solution.z.reshape(30, 4, 5)[few][:, rows][:, :, columns].flatten(1)
    assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_one_hot_margins():
    A, v = margins(3, 3), torch.randn(7, 9)
    b = torch.tensor([1.0, 0, 0, 0, 0, 1])
    solution = project(v, A, b, activation="sigmoid")
    assert (solution.z == torch.tensor([0.0, 0, 1, 0, 0, 0, 0, 0, 0])).all()
    assert (solution.residual == 0).all()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["exp", "sigmoid"])
def test_derivatives_around_held_outputs(name):
    """Those of the free outputs are right twice over; those of held ones are 0."""
    A = torch.tensor([[1.0, 1, 0, 0, 0], [0, 1, 1, 1, 0.5], [0, 0, 1, -1, 1]])
    b = torch.tensor([[0.0, 1.0, 0.2], [0.4, 1.0, 0.2]])
    v = torch.randn(2, 5, requires_grad=True)
    move = torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    t = torch.zeros(2, 3, requires_grad=True)
    entry = torch.zeros(3, 5, requires_grad=True)
    mask = torch.tensor([[0.0] * 5, [1.0] * 5, [1.0] * 5])

    def f(v, t, entry):
        given = A + entry * mask * (A != 0), b + t * move
        solution = project(v, *given, activation=name)
        finite = solution.u.where(solution.u.isfinite(), 0)
        return solution.z, solution.multipliers * move, finite

    assert gradcheck(f, (v, t, entry))
    assert gradgradcheck(lambda v, t: f(v, t, entry.detach())[0], (v, t))
    given = tuple(x.detach() for x in (v, t, entry))
    tangents = tuple(map(torch.randn_like, given))
    forward = torch.func.jvp(f, given, tangents)[1]
    weights = [torch.randn_like(x) for x in forward]
    back = torch.autograd.grad(f(v, t, entry), (v, t, entry), weights)
    assert_close(
        sum((x * w).sum() for x, w in zip(forward, weights, strict=True)),
        sum((x * g).sum() for x, g in zip(tangents, back, strict=True)),
    )
    solution = project(v, A, b, activation=name)
    (g,) = torch.autograd.grad((solution.z + solution.u).sum(), v)
    assert (g[0, :2] == 0).all() and g.isfinite().all() and (g[0, 2:] != 0).any()


@pytest.mark.parametrize("name", ["exp", "sigmoid"])
def test_the_loss_leaves_held_outputs_out(name):
    A, b = torch.tensor([[1.0, 1, 0, 0], [0, 1, 1, 1]]), torch.tensor([0.0, 1.0])
    v = torch.randn(3, 4, requires_grad=True)
    y = torch.rand(3, 4)
    y[:, 2:] /= y[:, 2:].sum(-1, keepdim=True)
    loss = taut.matched_loss(project(v, A, b, activation=name), y, reduction="none")
    free = project(v[:, 2:], torch.ones(1, 2), torch.ones(1), activation=name)
    assert_close(loss, taut.matched_loss(free, y[:, 2:], reduction="none"))
    (g,) = torch.autograd.grad(loss.sum(), v, create_graph=True)
    assert (g[:, :2] == 0).all()
    assert_close(g[:, 2:], free.z - y[:, 2:])
    (second,) = torch.autograd.grad(g.square().sum(), v)
    assert second.isfinite().all() and (second[:, :2] == 0).all()


@dtypes
def test_masked_softmax(dtype):
    """v = −inf is a structural zero."""
    v = torch.randn(20, 6, dtype=dtype)
    v[torch.rand(20, 6) < 0.4] = -torch.inf
    v[:, 0] = 0.5
    v.requires_grad_()
    solution = project(
        v, torch.ones(1, 6, dtype=dtype), torch.ones(1, dtype=dtype), activation="exp"
    )
    assert_close(solution.z, v.softmax(-1))
    weights = torch.randn(20, 6, dtype=dtype)
    (g,) = torch.autograd.grad((solution.z * weights).sum(), v)
    (expected,) = torch.autograd.grad((v.softmax(-1) * weights).sum(), v)
    assert_close(g, expected)


def test_infinities_without_an_end_are_not_finite():
    v = torch.tensor([[torch.inf, 0.0], [-torch.inf, 0.0], [torch.nan, 0.0], [0.0, 0.0]])
    one = torch.ones(1)
    found = project(v, torch.ones(1, 2), one, activation="exp", on_failure="return")
    bad = Status.NONFINITE
    assert found.status.tolist() == [bad, Status.CONVERGED, bad, Status.CONVERGED]
    found = project(v, torch.ones(1, 2), one, on_failure="return")
    assert found.status.tolist() == [bad, bad, bad, Status.CONVERGED]


def test_ends_that_contradict_are_proven_infeasible():
    A = torch.tensor([[1.0, 1, 0], [1, 0, 0]])
    b = torch.tensor([[0.0, 0.5], [0.7, 0.5]])
    solution = project(torch.randn(2, 3), A, b, activation="exp", on_failure="return")
    assert solution.status.tolist() == [Status.INFEASIBLE, Status.CONVERGED]
    assert is_certificate(solution.multipliers[0], A, b[0], "exp")


def test_a_small_b_is_not_an_end():
    b = torch.tensor([[1e-30], [1e-60], [1.0]])
    solution = project(torch.randn(3, 4), torch.ones(1, 4), b, activation="exp")
    assert solution.u.isfinite().all()
    assert_close(solution.z.sum(-1, keepdim=True), b, rtol=1e-12, atol=0)


def test_held_samples_do_not_disturb_their_neighbours():
    A, v = margins(3, 4), torch.randn(12, 12)
    y = torch.rand(12, 3, 4)
    y[5, 1] = 0
    b = torch.cat([y.sum(-1), y.sum(-2)], -1)
    others = torch.arange(12) != 5
    together = project(v, A, b, activation="exp").z[others]
    assert_close(together, project(v[others], A, b[others], activation="exp").z, rtol=1e-12, atol=0)


# Redundant is what is redundant in float64 of the numbers given.


@pytest.mark.filterwarnings("ignore::taut.ConditionWarning")
@pytest.mark.parametrize(
    ("A", "b", "name"),
    [
        ([[1e6, 1.0, 0.0], [1e6, 0.0, 1.0]], [1.2, 1.9], "sigmoid"),
        ([[1.0, 1.0], [1.0, 1 + 2e-6]], [1.0, 1 + 6e-6], "linear"),
    ],
)
def test_float32_equations_that_are_alike_are_kept(A, b, name):
    A, b = torch.tensor(A, dtype=torch.float32), torch.tensor(b, dtype=torch.float32)
    solution = project(torch.zeros(A.shape[1], dtype=torch.float32), A, b, activation=name)
    wide = project(torch.zeros(A.shape[1]), A.double(), b.double(), activation=name)
    assert_close(solution.z.double(), wide.z, rtol=1e-6, atol=1e-9)


def test_their_distance_is_told():
    A = torch.tensor([[1.0, 1.0], [1.0, 1 + 2e-6]], dtype=torch.float32)
    with pytest.warns(taut.ConditionWarning, match="condition number about 1e\\+06"):
        solution = project(torch.zeros(2, dtype=torch.float32), A, A.sum(-1))
    assert 5e5 < solution.condition < 2e6


@pytest.mark.parametrize("scale", [1e160, 1e-200, 1e-300])
@pytest.mark.parametrize("redundant", [False, True])
@pytest.mark.parametrize("kind", ["shared", "per sample", "sparse"])
def test_rows_of_any_size(scale, redundant, kind):
    A = torch.randn(4, 3, 7) if kind == "per sample" else torch.randn(3, 7)
    if redundant:
        A = torch.cat([A, A.sum(-2, keepdim=True)], -2)
    v = torch.randn(4, 7, requires_grad=True)
    b = (A @ torch.sigmoid(torch.randn(4, 7, 1))).squeeze(-1)
    held = torch.Tensor.to_sparse if kind == "sparse" else torch.Tensor.clone
    expected = project(v, held(A), b, activation="sigmoid")
    found = project(v, held(scale * A), scale * b, activation="sigmoid")
    assert_close(found.z, expected.z, rtol=0, atol=1e-11)
    assert_close(found.u, expected.u, rtol=0, atol=1e-9)
    if not (redundant and kind == "sparse"):  # of a sparse A they are not made the smallest
        assert_close(found.multipliers * scale, expected.multipliers, rtol=0, atol=1e-9)
    weights = torch.randn(4, 7)
    gradients = [torch.autograd.grad((x.z * weights).sum(), v)[0] for x in (found, expected)]
    assert_close(*gradients, rtol=0, atol=1e-9)


def test_rows_of_sizes_far_apart():
    A, v = torch.randn(3, 7), torch.randn(4, 7)
    b = torch.sigmoid(torch.randn(4, 7)) @ A.mT
    size = torch.tensor([1e150, 1.0, 1e-150])
    found = project(v, size[:, None] * A, size * b, activation="sigmoid")
    assert_close(found.z, project(v, A, b, activation="sigmoid").z, rtol=0, atol=1e-11)


def test_multipliers_of_redundant_rows_of_different_size_give_u():
    """The smallest multipliers move u no more than rounding does."""
    A = torch.randn(6, 12)
    size = 2.0 ** torch.tensor([-13.0, 13, 0, -13, 13, 0, 13, -13, 10])
    A = size[:, None] * torch.cat([A, A[:2].sum(0, True), A[2:4].sum(0, True), A[:1] - A[4:5]])
    v = torch.randn(10, 12)
    solution = project(v, A, torch.sigmoid(torch.randn(10, 12)) @ A.mT, activation="sigmoid")
    size = v.abs() + solution.multipliers.abs() @ A.abs()
    gap = (v + solution.multipliers @ A - solution.u).abs()
    assert (gap <= 64 * torch.finfo(torch.float64).eps * size).all()


# Certificates.


@pytest.mark.parametrize("size", [1.0, 1e-200, 1e200])
@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_what_underflows_proves_nothing(size, layout):
    """z = (1.5e200, 0.5) has A z = b."""
    A = torch.tensor([[1e-200, -1.0]])
    A = A.to_sparse() if layout == "sparse" else A
    assert not is_certificate(torch.tensor([size]), A, torch.tensor([1.0]), "exp")


def test_underflow_of_one_product_among_others():
    A, b = torch.tensor([[1e-200, -1.0], [0.0, -1.0]]), torch.tensor([1.0, 0.0])
    assert not is_certificate(torch.tensor([1e-200, 1.0]), A, b, "exp")


@pytest.mark.parametrize("size", [1e-300, 1e-200, 1e200, 1e300])
def test_a_proof_is_one_at_any_size(size):
    A, b = torch.ones(1, 2), torch.tensor([3.0])
    assert is_certificate(torch.tensor([size]), A, b, "sigmoid")
    assert not is_certificate(torch.tensor([size]), A, b / 3, "sigmoid")


# Samples that are hard, or hopeless.


@pytest.mark.parametrize(("name", "size"), [("sigmoid", 1e4), ("tanh", 1e4), ("exp", 300.0)])
def test_large_logits_with_targets_inside_are_decided(name, size):
    """Logits of 1e4 are a low temperature: nearly all converge, none is called anything wrong."""
    row, A = taut.activations.resolve(name), torch.randn(6, 20)
    b = row.sigma(torch.randn(64, 20)) @ A.mT
    v = size * (2 * torch.rand(64, 20) - 1)
    solution = project(v, A, b, activation=name, on_failure="return")
    assert solution.converged.double().mean() > 0.95
    undecided = {Status.CONVERGED, Status.MAX_ITERATIONS}
    assert set(map(Status, solution.status.tolist())) <= undecided
    assert (ratio(solution, A, b)[solution.converged] <= 1e-12).all()


def by_torch(A, activation):
    """Prepared for the torch path, whatever kernel there is."""
    return replace(taut.prepare(A, activation), backend=taut.backends.Torch())


COLD = {
    "sigmoid": taut.activations.sigmoid,
    "tanh": taut.activations.tanh,
    "bounded": taut.activations.bounded(-1.0, torch.tensor([3.0, 1.0, 0.5]).repeat(4)),
    "mixed": taut.activations.mixed(6 * ["sigmoid", "tanh"]),
}


@pytest.mark.parametrize("name", COLD)
@pytest.mark.parametrize(("kind", "size"), [("one", 1e6), ("each", 1e4), ("redundant", 1e3)])
def test_logits_that_make_a_step_of_sigma_are_decided_in_few_iterations(name, kind, size):
    """Every target inside converges, every one that a λ excludes is proven infeasible."""
    activation, A = COLD[name], torch.randn(*([64] if kind == "each" else []), 4, 12)
    A = torch.cat([A, A[..., :1, :] - A[..., 1:2, :]], -2) if kind == "redundant" else A
    v, inside = size * torch.randn(64, 12), activation.sigma(torch.randn(64, 12))
    beyond = torch.randn(64, 4)
    lower, upper = activation.range.bounds(v)
    image = (beyond.unsqueeze(-2) @ A[..., :4, :]).squeeze(-2)
    outside = torch.where(image > 0, upper, lower) + 0.1 * image
    b = torch.where(torch.arange(64)[:, None] % 2 == 0, inside, outside)
    b = (A @ b.unsqueeze(-1)).squeeze(-1)
    solution = project(v, by_torch(A, activation), b, on_failure="return")
    assert (solution.status[::2] == Status.CONVERGED).all()
    assert (solution.status[1::2] == Status.INFEASIBLE).all()
    assert is_certificate(solution.multipliers, A, b, activation)[1::2].all()
    assert solution.iterations.max() < 20
    assert (ratio(solution, A, b)[::2] <= 1e-12).all()
    image = (A.mT @ solution.multipliers.unsqueeze(-1)).squeeze(-1)
    u, blur = v + image, 64 * 2.0**-52 * (v.abs() + image.abs())
    near = (activation.sigma(u - blur) - 1e-9, activation.sigma(u + blur) + 1e-9)
    assert ((near[0] <= solution.z) & (solution.z <= near[1]))[::2].all()


@pytest.mark.parametrize("known", [by_torch, taut.prepare], ids=["torch", "own"])
def test_targets_that_float32_has_rounded_out_of_reach_are_decided(known):
    """Nearly all outputs of the target are 0 or 1: no z has that b, but one keeps the rule."""
    A, y = torch.randn(12, 24).float(), torch.sigmoid(40 * torch.randn(128, 24)).float()
    v, b = 0.3 * torch.randn(128, 24).float(), y @ A.mT
    solution = project(v, known(A, "sigmoid"), b, on_failure="return")
    infeasible = solution.status == Status.INFEASIBLE
    assert (solution.converged | infeasible).all()
    assert solution.converged.double().mean() > 0.95
    assert (ratio(solution, A, b)[solution.converged] <= TOLERANCE[torch.float32]).all()
    assert is_certificate(solution.multipliers, A, b, "sigmoid")[infeasible].all()


def test_large_logits_are_a_linear_program():
    A, v = torch.randn(6, 20), 1e6 * torch.randn(8, 20)
    b = torch.rand(8, 20) @ A.mT
    z = project(v, by_torch(A, "sigmoid"), b).z
    for own, target, found in zip(v, b, z, strict=True):
        best = linprog(-own.numpy(), A_eq=A.numpy(), b_eq=target.numpy(), bounds=(0, 1)).x
        assert_close(found, torch.from_numpy(best), rtol=0, atol=1e-6)


def test_a_start_that_is_near_is_kept_whatever_the_logits():
    A, v = torch.randn(4, 12), 1e4 * torch.randn(32, 12)
    known = by_torch(A, "sigmoid")
    b = torch.rand(32, 12) @ A.mT
    first = project(v, known, b)
    again = project(v, known, b, init=first.multipliers)
    assert again.iterations.max() <= 1
    none = taut.Newton(max_iterations=0)
    stopped = project(v, known, b, solver=none, on_failure="return")
    assert_close(stopped.u, v, rtol=0, atol=0)


def test_what_makes_no_progress_is_given_up():
    """Zeros that only several equations force: the residual falls with its own scale."""
    A = torch.tensor([[1.0, -1.0, 0.0], [1.0, -2.0, 0.0], [0.0, 0.0, 1.0]])
    b = torch.tensor([0.0, 0.0, 1.0])
    solver = taut.Newton(max_iterations=100_000)
    solution = project(torch.zeros(3), A, b, activation="exp", solver=solver, on_failure="return")
    assert solution.status in (Status.MAX_ITERATIONS, Status.CONVERGED)
    assert solution.iterations < 1000


@both_dtypes
def test_an_output_that_b_does_not_tell_of_is_not_held(dtype):
    """Σ is at its end to rounding; an output with a coefficient below that may be anywhere."""
    small = 1e-7 if dtype == torch.float32 else 1e-15
    A = torch.tensor([[1.0, small]], dtype=dtype)
    z = taut.project(
        torch.zeros(2, dtype=dtype), A, torch.ones(1, dtype=dtype), activation="sigmoid"
    ).z
    assert_close(z, torch.tensor([1.0, 0.5], dtype=dtype), rtol=0, atol=1e-3)
    A = torch.tensor([[1.0, 1.0, small, 0.0], [0.0, 0.0, 1.0, 1.0]], dtype=dtype)
    v = torch.tensor([-torch.inf, 0.0, 0.0, 0.0], dtype=dtype)
    b = torch.tensor([1.0, 0.7], dtype=dtype)
    solution = taut.project(v, A, b, activation="sigmoid", on_failure="return")
    assert solution.status != Status.INFEASIBLE


def test_ends_that_v_holds_and_equations_contradict_are_infeasible():
    """Not inconsistent: b is in the span of the columns of A."""
    v = torch.tensor([-torch.inf, 0.0, -torch.inf])
    A, b = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]), torch.tensor([0.3, 0.4])
    solution = taut.project(v, A, b, activation="sigmoid", on_failure="return")
    assert solution.status == Status.INFEASIBLE


def test_no_certificate_from_what_overflows_or_vanishes():
    one = torch.ones(1)
    assert not taut.is_certificate(one, torch.tensor([[1e305]]), one, "sigmoid")
    assert not taut.is_certificate(one, torch.tensor([[torch.nan]]), one, "sigmoid")
    A, b = torch.tensor([[0.0], [1.0]]), torch.tensor([1.0, 0.0])
    assert not taut.is_certificate(torch.tensor([1e20, 1e-310]), A, b, "exp")


def test_a_float32_solver_promises_what_float32_can():
    rules = taut.Newton(dtype=torch.float32).rules
    assert (
        rules.rule(torch.float64)
        == rules.rule(torch.float32)
        == 16 * torch.finfo(torch.float32).eps
    )


def test_the_residual_of_many_outputs_is_not_that_of_a_float32_sum():
    v, A = torch.randn(1, 100_000, dtype=torch.float32), torch.ones(1, 100_000, dtype=torch.float32)
    solution = taut.project(v, A, torch.tensor([5e4], dtype=torch.float32), activation="sigmoid")
    true = (solution.z.double().sum() - 5e4).abs()
    assert_close(solution.residual[0].double(), true, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("small", [1e-30, 1e-40, 1e-50, 1e-100])
@pytest.mark.parametrize("tol", [1e-8, 1e-6])
def test_a_loose_target_is_kept_by_equations_of_numbers_beyond_float32(small, tol):
    A, v = torch.randn(8, 64), torch.randn(16, 64)
    A[0, 16:] = 0
    A[1:, :16] = 0
    v[:, :16] *= small
    b = v.tanh() @ A.mT * (1 + 1e-5 * torch.randn(16, 8))
    z = taut.project(v, A, b, activation="tanh", solver=taut.Newton(tol=tol)).z
    scale = b.abs() + z.abs() @ A.mT.abs()
    assert ((z @ A.mT - b).abs() <= tol * scale).all()
