"""The compiled backend: its functions, variants, plans, layout, memory, threads and forks."""

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import taut
from tables import ALL, K, each_activation, margins, needs_cpu, prepared, problem
from taut.activations import exp, sigmoid
from taut.activations.codes import codes
from taut.analysis import analyse
from taut.backends import Rules, cpu, plan
from taut.backends.plan import make_plan
from taut.pose import pose

pytestmark = needs_cpu


def attempt(v, A, b, activation, rules=None, init=None):
    flat, _ = pose(taut.prepare(A, activation), v, None, b, init)
    return flat.prepared.backend.attempt(flat, rules or Rules())


@each_activation
def test_what_it_knows_it_solves(activation):
    """Plain samples of every activation that has codes: none is left to torch."""
    if codes(activation, K) is None:
        assert "srlu" in activation.name or activation.name == "weighted(mixed)"
        pytest.skip("has no codes")
    v, A, b = problem(activation, n=21, I=3)
    assert attempt(v, A, b, activation).failed == 0


@pytest.mark.parametrize("outputs", [1, 2, 3, 4, 7, 8, 9, 16, 30])
def test_it_solves_in_every_size(outputs):
    for I in {1, 2, 3, 4, 5, 8, 9, outputs} & set(range(1, outputs + 1)):
        v, A, b = problem(n=9, K=outputs, I=I)
        if not taut.prepare(A).basis.transformed:  # nearly dependent equations are torch's
            assert attempt(v, A, b, "sigmoid").failed == 0


@pytest.mark.parametrize("name", ["exp", "sigmoid", "tanh"])
@pytest.mark.parametrize("size", [1e-8, 1e-3, 0.3, 1.0, 10.0, 30.0, 700.0])
def test_functions_to_two_units_in_the_last_place(name, size):
    v = size * (2 * torch.rand(500, 8) - 1)
    b = ALL[name].sigma(v).sum(-1, keepdim=True)  # so that λ = 0 stays
    rules, start = Rules(tol=1e-15, max_iterations=0), torch.zeros_like(b)
    z = attempt(v, torch.ones(1, 8), b, ALL[name], rules, start).z.numpy()
    x = v.numpy().astype(np.longdouble)
    right = {"exp": np.exp, "tanh": np.tanh, "sigmoid": lambda x: 1 / (1 + np.exp(-x))}[name](x)
    kept = np.abs(right) > 1e-300
    assert (np.abs(z - right)[kept] <= 2.1 * 2.2e-16 * np.abs(right)[kept]).all()


def test_a_gradient_that_cholesky_cannot_find_is_found_in_another_basis():
    """With one output saturated less than all others, A diag(w) Aᵀ is singular to rounding."""
    A = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]])
    u = torch.tensor([[0.1, 0.2, 0.3, 0.4], [60.0, 0.1, -60.0, 60.0]])
    grads, status = [torch.ones(2, 4), None, None], torch.zeros(2, dtype=torch.long)
    b = ALL["sigmoid"].sigma(u) @ A.mT
    known = taut.prepare(A, "sigmoid")
    known.backend.attempt(pose(known, u, None, b, None)[0], Rules())
    _, db, left = known.backend.pullback(u, status, grads)
    assert left == 0 and db.isfinite().all()
    v = u.clone().requires_grad_()

    def gradient(backend):
        solution = taut.project(v, prepared(A, "sigmoid", backend), b)
        return torch.autograd.grad(solution.z.sum(), v)[0]

    assert_close(gradient("cpu"), gradient("torch"), rtol=1e-10, atol=1e-12)


def test_without_memory_nothing_is_solved(monkeypatch):
    """The C code reports what it did, not what it did not. Nothing public makes malloc fail."""
    monkeypatch.setitem(cpu._functions, "solve", (lambda call: None, None))
    v, A, b = problem(n=21, I=3)
    solution = taut.project(v, A, b, activation="sigmoid")
    assert_close(solution.z @ A.mT, b, rtol=0, atol=1e-12)


def test_tensors_that_c_cannot_read():
    v, A, b = problem(n=4, I=3)
    z = taut.project(v, A, b, activation="sigmoid").z
    negative = torch.complex(torch.zeros_like(b), -b).conj().imag
    assert negative.is_neg()
    assert_close(taut.project(v, A, negative, activation="sigmoid").z, z, rtol=0, atol=1e-13)
    with torch.device("meta"):  # what is new goes elsewhere unless it is told not to
        solution = taut.project(v, A, b, activation="sigmoid")
        taut.matched_loss(solution, z)
    assert_close(solution.z, z, rtol=0, atol=0)


def test_tensors_without_memory():
    """As autograd makes them; nothing public does."""
    zero = torch._efficientzerotensor(4, 3, dtype=torch.float64)
    z = taut.project(zero, torch.ones(1, 3), torch.ones(1), activation="exp").z
    assert_close(z, torch.full((4, 3), 1 / 3))


def test_structures_are_those_that_the_library_tells():
    """Two fields that change places in C change places in Python."""
    text = "Point:double x;const double * y;int64_t n;"
    swapped = cpu.structures("Point:int64_t n;const double * y;double x;")["Point"]
    assert cpu.structures(text)["Point"].x.offset == 0
    assert swapped.n.offset == 0 and swapped.x.offset == 16


def test_what_is_prepared_can_be_forgotten():
    v, A, b = problem(n=7)
    known = taut.prepare(A, taut.activations.weighted("sigmoid", torch.rand(K) + 0.5))
    taut.project(v, known, b, on_failure="return")
    gone = weakref.ref(known.backend)
    del known
    gc.collect()
    assert gone() is None


# Plans


def chain(equations):
    """Each equation is on two outputs, of which it shares one with the next."""
    return torch.eye(equations, equations + 1) + torch.eye(equations, equations + 1).roll(1, 1)


def test_A_that_is_mostly_zeros_is_held_as_lists():
    assert "entry_start" in make_plan(taut.prepare(margins(8, 6), "exp").basis, exp).arrays
    assert "row_start" not in make_plan(analyse(torch.randn(4, 9), 1e-16), sigmoid).arrays


def test_lists_of_non_zeros_are_made_only_where_they_are_short(monkeypatch):
    """They are as long as there are products of two non-zeros in one output: 8·4 + 2 here.

    A matrix at the limit itself takes half a second and 200 MB: the limit is lowered.
    """
    A = chain(9)
    v, b = torch.randn(5, 10), torch.sigmoid(torch.randn(5, 10)) @ A.T
    found = []
    for most, listed in (34, True), (33, False):
        monkeypatch.setattr(plan, "_MAX_PRODUCTS", most)
        assert ("row_start" in make_plan(analyse(A, 1e-16), sigmoid).arrays) == listed
        found.append(taut.Projection(A, activation="sigmoid")(v, b))
    assert_close(*found, rtol=0, atol=1e-13)


# Processes

SOLVE = """
import sys, torch, taut
sys.path.insert(0, {tests!r})
from tables import problem
from test_backends_cpu import chain
v, A, b = problem("tanh", n=30, K=20, I=6, seed=1)
z = taut.project(v.requires_grad_(), A, b, activation="tanh").z
(gradient,) = torch.autograd.grad(z.square().sum(), v)
torch.save((z.detach(), gradient), {file!r})
torch.set_default_dtype(torch.float64)
limits = [type(taut.prepare(chain(n)).backend).__name__ for n in (256, 257, 512, 513)]
print(taut.backends.available(), *limits, sep=", ")
"""
#: The variants, and which of 256, 257, 512 and 513 equations each takes.
VARIANTS = {"0": [False] * 4, "v2": [True, False, False, False]}
VARIANTS |= {name: [True, True, True, False] for name in ("v3", "v4")}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_of_the_code(variant, tmp_path):
    """For old and new processors; the one in use here is only one. 0 turns the backend off."""
    v, A, b = problem("tanh", n=30, K=20, I=6, seed=1)
    z = taut.project(v.requires_grad_(), A, b, activation="tanh").z
    (gradient,) = torch.autograd.grad(z.square().sum(), v)
    code = SOLVE.format(tests=str(Path(__file__).parent), file=str(tmp_path / "found"))
    given = {**os.environ, "TAUT_KERNEL": variant, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=given, capture_output=True, text=True)
    if "this processor can run variants up to" in done.stderr:
        pytest.skip("this processor cannot run it")
    assert done.returncode == 0, done.stderr
    name = "torch" if variant == "0" else f"cpu {variant}"
    limits = ["Cpu" if taken else "Torch" for taken in VARIANTS[variant]]
    assert done.stdout.strip().split(", ") == [name, *limits]
    found = torch.load(tmp_path / "found")
    assert_close(found[0], z.detach(), rtol=0, atol=1e-14)
    assert_close(found[1], gradient, rtol=0, atol=1e-13)


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


@pytest.mark.slow
def test_problems_are_recorded_for_other_machines(tmp_path):
    """`make compilers`, `cross` and `sanitize` repeat what this stores."""
    script = Path(__file__).parent / "portable" / "record.py"
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path / "problems")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "problems").stat().st_size > 10**6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_redundant_equation_keeps_no_sample_open(dtype):
    """Its b, once rounded, disagrees with those that imply it in the last digit."""
    A = torch.randint(-3, 4, (19, 48)).to(dtype)
    A[-1] = A[0] + A[1]
    b = (torch.sigmoid(torch.randn(512, 48)) @ A.double().T).to(dtype)
    assert attempt(torch.randn(512, 48, dtype=dtype), A, b, "sigmoid").failed == 0
