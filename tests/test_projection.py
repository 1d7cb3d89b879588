"""taut.project: exact for every activation and every shape of problem; the nearest point; D."""

import pytest
import torch
from torch.testing import assert_close

import taut
from measures import output_rounding, relative_residual, scale, spread
from tables import (
    ALL,
    FEW,
    K,
    apply,
    each_activation,
    each_shape,
    few_activations,
    problem,
    shared_or_own,
    target,
)
from taut import Status
from taut.pose import pose
from taut.prepare import prepare

EPS = torch.finfo(torch.float64).eps


def check(solution, v, A, b, activation, tolerance):
    """Everything that is true of a converged solution."""
    assert solution.converged.all()
    assert relative_residual(A, b, solution.z) <= tolerance
    assert solution.z.dtype == solution.multipliers.dtype == solution.u.dtype == v.dtype
    assert solution.z.shape == solution.u.shape == v.shape
    assert solution.multipliers.shape == (*v.shape[:-1], A.shape[-2])
    assert solution.status.shape == solution.iterations.shape == v.shape[:-1]
    eps = torch.finfo(v.dtype).eps
    # u = v + Aᵀλ and z = σ(u), each to the rounding of its terms
    added = apply(A.mT, solution.multipliers)
    terms = v.abs() + apply(A.abs().mT, solution.multipliers.abs())
    if A.numel() and torch.linalg.matrix_rank(A).min() < A.shape[-2]:
        # λ is the smallest of many; the one that u was summed with may be longer.
        terms = terms * solution.condition.unsqueeze(-1)
    assert bool(((v + added - solution.u).abs() <= 8 * eps * terms).all())
    error = (solution.z - activation.sigma(solution.u)).abs()
    assert bool((error <= output_rounding(activation, solution.z)).all())
    assert bool(activation.range.contains(solution.z).all())
    measured = (apply(A, solution.z) - b).abs()
    if A.shape[-2]:
        error = (solution.residual - measured.amax(-1)).abs()
        assert bool((error <= 8 * eps * scale(A, b, solution.z).amax(-1)).all())


@each_shape
@few_activations
def test_exact_in_float64(activation, shape):
    v, A, b = problem(activation, size=3.0, **shape)
    solution = taut.project(v, A, b, activation=activation)
    check(solution, v, A, b, activation, 1e-12)


@each_shape
@pytest.mark.parametrize("name", ["exp", "sigmoid", "srlu", "mixed of derived"])
def test_exact_in_float32(name, shape):
    activation = FEW[name]
    v, A, b = problem(activation, size=3.0, dtype=torch.float32, **shape)
    solution = taut.project(v, A, b, activation=activation)
    check(solution, v, A, b, activation, 2e-6)


@pytest.mark.parametrize("rows", [1, 3])
@each_activation
def test_logits_to_twenty_in_float64(activation, rows):
    v, A, b = problem(activation, "saturated", n=50, I=rows, own=True)
    check(taut.project(v, A, b, activation=activation), v, A, b, activation, 1e-12)


@pytest.mark.parametrize("rows", [1, 3])
def test_logits_to_twenty_in_float32(rows):
    missed = {}
    for name, activation in ALL.items():
        v, A, b = problem(activation, "saturated", n=50, I=rows, own=True, dtype=torch.float32)
        solution = taut.project(v, A, b, activation=activation, on_failure="return")
        error = relative_residual(A, b, solution.z)
        if not (solution.converged.all() and error <= 2e-6):
            missed[name] = (int((~solution.converged).sum()), error)
    assert missed == {}


@pytest.mark.filterwarnings("ignore::taut.ConditionWarning")
@pytest.mark.parametrize("regime", ["planted", "redundant", "ill-conditioned"])
@shared_or_own
@each_activation
def test_the_right_answer_is_found(activation, own, regime):
    """b was made of z = σ(v + Aᵀλ): z comes back as exactly as A and rounding tell it."""
    given = problem(activation, regime, I=3, own=own)
    solution = given.solve()
    most, _ = spread(solution, *given, activation)
    assert ((solution.z - given.z).abs() <= most).all()


def test_exp_and_sigmoid_in_one_hard_problem():
    v = torch.tensor([17.66, -13.33, -9.633, 9.649, -7.291])
    A = torch.tensor(
        [
            [0.5142, 0.3104, 1.060, -1.006, 0.6843],
            [0.4210, 1.171, 0.5679, -0.7563, -1.138],
            [-0.5101, -0.4623, -0.1186, 0.8362, -0.4576],
        ]
    )
    b = torch.tensor([-2.222620964050293, -0.7274807691574097, 0.2617884874343872])
    activation = ALL["weighted mixed"]
    check(taut.project(v, A, b, activation=activation), v, A, b, activation, 1e-12)


@each_activation
def test_projection_is_the_nearest_point(activation):
    """B(·‖σ(v)) rises in every feasible direction, and its gradient is in the span of the rows."""
    v, A, b = problem(activation, n=())
    solution = taut.project(v, A, b, activation=activation)
    z = solution.z
    start = activation.sigma(v)
    nearest = activation.bregman(z, start).sum()
    null = torch.linalg.svd(A).Vh[2:]
    lower, upper = activation.range.bounds(z)
    for direction in [*null, *-null]:
        step = 1e-3 * direction
        room = torch.minimum(z - lower, upper - z).min().item()
        moved = z + step * min(1.0, 100 * room)
        # Next to an end all differences are below the rounding of the terms.
        assert activation.bregman(moved, start).sum() > nearest - 16 * EPS * nearest
    u = activation.inverse(z).where((z > lower) & (z < upper), solution.u)  # rounded to an end
    blur = (64 * EPS * (1 + z.abs()) / activation.slope(u)).max().item()  # z is rounded
    assert_close(apply(null, u - v), torch.zeros(K - 2), rtol=0, atol=1e-10 + blur)


@each_activation
def test_redundant_equations_change_nothing(activation):
    v, A, b = problem(activation)
    mix = torch.randn(3, 2)
    more, demands = torch.cat([A, mix @ A]), torch.cat([b, b @ mix.mT], -1)
    one = taut.project(v, A, b, activation=activation)
    other = taut.project(v, more, demands, activation=activation)
    assert_close(other.z, one.z, rtol=1e-11, atol=1e-12)
    assert_close(other.multipliers @ more, one.multipliers @ A, rtol=1e-9, atol=1e-10)
    # of all multipliers that do it, the smallest
    smallest = (torch.linalg.pinv(more.mT) @ (one.multipliers @ A).mT).mT
    assert_close(other.multipliers, smallest, rtol=1e-8, atol=1e-9)


def test_b_for_all_samples():
    v, A, b = torch.randn(2, 3, K), torch.randn(2, K), torch.tensor([0.5, -0.5])
    shared = taut.project(v, A, b, activation="tanh")
    each = taut.project(v, A, b.expand(2, 3, 2), activation="tanh")
    assert_close(shared.z, each.z)


def test_non_contiguous_and_expanded_tensors():
    activation = ALL["sigmoid"]
    v = torch.randn(K, 6).mT
    A = torch.randn(K, 2).mT
    b = apply(A, target(activation)).expand(6, 2)
    assert not v.is_contiguous() and not A.is_contiguous() and not b.is_contiguous()
    solution = taut.project(v, A, b, activation=activation)
    plain = taut.project(v.contiguous(), A.contiguous(), b.contiguous(), activation=activation)
    assert_close(solution.z, plain.z, rtol=0, atol=1e-13)
    own = torch.randn(6, K, 2).mT
    demands = apply(own, target(activation, 6))
    check(taut.project(v, own, demands, activation=activation), v, own, demands, activation, 1e-12)


def test_inputs_are_left_alone():
    v, A, b = problem("exp")
    init = torch.randn(6, 2)
    before = [x.clone() for x in (v, A, b, init)]
    solution = taut.project(v, A, b, activation="exp", init=init)
    solution.z.add_(1.0)
    for x, y in zip((v, A, b, init), before, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", ["linear", "exp", "sigmoid"])
def test_outputs_share_no_memory_with_inputs(name):
    """Also where nothing had to be done: no rows to obey, or z = v already."""
    v = torch.randn(4, K)
    b = ALL[name].sigma(v).sum(-1, keepdim=True)
    solution = taut.project(v, torch.ones(1, K), b, activation=name)
    assert solution.iterations.max() == 0
    before = v.clone()
    solution.u.add_(1.0)
    solution.z.add_(1.0)
    assert torch.equal(v, before)


def test_many_equations():
    given = problem("sigmoid", n=40, I=30, K=60, size=10.0)
    assert relative_residual(given.A, given.b, given.solve().z) < 1e-12


def test_one_hot_targets_are_reached_in_the_limit():
    """b only reachable at the end of the range: λ → ∞, and A z = b to rounding all the same."""
    A = torch.randn(3, K)
    y = torch.eye(K)[:4]
    solution = taut.project(torch.randn(4, K), A, y @ A.mT, activation="sigmoid")
    assert relative_residual(A, y @ A.mT, solution.z) < 1e-12


def test_status_of_all_that_converge_is_zero():
    solution = taut.project(torch.randn(3, K), torch.randn(2, K), torch.randn(2))
    assert solution.status.tolist() == [Status.CONVERGED] * 3


def test_a_prepared_A_is_A():
    v, A, b = torch.randn(4, 3), torch.ones(1, 3), torch.ones(1)
    prepared = taut.prepare(A, "exp")
    z = taut.project(v, A, b, activation="exp").z
    assert_close(taut.project(v, prepared, b).z, z, rtol=0, atol=1e-14)
    assert_close(taut.project(v, prepared, b, activation="exp").z, z, rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match="this A was prepared for 'exp'; got activation='tanh'"):
        taut.project(v, prepared, b, activation="tanh")
    with pytest.raises(ValueError, match=r"A requires a gradient.*taut\.Projection"):
        taut.prepare(A.requires_grad_(), "exp")


# D(λ) = Σφ(v + Aᵀλ) − bᵀλ: its gradient is A z − b, its Hessian A diag(σ') Aᵀ


def dual_of(activation, own=False):
    v, A, b = problem(activation, n=4, own=own)
    return pose(prepare(A, activation), v, None, b, None)[0]


def value(D, multipliers):
    return D.value(multipliers, predictor(D, multipliers))


def predictor(D, multipliers):
    return D.A.shifted_adjoint(D.v, multipliers)


def gradient_of(D, multipliers):
    return D.residual(D.prepared.activation.sigma(predictor(D, multipliers)))


@each_activation
@shared_or_own
def test_gradient_and_hessian_are_derivatives(activation, own):
    D = dual_of(activation, own)
    multipliers = torch.randn(4, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(value(D, multipliers).sum(), multipliers, create_graph=True)
    assert_close(gradient, gradient_of(D, multipliers), rtol=1e-11, atol=1e-12)
    columns = [torch.autograd.grad(gradient[:, i].sum(), multipliers, retain_graph=True)[0]
               for i in range(2)]  # fmt: skip
    hessian = D.A.gram(activation.slope(predictor(D, multipliers)))
    assert_close(torch.stack(columns, -1), hessian, rtol=1e-10, atol=1e-12)


@each_activation
def test_value_is_convex(activation):
    D = dual_of(activation)
    one, other = torch.randn(4, 2), torch.randn(4, 2)
    for t in torch.linspace(0.1, 0.9, 9):
        chord = t * value(D, one) + (1 - t) * value(D, other)
        assert bool((value(D, t * one + (1 - t) * other) < chord).all())


@each_activation
def test_residual_is_the_gradient(activation):
    D = dual_of(activation)
    multipliers = torch.randn(4, 2)
    z = activation.sigma(D.v + apply(D.A.data.mT, multipliers))
    assert_close(D.residual(z), apply(D.A.data, z) - D.b)
    assert_close(gradient_of(D, multipliers), D.residual(z))


@shared_or_own
def test_take_selects_samples(own):
    D, index = dual_of(ALL["sigmoid"], own), torch.tensor([2, 0])
    multipliers = torch.randn(4, 2)
    part = D.take(index)
    assert_close(value(part, multipliers[index]), value(D, multipliers)[index])
    assert_close(gradient_of(part, multipliers[index]), gradient_of(D, multipliers)[index])
