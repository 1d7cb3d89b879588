"""Newton and the paper's gradient descent: starts, stopping, groups, large logits."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import taut
from measures import assert_edge_verdicts, assert_same_answers, relative_residual
from tables import (
    ALL,
    K,
    apply,
    conditioned,
    each_activation,
    each_regime,
    few_activations,
    has,
    problem,
    target,
)
from taut import GradientDescent, Newton, Status

# many solves: the shapes are checked elsewhere
pytestmark = pytest.mark.usefixtures("as_user")


@few_activations
def test_solvers_agree(activation):
    v, A, b = problem(activation, size=1.5, matrix=conditioned(0))
    descent = GradientDescent(step=1.5, min_step=1e-14, threshold=1e-11, max_iterations=5000)
    one = taut.project(v, A, b, activation=activation)
    other = taut.project(v, A, b, activation=activation, solver=descent, on_failure="return")
    # It stops when steps no longer lower the loss, that is, within √eps of it: in units of z.
    assert_close(other.z, one.z, rtol=0, atol=3e-5 * (1 + one.z.abs().max().item()))
    assert_close(other.multipliers, one.multipliers, rtol=1e-3, atol=1e-3)


# Newton


@each_activation
def test_newton_is_quick(activation):
    v, A, b = problem(activation, n=40, size=3.0)
    solution = taut.project(v, A, b, activation=activation)
    assert solution.converged.all()
    assert solution.iterations.max() <= 20


def test_newton_solves_linear_problems_in_one_step():
    v, A, b = problem("linear", size=3.0)
    assert taut.project(v, A, b).iterations.max() <= 1


@each_activation
def test_newton_starts_at_the_solution_it_is_given(activation):
    v, A, b = problem(activation, size=3.0)
    cold = taut.project(v, A, b, activation=activation)
    warm = taut.project(v, A, b, activation=activation, init=cold.multipliers)
    assert_close(warm.z, cold.z, rtol=1e-12, atol=1e-13)
    assert bool((warm.iterations <= 1).all())
    assert bool((cold.iterations > 1).any()) or cold.iterations.max() <= 1


@each_activation
def test_newton_finds_the_same_from_any_start(activation):
    v, A, b = problem(activation, size=3.0)
    cold = taut.project(v, A, b, activation=activation)
    warm = taut.project(v, A, b, activation=activation, init=cold.multipliers + torch.randn(6, 2))
    assert_close(warm.z, cold.z, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e300])
def test_newton_survives_a_useless_start(bad):
    v, A, b = problem("sigmoid", size=3.0)
    init = torch.zeros(6, 2)
    init[2, 0] = bad
    solution = taut.project(v, A, b, activation="sigmoid", init=init)
    assert_close(solution.z, taut.project(v, A, b, activation="sigmoid").z, rtol=0, atol=1e-12)


def test_init_for_all_samples_and_of_another_dtype():
    v, A, b = problem("tanh", size=3.0)
    cold = taut.project(v, A, b, activation="tanh")
    for init in (torch.zeros(2), torch.ones(6, 2, dtype=torch.float32)):
        warm = taut.project(v, A, b, activation="tanh", init=init)
        assert_close(warm.z, cold.z, rtol=0, atol=1e-11)


def test_init_carries_no_gradient():
    v, A, b = problem("tanh", size=3.0)
    init = torch.zeros(6, 2, requires_grad=True)
    solution = taut.project(v.requires_grad_(), A, b, activation="tanh", init=init)
    solution.z.sum().backward()
    assert init.grad is None


def test_newton_stops_each_sample_alone():
    activation = ALL["sigmoid"]
    v, A, b = problem(activation, n=8, size=15.0)
    v[0] = activation.inverse(target(activation))  # feasible as it stands
    b[0] = apply(A, activation.sigma(v[0]))
    solution = taut.project(v, A, b, activation=activation)
    assert solution.iterations[0] == 0
    assert solution.iterations.max() > 3


def test_newton_obeys_its_tolerance():
    v, A, b = problem("sigmoid", n=40, size=10.0)
    loose = taut.project(v, A, b, activation="sigmoid", solver=Newton(tol=1e-3))
    tight = taut.project(v, A, b, activation="sigmoid")
    assert loose.converged.all()
    assert relative_residual(A, b, loose.z) < 1e-2
    assert loose.iterations.sum() < tight.iterations.sum()
    assert loose.residual.max() > tight.residual.max()


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_newton_obeys_its_limit(limit):
    v, A, b = problem("sigmoid", n=40, size=10.0)
    solution = taut.project(
        v, A, b, activation="sigmoid", solver=Newton(max_iterations=limit), on_failure="return"
    )
    assert solution.iterations.max() == limit
    late = ~solution.converged
    assert late.any()
    assert bool((solution.status[late] == Status.MAX_ITERATIONS).all())
    assert_close(solution.z, ALL["sigmoid"].sigma(v + solution.multipliers @ A), rtol=0, atol=1e-12)


@pytest.mark.parametrize("tol", [0.0, -1.0, float("nan")])
def test_newton_refuses_a_tolerance(tol):
    with pytest.raises(ValueError, match="tol must be positive or None; got"):
        Newton(tol=tol)


def test_newton_refuses_a_limit():
    with pytest.raises(ValueError, match="max_iterations must be ≥ 0; got -1"):
        Newton(max_iterations=-1)


def test_solvers_are_values():
    assert Newton() == Newton()
    assert Newton(tol=1e-3) != Newton()
    assert GradientDescent() == GradientDescent(0.1, 1e-6, 5e-3, 1000)
    assert "step=0.1" in repr(GradientDescent())
    with pytest.raises(AttributeError, match="tol"):
        Newton().tol = 1.0


# Where plain Newton fails

HARD = [("sigmoid", 60), ("tanh", 60), ("exp", 60), ("linear", 1e6), ("srlu", 100)]


@pytest.mark.parametrize(("activation", "size"), HARD)
@pytest.mark.parametrize(("K", "I"), [(100, 50), (60, 50), (20, 6)])
def test_large_logits_converge(activation, size, K, I):
    _converges(activation, size, K, I, rows=30)


@pytest.mark.slow
@pytest.mark.parametrize(("activation", "size"), HARD)
@pytest.mark.parametrize(("K", "I"), [(100, 50), (60, 50), (20, 6)])
def test_large_logits_converge_in_more_samples(activation, size, K, I):
    _converges(activation, size, K, I, rows=340)


def _converges(activation, size, K, I, rows):
    v, A, b = problem(activation, n=rows, I=I, K=K, size=size)
    solution = taut.project(v, A, b, activation=activation, on_failure="return")
    assert int((~solution.converged).sum()) == 0
    assert int(solution.iterations.max()) <= 200
    scale = b.abs() + solution.z.abs() @ A.abs().mT
    spread = taut.activations.ACTIVATIONS[activation].slope(solution.u) * (
        solution.u.abs() + v.abs()
    )
    rounding = 1e-12 * scale + 1e-13 * spread @ A.abs().mT
    assert ((solution.z @ A.mT - b).abs() <= rounding).all()


# GradientDescent


def by_hand(activation, v, A, b, multipliers, solver):
    """Section 4 for one group, as plainly as it can be written."""
    alpha, iterations = solver.step, 0

    def loss_of(multipliers):
        u = v + multipliers @ A
        return (activation.phi(u).sum(-1) - (b * multipliers).sum(-1)).mean()

    loss = loss_of(multipliers)
    while iterations < solver.max_iterations and alpha >= solver.min_step:
        iterations += 1
        gradient = activation.sigma(v + multipliers @ A) @ A.mT - b
        trial = multipliers - alpha * gradient
        change = loss - loss_of(trial)
        if not change > 0:  # too high: halve the step and try again
            alpha = alpha / 2
            continue
        multipliers, loss = trial, loss - change
        if change < solver.threshold:
            break
    return multipliers, iterations


DESCENTS = {
    "the paper's": GradientDescent(),
    "with memory": GradientDescent(threshold=1e-3),
    "tight": GradientDescent(threshold=1e-8),
    "step too high": GradientDescent(step=50.0),
    "few iterations": GradientDescent(threshold=0.0, max_iterations=17),
    "coarse smallest step": GradientDescent(step=64.0, min_step=1.0, threshold=0.0),
    "no iterations": GradientDescent(max_iterations=0),
}


@pytest.mark.parametrize("solver", DESCENTS.values(), ids=DESCENTS.keys())
@pytest.mark.parametrize("name", ["exp", "sigmoid", "tanh", "linear", "srlu"])
def test_gradient_descent_is_section_4(name, solver):
    activation = ALL[name]
    v, A, b = problem(activation, n=20, size=2.0)
    A = A * 2
    b = b * 2
    init = 0.1 * torch.randn(20, 2)
    solution = taut.project(
        v, A, b, activation=activation, solver=solver, init=init, on_failure="return"
    )
    multipliers, iterations = by_hand(activation, v, A, b, init, solver)
    # Without a threshold the last steps are judged by rounding of the loss, quadratic in λ.
    digits = 1e-9 if solver.threshold else 10 * torch.finfo(torch.float64).eps ** 0.5
    assert_close(solution.multipliers, multipliers, rtol=digits, atol=0.1 * digits)
    assert solution.iterations.tolist() == [iterations] * 20
    assert_close(solution.z, activation.sigma(v + multipliers @ A), rtol=digits, atol=0.1 * digits)
    assert_close(solution.residual, (solution.z @ A.mT - b).abs().amax(-1))


@pytest.mark.parametrize("own", [False, True], ids=["shared A", "A per sample"])
def test_groups_are_independent(own):
    """v of shape (G, n, K) is each group alone; a group shares its step and its stop."""
    activation = ALL["sigmoid"]
    v = torch.randn(5, 7, K) * torch.tensor([0.1, 1.0, 3.0, 6.0, 12.0])[:, None, None]
    A = 3 * (torch.randn(5, 7, 2, K) if own else torch.randn(2, K))
    b = apply(A, target(activation, 5, 7))
    solver = GradientDescent()
    together = taut.project(v, A, b, activation=activation, solver=solver, on_failure="return")
    for g in range(5):
        matrix = A[g] if own else A
        alone = taut.project(
            v[g], matrix, b[g], activation=activation, solver=solver, on_failure="return"
        )
        assert_close(together.multipliers[g], alone.multipliers, rtol=1e-10, atol=1e-11)
        assert_close(together.iterations[g], alone.iterations)
        assert_close(together.status[g], alone.status)
        assert together.iterations[g].unique().numel() == 1
    assert together.iterations[:, 0].unique().numel() > 1


def test_more_leading_dimensions_are_more_groups():
    activation = ALL["sigmoid"]
    v, A = torch.randn(2, 3, 4, K), torch.randn(2, K)
    b = apply(A, target(activation, 2, 3, 4))
    solver = GradientDescent()
    deep = taut.project(v, A, b, activation=activation, solver=solver, on_failure="return")
    flat = taut.project(
        v.flatten(0, 1),
        A,
        b.flatten(0, 1),
        activation=activation,
        solver=solver,
        on_failure="return",
    )
    assert_close(deep.multipliers.flatten(0, 1), flat.multipliers)
    assert_close(deep.iterations.flatten(0, 1), flat.iterations)


def test_gradient_descent_unbatched_and_empty():
    v, A, b = problem("sigmoid", n=1, size=3.0)
    solver = GradientDescent()
    one = taut.project(v, A, b, activation="sigmoid", solver=solver, on_failure="return")
    none = taut.project(v[0], A, b[0], activation="sigmoid", solver=solver, on_failure="return")
    assert_close(one.z[0], none.z)
    for shape in ((0,), (3, 0), (0, 3)):
        empty = taut.project(torch.zeros(*shape, K), A, b[0], activation="sigmoid", solver=solver)
        assert empty.z.shape == (*shape, K)


def test_gradient_descent_says_what_it_left():
    """The paper's stop does not promise A z = b; the status does."""
    v, A, b = problem("sigmoid", n=20, size=5.0)
    solution = taut.project(
        v, A, b, activation="sigmoid", solver=GradientDescent(), on_failure="return"
    )
    assert not solution.converged.all()
    assert set(solution.status.tolist()) <= {Status.CONVERGED, Status.MAX_ITERATIONS}
    assert solution.residual[~solution.converged].min() > 1e-3
    with pytest.raises(taut.SolveError, match="MAX_ITERATIONS"):
        taut.project(v, A, b, activation="sigmoid", solver=GradientDescent())


def test_gradient_descent_keeps_a_bad_sample_to_itself():
    """A NaN in the group must not decide the step or the stop of its neighbours."""
    v, A, b = problem("sigmoid", n=8, size=3.0)
    solver = GradientDescent()
    v[3, 0] = float("nan")
    solution = taut.project(v, A, b, activation="sigmoid", solver=solver, on_failure="return")
    keep = [i for i in range(8) if i != 3]
    assert solution.status[3] == Status.NONFINITE
    assert solution.z[keep].isfinite().all()
    alone = taut.project(
        v[keep], A, b[keep], activation="sigmoid", solver=solver, on_failure="return"
    )
    assert_close(solution.z[keep], alone.z, rtol=0, atol=0.05)


@pytest.mark.parametrize(
    "arguments", [{"step": 0.0}, {"min_step": -1.0}, {"threshold": -1e-3}, {"step": float("nan")}]
)
def test_gradient_descent_refuses(arguments):
    with pytest.raises(ValueError, match="needs step > 0, min_step > 0 and threshold ≥ 0; got"):
        GradientDescent(**arguments)


def test_gradient_descent_refuses_a_limit():
    with pytest.raises(ValueError, match="max_iterations must be ≥ 0; got -1"):
        GradientDescent(max_iterations=-1)


# Devices without a kernel: each look at a number waits for all that was asked before


@pytest.mark.parametrize("activation", ["sigmoid", "exp"])
def test_a_device_is_read_from_seldom(monkeypatch, activation):
    """Counted as if the CPU were a device; the answers are those of before."""
    given = problem(activation, n=256, I=8, K=64, size=1.0, seed=4)
    prepared = taut.prepare(given.A, activation)
    expected = taut.project(given.v, prepared, given.b)
    reads = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.name().removeprefix("aten::").split(".")[0]
            masked = name == "index" and any(
                x is not None and x.dtype == torch.bool for x in args[1]
            )
            if masked or name in ("_local_scalar_dense", "nonzero", "equal", "masked_select"):
                reads.append(name)
            return func(*args, **(kwargs or {}))

    base = taut.solvers.base

    def look(*numbers, plainly=base.look):  # on the CPU it is no operation
        reads.append("look")
        return plainly(*numbers)

    monkeypatch.setattr(base, "look", look)
    monkeypatch.setattr(base, "on_host", lambda x: False)
    object.__setattr__(prepared, "backend", taut.backends.Torch())
    taut.project(given.v, prepared, given.b)  # what is found out about A is found out once
    reads.clear()
    with Noting():
        found = taut.project(given.v, prepared, given.b)
    assert_close(found.z, expected.z, rtol=0, atol=1e-12)
    iterations = int(found.iterations.max())
    assert len(reads) <= 4 * iterations + 3, (reads, iterations)
    assert activation == "exp" or len(reads) <= 2 * iterations + 5


@pytest.mark.parametrize("activation", ["sigmoid", "exp"])
@each_regime
def test_a_device_comes_to_the_same_verdicts(monkeypatch, activation, regime):
    if not has(regime, taut.activations.resolve(activation)):
        pytest.skip("it cannot be so")
    given = problem(activation, n=12, regime=regime, seed=2)
    start = torch.randn(12, given.A.shape[-2])
    found = []
    for on_host in (taut.solvers.base.on_host, lambda x: False):
        prepared = taut.prepare(given.A, activation)
        object.__setattr__(prepared, "backend", taut.backends.Torch())
        monkeypatch.setattr(taut.solvers.base, "on_host", on_host)
        found.append(taut.project(given.v, prepared, given.b, init=start, on_failure="return"))
    host, device = found
    if regime == "at the edge":  # λ is as long as it happens to be when z arrives
        assert_edge_verdicts(device.status, host.status)
    else:
        assert_same_answers(device, host, given)
    solved = device.converged
    assert relative_residual(given.A, given.b[solved], device.z[solved]) <= 1e-12
    assert device.residual.isnan().tolist() == host.residual.isnan().tolist()
