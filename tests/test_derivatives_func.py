"""Derivatives by transformation: torch.func, vmap, forward mode, functional_call, checkpoints."""

import subprocess
import sys

import pytest
import torch
from torch.func import functional_call, grad, jacfwd, jacrev, vmap
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import taut
from tables import K, problem

# many solves: the shapes are checked elsewhere
pytestmark = pytest.mark.usefixtures("as_user")


def test_func_grad():
    v, A, b = problem("sigmoid", n=2, size=1.5)
    weights = torch.randn(2, K)

    def f(v, A, b):
        return (taut.project(v, A, b, activation="sigmoid").z * weights).sum()

    functional = torch.func.grad(f, argnums=(0, 1, 2))(v, A, b)
    inputs = [x.clone().requires_grad_() for x in (v, A, b)]
    for one, other in zip(functional, torch.autograd.grad(f(*inputs), inputs), strict=True):
        assert_close(one, other)


IN_DIMS = {
    "all": (0, 0, 0),
    "shared A": (0, None, 0),
    "shared A and b": (0, None, None),
    "only b": (None, None, 0),
    "only A": (None, 0, None),
    "last dimension": (1, 2, 1),
}


@pytest.mark.parametrize("name", IN_DIMS)
@pytest.mark.parametrize("inner", [(), (3,)], ids=["a sample", "a batch"])
def test_vmap(name, inner):
    dims = IN_DIMS[name]
    y = torch.rand(K)
    v, A = torch.randn(4, *inner, K), torch.randn(4, 2, K)
    b = A @ y if dims[1] is not None and dims[2] is not None else (A[:1] @ y).expand(4, 2)
    if dims == (None, 0, None):
        A = A[:1] + 0.01 * torch.randn(4, 2, K)
    single = [
        x if d is not None else x[0] for x, d in zip((v, A, b.contiguous()), dims, strict=True)
    ]

    def f(v, A, b):
        return taut.project(v, A, b, activation="sigmoid").z

    pick = [lambda i, x=x, d=d: x if d is None else x[i] for x, d in zip(single, dims, strict=True)]
    loop = torch.stack([f(*(p(i) for p in pick)) for i in range(4)])
    mapped = [x if d is None else x.movedim(0, d) for x, d in zip(single, dims, strict=True)]
    assert_close(torch.vmap(f, in_dims=dims)(*mapped), loop, rtol=0, atol=1e-12)


def test_vmap_of_grad_is_per_sample_gradients():
    v, A, b = problem("sigmoid", n=4, size=1.5)
    y = torch.rand(4, K)

    def loss(v, A, b, y):
        return (taut.project(v, A, b, activation="sigmoid").z - y).square().sum()

    mapped = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), in_dims=(0, None, 0, 0))
    each = [torch.func.grad(loss, argnums=(0, 1, 2))(v[i], A, b[i], y[i]) for i in range(4)]
    for one, other in zip(mapped(v, A, b, y), zip(*each, strict=True), strict=True):
        assert_close(one, torch.stack(other))


def test_jacrev_and_hessian():
    v, A, b = problem("tanh", n=())

    def f(v):
        return taut.project(v, A, b, activation="tanh").z

    assert_close(torch.func.jacrev(f)(v), torch.autograd.functional.jacobian(f, v))
    hessian = torch.func.jacrev(torch.func.jacrev(lambda v: f(v).square().sum()))(v)
    reference = torch.autograd.functional.hessian(lambda v: f(v).square().sum(), v)
    assert_close(hessian, reference)


def test_func_grad_of_the_matched_loss():
    v, A, b = problem("sigmoid", n=2, size=1.5)
    y = torch.rand(2, K)

    def f(v):
        solution = taut.project(v, A, b, activation="sigmoid")
        return taut.matched_loss(solution, y, reduction="sum")

    z = taut.project(v, A, b, activation="sigmoid").z
    assert_close(torch.func.grad(f)(v), z - y)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_forward_mode():
    v, A, b = problem("sigmoid", n=2, size=1.5)
    tangents = tuple(torch.randn_like(x) for x in (v, A, b))

    def f(v, A, b):
        return taut.project(v, A, b, activation="sigmoid").z

    _, forward = torch.func.jvp(f, (v, A, b), tangents)
    _, reverse = torch.autograd.functional.jvp(f, (v, A, b), tangents)
    assert_close(forward, reverse, rtol=1e-11, atol=1e-12)
    with torch.autograd.forward_ad.dual_level():
        duals = [
            torch.autograd.forward_ad.make_dual(*pair)
            for pair in zip((v, A, b), tangents, strict=True)
        ]
        plain = torch.autograd.forward_ad.unpack_dual(f(*duals)).tangent
    assert_close(plain, reverse, rtol=1e-11, atol=1e-12)


def test_a_used_layer_gives_A_its_gradient():
    v, A, b = problem(n=7)
    layer = taut.Projection(A, activation="sigmoid")

    def loss(a):
        return functional_call(layer, {"A": a}, (v, b)).square().sum()

    expected = grad(lambda a: taut.project(v, a, b, activation="sigmoid").z.square().sum())(A)
    assert_close(grad(loss)(A), expected)
    layer(v, b)
    assert_close(grad(loss)(A), expected)
    assert expected.abs().max() > 1e-3


def test_failures_under_vmap_raise():
    v, A, b = problem(n=7)
    with pytest.raises(taut.SolveError, match="7 of 7 samples"):
        vmap(lambda v, b: taut.project(v, A, b, activation="sigmoid").z)(v, b + 100)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch itself
def test_forward_and_reverse_jacobians_agree():
    v, A, b = problem(n=7)
    prepared = taut.prepare(A, "sigmoid")

    def z(v, b):
        return taut.project(v, prepared, b).z

    assert_close(vmap(jacfwd(z))(v, b), vmap(jacrev(z))(v, b), rtol=0, atol=1e-14)
    assert_close(vmap(jacfwd(z, argnums=1))(v, b), vmap(jacrev(z, argnums=1))(v, b))


def test_matched_loss_under_vmap():
    v, A, b = problem(n=7)
    y, prepared = torch.rand(7, K), taut.prepare(A, "sigmoid")

    def loss(v, b, y):
        return taut.matched_loss(taut.project(v, prepared, b), y)

    z = taut.project(v, A, b, activation="sigmoid").z
    assert_close(vmap(grad(loss))(v, b, y), z - y)
    whole = taut.matched_loss(taut.project(v, prepared, b), y, reduction="none")
    assert_close(vmap(loss)(v, b, y), whole)


def test_checkpoints():
    v, A, b = problem(n=7)
    v.requires_grad_()
    layer = taut.Projection(A, activation="sigmoid")
    (plain,) = torch.autograd.grad(layer(v, b).square().sum(), v)
    z = checkpoint(layer, v, b, use_reentrant=False)
    assert_close(torch.autograd.grad(z.square().sum(), v)[0], plain)


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
