"""The closed-form backward: gradcheck, gradgradcheck, an unrolled solver, torch.func."""

import functools

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import taut
from tables import SHORT, K, apply, target

# many solves: the shapes are checked elsewhere
pytestmark = pytest.mark.usefixtures("as_user")
each_row = pytest.mark.parametrize("row", SHORT.values(), ids=SHORT.keys())
shared_or_own = pytest.mark.parametrize("own", [False, True], ids=["shared A", "A per sample"])


def problem(row, n=2, rows=2, own=False):
    v, A = torch.randn(n, K), torch.randn(*((n, rows) if own else (rows,)), K)
    b = apply(A, target(row, n))
    return [x.requires_grad_() for x in (v, A, b)]


def outputs(row, v, A, b):
    solution = taut.project(v, A, b, activation=row)
    return solution.z, solution.multipliers, solution.u


@each_row
@shared_or_own
def test_gradcheck(row, own):
    """∂(z, λ, u)/∂(v, A, b), entry by entry for the sigmoid, in random directions for all."""
    slow = row is SHORT["sigmoid"]
    assert gradcheck(functools.partial(outputs, row), problem(row, own=own), fast_mode=not slow)


@each_row
@shared_or_own
def test_gradgradcheck(row, own):
    inputs = problem(row, n=1 + own, own=own)
    assert gradgradcheck(functools.partial(outputs, row), inputs, fast_mode=True)


@each_row
def test_gradcheck_of_the_matched_loss(row):
    v, A, b = problem(row)
    y = target(row, 2)
    inputs = (v, A, b, y.requires_grad_())

    def loss(v, A, b, y):
        return taut.matched_loss(taut.project(v, A, b, activation=row), y, reduction="none")

    assert gradcheck(loss, inputs, fast_mode=True)
    assert gradgradcheck(loss, inputs, fast_mode=True)


@pytest.mark.parametrize("output", ["z", "multipliers", "u"])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["v", "A", "b"])
def test_each_gradient_alone(which, output):
    """Also where only one input asks for it, and only one output is used."""
    inputs = [x.detach() for x in problem(SHORT["sigmoid"])]
    inputs[which].requires_grad_()

    def f(v, A, b):
        return getattr(taut.project(v, A, b, activation="sigmoid"), output)

    assert gradcheck(f, inputs, fast_mode=True)
    assert gradgradcheck(f, inputs, fast_mode=True)


def unrolled(row, v, A, b, steps=60):
    """Newton in plain differentiable torch, halving until D falls; autograd goes through it all."""
    multipliers = torch.zeros_like(b)

    def D(multipliers):
        u = v + multipliers @ A
        return row.phi(u).sum(-1) - (b * multipliers).sum(-1)

    for _ in range(steps):
        u = v + multipliers @ A
        H = torch.einsum("ik,nk,jk->nij", A, row.slope(u), A)
        step = torch.linalg.solve(H, row.sigma(u) @ A.mT - b)
        with torch.no_grad():
            size = torch.ones(len(v), 1)
            for _ in range(30):
                worse = D(multipliers - size * step) > D(multipliers) + 1e-12
                size = torch.where(worse[:, None], size / 2, size)
        multipliers = multipliers - size * step
    return row.sigma(v + multipliers @ A), multipliers, v + multipliers @ A


@each_row
def test_agrees_with_autograd_through_an_unrolled_solver(row):
    inputs = problem(row, n=3)
    ours, theirs = outputs(row, *inputs), unrolled(row, *inputs, steps=25)
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other, rtol=1e-9, atol=1e-10)
    for one, other in zip(ours, theirs, strict=True):
        weights = torch.randn_like(one)
        expected = torch.autograd.grad((other * weights).sum(), inputs, retain_graph=True)
        obtained = torch.autograd.grad((one * weights).sum(), inputs, retain_graph=True)
        for g, h in zip(obtained, expected, strict=True):
            assert_close(g, h, rtol=1e-8, atol=1e-9)


@each_row
def test_second_derivatives_agree_with_the_unrolled_solver(row):
    v, A, b = problem(row, n=1)

    def curvature(z):
        (g,) = torch.autograd.grad(z.square().sum(), v, create_graph=True)
        return torch.autograd.grad(g.square().sum(), (v, A, b))

    ours = curvature(outputs(row, v, A, b)[0])
    theirs = curvature(unrolled(row, v, A, b, steps=25)[0])
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other, rtol=1e-7, atol=1e-8)


@each_row
def test_gradient_of_z_keeps_the_constraint(row):
    """A ∂z/∂v = 0: whatever v does, A z = b."""
    v, A, b = problem(row, n=1)
    J = torch.autograd.functional.jacobian(lambda v: outputs(row, v, A, b)[0].squeeze(0), v)
    assert_close(A @ J.squeeze(1), torch.zeros(2, K), rtol=0, atol=1e-12)
    J = torch.autograd.functional.jacobian(lambda b: outputs(row, v, A, b)[0].squeeze(0), b)
    assert_close(A @ J.squeeze(1), torch.eye(2), rtol=0, atol=1e-11)


@each_row
def test_redundant_rows_have_gradients(row):
    """z is as if the redundant row were not there; the gradient in b is that of the smallest λ."""
    v, A = torch.randn(2, K, requires_grad=True), torch.randn(2, K)
    mix = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, -2.0]])
    b = apply(A, target(row, 2))
    weights = torch.randn(2, K)
    one = taut.project(v, A, b, activation=row)
    other = taut.project(v, mix @ A, b @ mix.mT, activation=row)
    g = [torch.autograd.grad((s.z * weights).sum(), v)[0] for s in (one, other)]
    assert_close(*g, rtol=1e-9, atol=1e-10)


def test_redundant_rows_pass_gradcheck_in_v():
    A = torch.randn(2, K)
    A = torch.cat([A, A.sum(0, keepdim=True)])
    b = apply(A, target(SHORT["sigmoid"], 2))
    v = torch.randn(2, K, requires_grad=True)
    f = functools.partial(outputs, SHORT["sigmoid"])
    assert gradcheck(lambda v: f(v, A, b), v)
    assert gradgradcheck(lambda v: f(v, A, b), v, fast_mode=True)


@pytest.mark.parametrize("shape", [(0, K), (K, K), (1, 1)], ids=["I = 0", "I = K", "K = 1"])
def test_gradients_of_extreme_shapes(shape):
    v = torch.randn(3, shape[1], requires_grad=True)
    A = (torch.eye(*shape) + 0.1 * torch.randn(*shape)).requires_grad_()
    b = (torch.sigmoid(torch.randn(3, shape[1])) @ A.detach().mT).requires_grad_()
    assert gradcheck(lambda *x: outputs(SHORT["sigmoid"], *x)[0], (v, A, b), fast_mode=True)


@pytest.mark.parametrize("batch", [(), (0,), (2, 2)], ids=str)
def test_gradients_of_every_batch_shape(batch):
    row = SHORT["tanh"]
    v, A = torch.randn(*batch, K, requires_grad=True), torch.randn(2, K, requires_grad=True)
    b = apply(A.detach(), target(row, *batch)).requires_grad_()
    z = taut.project(v, A, b, activation=row).z
    for g, x in zip(torch.autograd.grad(z.sum(), (v, A, b)), (v, A, b), strict=True):
        assert g.shape == x.shape
        assert g.isfinite().all()
    if z.numel():
        assert gradcheck(lambda *x: outputs(row, *x)[0], (v, A, b), fast_mode=True)


def test_b_for_all_samples_collects_the_gradients():
    v, A = torch.randn(4, K), torch.randn(2, K)
    b = torch.zeros(2, requires_grad=True)
    weights = torch.randn(4, K)
    (shared,) = torch.autograd.grad((taut.project(v, A, b).z * weights).sum(), b)
    each = b.detach().expand(4, 2).clone().requires_grad_()
    (own,) = torch.autograd.grad((taut.project(v, A, each).z * weights).sum(), each)
    assert_close(shared, own.sum(0))


def test_saturated_outputs_keep_their_gradient():
    """At u = 40, 1 − σ(u) has no digits left, and σ' still has all of them."""
    v = torch.tensor([40.0, 0.5, -0.5], requires_grad=True)
    z = taut.project(v, torch.ones(1, 3), torch.tensor([1.9]), activation="sigmoid").z
    (g,) = torch.autograd.grad(z[0], v)
    assert g[0] > 0


def test_no_graph_where_none_is_needed():
    v, A, b = (x.detach() for x in problem(SHORT["exp"]))
    solution = taut.project(v, A, b, activation="exp")
    assert not solution.z.requires_grad
    assert not solution.multipliers.requires_grad
    v.requires_grad_()
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            assert_close(taut.project(v, A, b, activation="exp").z, solution.z)
    assert taut.project(v, A, b, activation="exp").residual.requires_grad is False


# torch.func


def test_func_grad():
    v, A, b = (x.detach() for x in problem(SHORT["sigmoid"]))
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
    v, A, b = (x.detach() for x in problem(SHORT["sigmoid"], n=4))
    y = torch.rand(4, K)

    def loss(v, A, b, y):
        return (taut.project(v, A, b, activation="sigmoid").z - y).square().sum()

    mapped = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), in_dims=(0, None, 0, 0))
    each = [torch.func.grad(loss, argnums=(0, 1, 2))(v[i], A, b[i], y[i]) for i in range(4)]
    for one, other in zip(mapped(v, A, b, y), zip(*each, strict=True), strict=True):
        assert_close(one, torch.stack(other))


def test_jacrev_and_hessian():
    v, A, b = (x[0] if x.shape[0] == 1 else x for x in map(torch.detach, problem(SHORT["tanh"], 1)))

    def f(v):
        return taut.project(v, A, b, activation="tanh").z

    assert_close(torch.func.jacrev(f)(v), torch.autograd.functional.jacobian(f, v))
    hessian = torch.func.jacrev(torch.func.jacrev(lambda v: f(v).square().sum()))(v)
    reference = torch.autograd.functional.hessian(lambda v: f(v).square().sum(), v)
    assert_close(hessian, reference)


def test_func_grad_of_the_matched_loss():
    v, A, b = (x.detach() for x in problem(SHORT["sigmoid"]))
    y = torch.rand(2, K)

    def f(v):
        solution = taut.project(v, A, b, activation="sigmoid")
        return taut.matched_loss(solution, y, reduction="sum")

    z = taut.project(v, A, b, activation="sigmoid").z
    assert_close(torch.func.grad(f)(v), z - y)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_forward_mode():
    v, A, b = (x.detach() for x in problem(SHORT["sigmoid"]))
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
