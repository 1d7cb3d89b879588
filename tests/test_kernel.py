"""The compiled kernel against the torch code it stands in for."""

import ctypes
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import taut
from measures import condition, spread
from tables import ROWS, SHORT, generator
from taut import Status
from taut.backends import Rules, cpu
from taut.backends.plan import make_plan
from taut.pose import pose
from taut.prepare import prepare

pytestmark = pytest.mark.skipif(cpu.variant() is None, reason="no kernel: was there a compiler?")

# Rows made of these functions alone are the kernel's; srlu is not.
COVERED = {name: row for name, row in ROWS.items() if "srlu" not in name}
COVERED.pop("weighted mixed")


@pytest.fixture
def without(monkeypatch):
    """Call a function with the torch code alone."""

    def call(function, *args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "_library", None)
            return function(*args, **kwargs)

    return call


def _decides(v, A, b, row):
    """Does the backend solve every sample?"""
    problem, _ = pose(prepare(A.detach(), row), v.detach(), None, b.detach(), None)
    return problem.prepared.backend.attempt(problem, taut.Newton().rules).failed == 0


def _problem(row, n=21, K=5, I=3, dtype=torch.float64, spread=2.0):
    A = torch.randn(I, K, dtype=torch.float64)
    b = row.sigma(torch.randn(n, K, dtype=torch.float64)) @ A.mT
    v = spread * torch.randn(n, K, dtype=torch.float64)
    return v.to(dtype), A.to(dtype), b.to(dtype)


def _solve_and_differentiate(v, A, b, row):
    v, b = v.clone().requires_grad_(), b.clone().requires_grad_()
    solution = taut.project(v, A, b, activation=row)
    y = row.sigma(torch.randn(v.shape, generator=generator(1), dtype=v.dtype))
    taut.matched_loss(solution, y).backward(retain_graph=True)
    matched, v.grad = v.grad, None
    loss = solution.z.square().sum() + solution.u.sin().sum() + solution.multipliers.cos().sum()
    loss.backward()
    return solution, taut.matched_loss(solution, y, reduction="none"), matched, v.grad, b.grad


@pytest.mark.parametrize("name", COVERED)
def test_agrees_with_the_torch_code(name, without):
    v, A, b = _problem(COVERED[name])
    fast, *numbers = _solve_and_differentiate(v, A, b, COVERED[name])
    slow, *others = without(_solve_and_differentiate, v, A, b, COVERED[name])
    assert _decides(v, A, b, COVERED[name])
    row = COVERED[name]
    for key, most in zip(("z", "multipliers"), spread(slow, v, A, b, row), strict=True):
        assert ((getattr(fast, key) - getattr(slow, key)).abs() <= most).all()
    assert_close(fast.u, v + fast.multipliers @ A, rtol=0, atol=1e-14 * fast.u.abs().max().item())
    # Rounding is magnified by the condition number in λ, and once more in derivatives at λ.
    digits = 1e-14 * condition(slow, A, row).max().item() ** 2
    for number, other in zip(numbers, others, strict=True):
        assert_close(number, other, rtol=0, atol=digits * (1 + other.abs().max().item()))


@pytest.mark.parametrize("name", SHORT)
def test_float32_is_the_rounding_of_the_right_answer(name, without):
    v, A, b = _problem(SHORT[name], dtype=torch.float32)
    solution = taut.project(v, A, b, activation=SHORT[name])
    exact = without(taut.project, v.double(), A.double(), b.double(), activation=SHORT[name])
    scale = 1 + exact.z.abs()
    assert ((solution.z - exact.z).abs() <= 1e-5 * scale).all()
    residual = (solution.z @ A.mT - b).abs().amax(-1)
    assert_close(solution.residual, residual, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", COVERED)
def test_float32_gradients_are_those_of_float64(name):
    v, A, b = _problem(COVERED[name], dtype=torch.float32)
    found = []
    for dtype in (torch.float32, torch.float64):
        inputs = [x.to(dtype).requires_grad_() for x in (v, b)]
        solution = taut.project(inputs[0], A.to(dtype), inputs[1], activation=COVERED[name])
        loss = solution.z.square().sum() + solution.u.sin().sum()
        found.append([g.double() for g in torch.autograd.grad(loss, inputs)])
    # Both start from the u found, rounded to float32; derivatives magnify that by κ.
    digits = torch.finfo(torch.float32).eps * condition(solution, A, COVERED[name]).max().item()
    for single, double in zip(*found, strict=True):
        assert_close(single, double, rtol=0, atol=64 * digits * double.abs().max().item())


@pytest.mark.parametrize("K", [1, 2, 3, 4, 7, 8, 9, 16, 30])
def test_every_size(K, without):
    for I in {1, 2, 3, 4, 5, 8, 9, K} & set(range(1, K + 1)):
        v, A, b = _problem(ROWS["sigmoid"], n=9, K=K, I=I)
        fast = taut.project(v, A, b, activation="sigmoid")
        slow = without(taut.project, v, A, b, activation="sigmoid")
        assert _decides(v, A, b, ROWS["sigmoid"])
        assert_close(fast.z, slow.z, rtol=0, atol=1e-11)


def _margins(rows, columns):
    return np.concatenate(
        [np.kron(np.eye(rows), np.ones(columns)), np.kron(np.ones(rows), np.eye(columns))]
    )


def _hierarchy():
    """total = Σ regions, region = Σ towns, with 5 regions of 3 towns."""
    towns = np.concatenate([np.zeros((5, 1)), -np.eye(5), np.kron(np.eye(5), np.ones(3))], axis=1)
    return np.concatenate([[[-1.0] + 5 * [1.0] + 15 * [0.0]], towns])


MOSTLY_ZEROS = {"margins": _margins(8, 6), "square": _margins(10, 10), "hierarchy": _hierarchy()}


@pytest.mark.parametrize("name", MOSTLY_ZEROS)
def test_mostly_zeros(name, without):
    A = torch.tensor(MOSTLY_ZEROS[name])
    layer = taut.Projection(A, activation="exp")
    assert "entry_start" in make_plan(prepare(A, "exp").basis, ROWS["exp"]).arrays
    v = torch.randn(20, A.shape[1], requires_grad=True)
    b = torch.randn(20, A.shape[1]).exp() @ A.mT
    fast = layer.solve(v, b)
    slow = without(taut.project, v, A, b, activation="exp")
    assert _decides(v, A, b, ROWS["exp"])
    assert_close(fast.z, slow.z, rtol=1e-12, atol=1e-12)
    assert_close(fast.multipliers, slow.multipliers, rtol=1e-11, atol=1e-11)
    weights = torch.randn_like(v)
    (one,) = torch.autograd.grad((fast.z * weights).sum(), v)
    (other,) = without(torch.autograd.grad, (slow.z * weights).sum(), v)
    assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["exp", "sigmoid", "tanh"])
@pytest.mark.parametrize("size", [1e-8, 1e-3, 0.3, 1.0, 10.0, 30.0, 700.0])
def test_functions_to_two_units_in_the_last_place(name, size):
    v = size * (2 * torch.rand(500, 8) - 1)
    b = ROWS[name].sigma(v).sum(-1, keepdim=True)  # so that λ = 0 stays
    problem, _ = pose(prepare(torch.ones(1, 8), ROWS[name]), v, None, b, torch.zeros_like(b))
    rules = Rules(tol=1e-15, max_iterations=0)
    z = problem.prepared.backend.attempt(problem, rules).z.numpy()
    x = v.numpy().astype(np.longdouble)
    right = {"exp": np.exp, "tanh": np.tanh, "sigmoid": lambda x: 1 / (1 + np.exp(-x))}[name](x)
    kept = np.abs(right) > 1e-300
    assert (np.abs(z - right)[kept] <= 2.1 * 2.2e-16 * np.abs(right)[kept]).all()


@pytest.mark.parametrize("name", sorted(SHORT.keys() & COVERED.keys()))
def test_a_sample_does_not_know_its_neighbours(name):
    """Bit for bit: alone, elsewhere in the batch, beside one that fails, on other threads."""
    row = SHORT[name]
    v, A, b = _problem(row, n=40)
    together = taut.project(v, A, b, activation=row)
    for part in (slice(0, 1), slice(3, 4), slice(5, 22)):
        alone = taut.project(v[part], A, b[part], activation=row)
        assert torch.equal(alone.z, together.z[part])
        assert torch.equal(alone.multipliers, together.multipliers[part])
    order = torch.randperm(40)
    elsewhere = taut.project(v[order], A, b[order], activation=row)
    assert torch.equal(elsewhere.z, together.z[order])
    v, b = v.clone(), b.clone()
    v[7], b[9], b[20] = torch.nan, torch.inf, 1e9
    disturbed = taut.project(v, A, b, activation=row, on_failure="return")
    others = [i for i in range(40) if i not in (7, 9, 20)]
    y = row.sigma(torch.randn(40, 5))
    losses = [taut.matched_loss(x, y, reduction="none")[others] for x in (disturbed, together)]
    assert torch.equal(*losses)
    for key in ("z", "multipliers", "residual"):
        assert torch.equal(getattr(disturbed, key)[others], getattr(together, key)[others])
    assert disturbed.status[7] == disturbed.status[9] == Status.NONFINITE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_gradients_do_not_know_their_neighbours(dtype, warm):
    """Bit for bit, for one layer; also from a start, and in float32."""
    v, A, b = _problem(ROWS["sigmoid"], n=40, K=12, I=5, dtype=dtype)
    layer, start = taut.Projection(A, activation="sigmoid"), 0.1 * torch.randn(40, 5, dtype=dtype)

    def gradients(part):
        inputs = [x[part].clone().requires_grad_() for x in (v, b)]
        solution = layer.solve(*inputs, init=start[part] if warm else None)
        loss = solution.z.square().sum() + solution.multipliers.sin().sum()
        return solution.z.detach(), *torch.autograd.grad(loss, inputs)

    together = gradients(torch.arange(40))
    for part in (torch.tensor([3]), torch.arange(5, 22), torch.randperm(40)):
        for alone, whole in zip(gradients(part), together, strict=True):
            assert torch.equal(alone, whole[part])


def test_threads_change_nothing():
    v, A, b = _problem(ROWS["sigmoid"], n=300, K=12, I=5)
    v.requires_grad_()
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            solution = taut.project(v, A, b, activation="sigmoid")
            found.append((solution.z, *torch.autograd.grad(solution.z.square().sum(), v)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


VARIANTS = ["v2", "v3", "v4"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_of_the_code(variant, monkeypatch):
    """Compiled for old and new processors; the one chosen here is only one of them."""
    info = Path("/proc/cpuinfo")
    flags = info.read_text() if info.exists() else ""
    if {"v3": "avx2", "v4": "avx512dq"}.get(variant, "") not in flags:
        pytest.skip("this processor cannot run it")
    v, A, b = _problem(ROWS["tanh"], n=30, K=20, I=6)
    v.requires_grad_()
    expected = taut.project(v, A, b, activation="tanh")
    (gradient,) = torch.autograd.grad(expected.z.square().sum(), v)
    for name in cpu._functions:
        function = getattr(cpu._library, f"taut_{name}_{variant}", None)
        if function is None:
            pytest.skip("not compiled for this kind of machine")
        pointer = ctypes.cast(function, ctypes.c_void_p)
        monkeypatch.setitem(cpu._functions, name, (function, pointer))
    found = taut.project(v, A, b, activation="tanh")
    assert_close(found.z, expected.z, rtol=0, atol=1e-14)
    assert_close(torch.autograd.grad(found.z.square().sum(), v)[0], gradient, rtol=0, atol=1e-13)


def test_what_it_does_not_solve_it_leaves():
    """Infeasible, inconsistent, not finite, and out of iterations: verdicts are torch's."""
    v, b = torch.zeros(4, 3), torch.tensor([[1.0], [4.0], [torch.nan], [2.0]])
    solution = taut.project(v, torch.ones(1, 3), b, activation="sigmoid", on_failure="return")
    expected = [Status.CONVERGED, Status.INFEASIBLE, Status.NONFINITE, Status.CONVERGED]
    assert solution.status.tolist() == expected
    twice = torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]])
    b = torch.tensor([[1.0, 2.0], [1.0, 2.1], [1.5, 3.0]])
    solution = taut.project(v[:3], twice, b, activation="exp", on_failure="return")
    assert solution.status.tolist() == [Status.CONVERGED, Status.INCONSISTENT, Status.CONVERGED]
    few = taut.project(
        *_problem(ROWS["sigmoid"]), activation="sigmoid", on_failure="return",
        solver=taut.Newton(max_iterations=1),
    )  # fmt: skip
    assert Status.MAX_ITERATIONS in few.status.tolist()


def test_a_gradient_it_cannot_find_is_found_elsewhere(without):
    """With one output saturated less than all others, A diag(w) Aᵀ is singular to rounding."""
    A = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]])
    u = torch.tensor([[0.1, 0.2, 0.3, 0.4], [60.0, 0.1, -60.0, 60.0]])
    grads, status = [torch.ones(2, 4), None, None], torch.zeros(2, dtype=torch.long)
    b = ROWS["sigmoid"].sigma(u) @ A.mT
    problem, _ = pose(prepare(A, "sigmoid"), u, None, b, None)
    problem.prepared.backend.attempt(problem, Rules())
    _, db, left = problem.prepared.backend.pullback(u, status, grads)
    assert left == 1 and db.isnan().any(-1).tolist() == [False, True]
    v = u.clone().requires_grad_()

    def gradient():
        solution = taut.project(v, A, ROWS["sigmoid"].sigma(u) @ A.mT, activation="sigmoid")
        return torch.autograd.grad(solution.z.sum(), v)[0]

    assert_close(gradient(), without(gradient), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [5.0, 15.0, 18.0, 30.0])
def test_saturated_tanh_keeps_its_slope(size, without):
    """λ answers to v by shares of the slopes, however small they are."""
    v = torch.tensor([[size, size + 0.5, size + 1.0]], requires_grad=True)
    b = torch.tanh(v.detach()).sum(-1, keepdim=True)

    def gradient():
        solution = taut.project(v, torch.ones(1, 3), b, activation="tanh")
        return torch.autograd.grad(solution.u[0, 0], v)[0]

    assert_close(gradient(), without(gradient), rtol=1e-12, atol=1e-14)


def test_a_line_that_overflows(without):
    A, b = 1e-10 * torch.eye(40, 80), torch.full((20, 40), 1e300)
    fast = taut.project(torch.zeros(20, 80), A, b, on_failure="return")
    slow = without(taut.project, torch.zeros(20, 80), A, b, on_failure="return")
    assert fast.status.tolist() == slow.status.tolist()
    assert Status.CONVERGED not in fast.status.tolist()


def test_without_memory_nothing_is_solved(monkeypatch):
    """The C code reports what it did, not what it did not."""
    monkeypatch.setitem(cpu._functions, "solve", (lambda call: None, None))
    v, A, b = _problem(ROWS["sigmoid"])
    solution = taut.project(v, A, b, activation="sigmoid")
    assert_close(solution.z @ A.mT, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_at_the_ends_of_a_bounded_row(dtype, without):
    row = taut.activations.bounded(0.1, 0.3)
    v, A, b = torch.zeros(1, 3, dtype=dtype), torch.ones(1, 3, dtype=dtype), torch.full((1, 1), 0.6)
    y = torch.tensor([[0.3, 0.1, 0.2]], dtype=dtype)

    def loss():
        return taut.matched_loss(taut.project(v, A, b.to(dtype), activation=row), y)

    assert_close(loss(), without(loss), rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=0)


def test_a_weight_that_makes_the_system_singular(without):
    row = taut.activations.weighted("linear", torch.tensor([1e-20, 1.0, 1e-20]))
    A, given = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]), {"on_failure": "return"}
    fast = taut.project(torch.zeros(2, 3), A, torch.ones(2), activation=row, **given)
    slow = without(taut.project, torch.zeros(2, 3), A, torch.ones(2), activation=row, **given)
    assert_close(fast.z, slow.z)


def test_tensors_that_c_cannot_read():
    v, A, b = _problem(ROWS["sigmoid"], n=4)
    z = taut.project(v, A, b, activation="sigmoid").z
    negative = torch.complex(torch.zeros_like(b), -b).conj().imag
    assert negative.is_neg()
    assert_close(taut.project(v, A, negative, activation="sigmoid").z, z, rtol=0, atol=1e-13)
    with torch.device("meta"):  # what is new goes elsewhere unless it is told not to
        solution = taut.project(v, A, b, activation="sigmoid")
        taut.matched_loss(solution, z)
    assert_close(solution.z, z, rtol=0, atol=0)


def test_batched_gradients():
    v, A, b = _problem(ROWS["tanh"], n=3)
    v.requires_grad_()
    z, directions = taut.project(v, A, b, activation="tanh").z, torch.randn(4, 3, 5)
    (all_at_once,) = torch.autograd.grad(z, v, directions, is_grads_batched=True, retain_graph=True)
    for one, direction in zip(all_at_once, directions, strict=True):
        (alone,) = torch.autograd.grad(z, v, direction, retain_graph=True)
        assert_close(one, alone, rtol=0, atol=1e-13)


def test_verdicts_and_signs_do_not_know_their_neighbours():
    A = torch.full((1, 8), 2e38, dtype=torch.float32)
    A[0, 4:] *= -1
    v = torch.full((2, 8), 3.0, dtype=torch.float32)
    v[1] = 2e6
    b = torch.zeros(2, 1, dtype=torch.float32)
    alone = taut.project(v[:1], A, b[:1], on_failure="return")
    assert alone.status[0] == taut.project(v, A, b, on_failure="return").status[0]
    v = torch.tensor([[-0.0, 0.0], [1.0, 2.0]])
    alone = taut.project(v[:1], torch.ones(1, 2), torch.zeros(1, 1)).z
    beside = taut.project(v, torch.ones(1, 2), torch.zeros(2, 1)).z[:1]
    assert torch.equal(alone.signbit(), beside.signbit())


def test_a_row_does_not_change_with_the_tensor_it_was_made_of():
    lower = torch.zeros(3)
    row = taut.activations.bounded(lower, torch.ones(3))
    before = taut.project(torch.zeros(2, 3), torch.ones(1, 3), torch.ones(1), activation=row).z
    lower.sub_(1.0)
    after = taut.project(torch.zeros(2, 3), torch.ones(1, 3), torch.ones(1), activation=row).z
    assert torch.equal(before, after)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_can_solve():
    """OpenMP's threads do not survive a fork; the kernel must not wait for them."""
    code = """
import os, torch, taut
torch.set_num_threads(2)
A, v = torch.randn(8, 64), torch.randn(256, 64)
b = torch.sigmoid(torch.randn(256, 64)) @ A.T
layer = taut.Projection(A, activation="sigmoid")
layer(v, b)
child = os.fork()
if child == 0:
    z = layer.solve(v, b).z
    os._exit(0 if float(z.max()) < 1 else 1)
print(os.waitpid(child, 0)[1])
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "0", done.stderr


def test_compiled_models():
    """In a process of its own: the shape checks of the test run are not for torch.compile."""
    code = """
import torch, taut
layer = taut.Projection(torch.ones(1, 3), activation="exp")
v, b = torch.randn(4, 3, requires_grad=True), torch.ones(4, 1)
z = torch.compile(layer, backend="eager")(v, b)
z.square().sum().backward()
print(float((z - layer(v, b)).abs().max()) < 1e-6, bool(v.grad.isfinite().all()))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "True True", done.stderr


def test_solutions_can_be_kept_in_files():
    solution = taut.project(torch.zeros(2, 3), torch.ones(1, 3), torch.ones(1), activation="exp")
    again = pickle.loads(pickle.dumps(solution))
    y = torch.full((2, 3), 1 / 3)
    assert_close(taut.matched_loss(again, y), torch.zeros(()), rtol=0, atol=1e-15)


def test_it_can_be_turned_off():
    code = "import torch, taut; print(taut.backends.available()); "
    code += "print(taut.project(torch.zeros(2), torch.ones(1, 2), torch.ones(1)).z.tolist())"
    environment = {**os.environ, "TAUT_KERNEL": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["torch", "[0.5, 0.5]"]
