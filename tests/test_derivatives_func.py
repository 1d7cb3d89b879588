"""Derivatives by transformation: torch.func, vmap, forward mode, functional_call, checkpoints."""

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


def can_hold(sparse):
    """Can torch.func? One by coordinates it takes for a dense one in torch 2.6; others never."""
    try:
        return grad(lambda x: x * (sparse.detach().layout is sparse.layout))(torch.ones(())) == 1
    except RuntimeError:
        return False


@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_sparse_matrices_under_derivatives(layout):
    """One that torch.func cannot hold, kept by rows or columns, is refused; prepared it is not."""
    v, A, b = problem(n=7)
    sparse = getattr(A, f"to_sparse_{layout}")()
    layer, prepared = taut.Projection(sparse, activation="sigmoid"), taut.prepare(sparse, "sigmoid")
    layer(v, b)
    expected = grad(lambda v: taut.project(v, A, b, activation="sigmoid").z.square().sum())(v)
    ways = {
        "project": lambda v: taut.project(v, sparse, b, activation="sigmoid").z,
        "layer": lambda v: layer(v, b),
        "rows": lambda v: taut.project(v, G=sparse, lower=b, upper=b, activation="sigmoid").z,
        "prepared": lambda v: taut.project(v, prepared, b).z,
    }
    for name, z in ways.items():
        if name == "prepared" or can_hold(sparse):
            found = grad(lambda v, z=z: z(v).square().sum())(v)
            assert_close(found, expected, rtol=0, atol=1e-12)
            continue
        with pytest.raises(NotImplementedError, match=f"sparse_{layout}: pass A.to_"):
            grad(lambda v, z=z: z(v).square().sum())(v)


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


# Every kind of constraint


def _energy(z, e):
    return z.square().sum(-1, keepdim=True) - e


def _given(kind, n):
    """Inputs by name, and targets that satisfy the constraints; what is shared comes first."""
    v, A, _ = problem(n=n, size=0.5)
    y = 0.2 + 0.6 * torch.rand(n, K)
    tensors = {"A": A, "v": v, "b": y @ A.T}
    if kind == "inequalities":
        G = torch.randn(3, K)
        tensors = {"G": G} | tensors | {"lower": y @ G.T - 0.05, "upper": y @ G.T + 0.1}
    if kind == "bounds":
        tensors |= {"lower": y - 0.1 * torch.rand(n, K), "upper": y + 0.2 * torch.rand(n, K)}
    if kind == "nonlinear":
        tensors["params"] = y.square().sum(-1, keepdim=True)
    return tensors, y


def _solve(tensors):
    options = dict(tensors)
    if "params" in options:
        options |= {"h": _energy, "params": (options["params"],)}
    return taut.project(**options, activation="sigmoid")


each_kind = pytest.mark.parametrize("kind", ["equations", "inequalities", "bounds", "nonlinear"])


def _function(names, of):
    def f(y, *values):
        solution = _solve(dict(zip(names, values, strict=True)))
        return solution.z if of == "z" else taut.matched_loss(solution, y, reduction="sum")

    return f


@pytest.mark.parametrize("of", ["z", "loss"])
@each_kind
def test_vmap_of_every_kind(kind, of):
    """With one matrix for all, and with one for each batch."""
    batches = [_given(kind, 4) for _ in range(3)]
    names = list(batches[0][0])
    f = _function(names, of)
    for shared in (True, False):
        ours = [n for n in names if shared and n in ("A", "G")]
        stacked = {n: torch.stack([x[n] for x, _ in batches]) for n in names}
        if ours:
            tensors, y = _given(kind, 12)
            stacked = {n: x if n in ours else x.unflatten(0, (3, 4)) for n, x in tensors.items()}
            ys = y.unflatten(0, (3, 4))
        else:
            ys = torch.stack([y for _, y in batches])
        dims = [None if n in ours else 0 for n in names]
        values = [stacked[n] for n in names]
        mapped = vmap(f, in_dims=(0, *dims))(ys, *values)
        for i in range(3):
            each = [x if d is None else x[i] for x, d in zip(values, dims, strict=True)]
            assert_close(mapped[i], f(ys[i], *each), rtol=1e-11, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("of", ["z", "loss"])
@each_kind
def test_forward_mode_of_every_kind(kind, of):
    """Against reverse mode, in all inputs at once; then the tangent of a gradient."""
    tensors, y = _given(kind, 4)
    f = _function(list(tensors), of)
    inputs = (y, *tensors.values())
    tangents = tuple(torch.randn_like(x) for x in inputs)
    _, forward = torch.func.jvp(f, inputs, tangents)
    _, pull = torch.func.vjp(f, *inputs)
    weights = torch.randn_like(forward)
    reverse = sum((g * t).sum() for g, t in zip(pull(weights), tangents, strict=True))
    assert_close((forward * weights).sum(), reverse, rtol=1e-9, atol=1e-10)
    with torch.autograd.forward_ad.dual_level():
        duals = [
            torch.autograd.forward_ad.make_dual(*pair)
            for pair in zip(inputs, tangents, strict=True)
        ]
        plain = torch.autograd.forward_ad.unpack_dual(f(*duals)).tangent
    assert_close(plain, forward, rtol=1e-11, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("kind", ["equations", "inequalities", "bounds"])
def test_hessians_of_the_matched_loss_in_both_orders(kind):
    tensors, y = _given(kind, 1)
    names = list(tensors)
    place = names.index("v")
    values = list(tensors.values())

    def f(v):
        return _function(names, "loss")(y, *values[:place], v, *values[place + 1 :])

    v = values[place]
    expected = jacrev(jacrev(f))(v)
    assert_close(jacfwd(jacrev(f))(v), expected, rtol=1e-9, atol=1e-10)
    assert_close(torch.autograd.functional.hessian(f, v), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", ["equations", "inequalities", "bounds"])
def test_ensembles(kind):
    """`stack_module_state` and vmap: networks side by side, each with its own matrices."""
    tensors, _ = _given(kind, 4)
    sides = {n: x for n, x in tensors.items() if n in ("G", "lower", "upper")}
    x = torch.randn(4, 3)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(3, K)
            self.layer = taut.Projection(tensors["A"], tensors["b"], activation="sigmoid", **sides)

        def forward(self, x):
            return self.layer(0.1 * self.net(x))

    models = [Model() for _ in range(3)]
    models[0](x)  # one that was used before
    params, buffers = torch.func.stack_module_state(models)

    def call(params, buffers):
        return functional_call(models[0], (params, buffers), (x,))

    found = vmap(call)(params, buffers)
    for i, model in enumerate(models):
        assert_close(found[i], model(x), rtol=0, atol=1e-11)
    grads = vmap(grad(lambda p, q: call(p, q).square().sum()))(params, buffers)
    for i, model in enumerate(models):
        (each,) = torch.autograd.grad(model(x).square().sum(), model.net.weight)
        assert_close(grads["net.weight"][i], each, rtol=1e-9, atol=1e-10)
