"""Derivatives of solutions with h(z) = 0, by transformation, twice; the matched loss."""

import warnings

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import taut
from surfaces import FAMILIES, norm
from tables import SEED, generator

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
FAST = ("norm/tanh", "simplex, entropy/exp")
SLOW = [name for name in FAMILIES if name not in FAST and "redundant" not in name]
mixed_families = pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)]
)


def inputs(given):
    """v, and with them A, b and params, as leaves."""
    own = [given.v, *([] if given.b is None else [given.family.A, given.b]), *given.params]
    return [x.clone().requires_grad_() for x in own]


def solve(given, *tensors):
    v, *rest = tensors
    A = b = None
    if given.b is not None:
        A, b, *rest = rest
    family = given.family
    return taut.project(v, A, b, h=family.h, params=tuple(rest), activation=family.activation)


def outcome(given):
    def call(*tensors):
        solution = solve(given, *tensors)
        return solution.z, solution.multipliers, solution.u

    return call


@mixed_families
def test_gradcheck_twice_in_everything(name):
    given = FAMILIES[name].problem(1, 0.2, 400 + SEED)
    call, leaves = outcome(given), inputs(given)
    # Temperatures of 300 K beside fractions: differences of both have the same relative error.
    options = {"eps": 1e-6, "rtol": 1e-4, "raise_exception": True}
    assert torch.autograd.gradcheck(call, leaves, atol=2e-5, **options)
    if name != "norm/tanh":
        atol = max(1e-3, 1e-5 * call(*leaves)[0].abs().max().item())
        assert torch.autograd.gradgradcheck(call, leaves, atol=atol, **{**options, "rtol": 2e-3})


def test_gradcheck_twice_with_redundant_equations():
    given = FAMILIES["redundant/exp"].problem(1, 0.2, 410 + SEED)
    v = given.v.clone().requires_grad_()
    call = lambda v: given.solve(v, on_failure="raise").z  # noqa: E731
    assert torch.autograd.gradcheck(call, (v,))
    assert torch.autograd.gradgradcheck(call, (v,))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_derivative_lies_in_the_surface(name):
    """J ∂z/∂v = 0; ∂z/∂v symmetric and positive semidefinite."""
    given = FAMILIES[name].problem(3, 0.3, 420 + SEED)
    v, *rest = inputs(given)
    solution = solve(given, v, *rest)
    z, r = solution.z, taut.activations.resolve(given.family.activation).slope(solution.u.detach())
    r = r.sqrt()  # √σ'(u): the unit of z
    one = [torch.autograd.grad(z[:, k].sum(), v, retain_graph=True)[0] for k in range(z.shape[-1])]
    D = torch.stack(one, -2)
    own = D / (r.unsqueeze(-1) * r.unsqueeze(-2))  # without curvature, eigenvalues are 0 and 1
    assert ((own - own.mT).abs() <= 1e-10 * (1 + own.abs())).all()
    least = torch.linalg.eigvalsh(0.5 * (own + own.mT))[:, 0]
    assert (least >= -1e-9 * (1 + own.abs().amax((-2, -1)))).all()
    h, params = given.family.h, given.params
    moved = torch.stack(
        [jvp(lambda z: h(z, *params), (z.detach(),), (D[..., k],))[1] for k in range(D.shape[-1])],
        -1,
    )
    J = vmap(jacrev(lambda z, *p: h(z[None], *(x[None] for x in p))[0]))(z.detach(), *params)
    size = J.abs() @ (r.unsqueeze(-1) * r.unsqueeze(-2) * (1 + own.abs()))
    assert (moved.abs() <= 1e-10 * size).all()


# Transforms


@pytest.fixture(scope="module")
def given():
    return FAMILIES["distillation/mixed"].problem(4, 0.3, 430 + SEED)


def of_one(given):
    family = given.family

    def call(v, b, p):
        return taut.project(v, family.A, b, h=family.h, params=(p,), activation=family.activation).z

    return call


def close(one, other, tolerance=1e-9):
    torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def test_transforms_agree(given):
    one, p = of_one(given), given.params[0]
    right = given.solve(on_failure="raise").z
    close(vmap(one)(given.v, given.b, p), right)
    for argument in range(3):
        back = vmap(jacrev(one, argument))(given.v, given.b, p)
        close(vmap(jacfwd(one, argument))(given.v, given.b, p), back)
    value = lambda v: one(v, given.b[0], p[0]).sin().sum()  # noqa: E731
    second = torch.autograd.functional.hessian(value, given.v[0])
    for how in (hessian(value), jacrev(jacrev(value)), jacfwd(grad(value))):
        close(how(given.v[0]), second)


def test_forward_mode(given):
    """Along changes of all inputs at once, against reverse mode."""
    changes = [torch.randn(x.shape, generator=generator(440)) for x in inputs(given)]
    leaves = [x.detach() for x in inputs(given)]
    call = outcome(given)
    _, tangents = torch.autograd.functional.jvp(call, tuple(leaves), tuple(changes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.forward_ad.dual_level():
            duals = map(torch.autograd.forward_ad.make_dual, leaves, changes)
            found = [torch.autograd.forward_ad.unpack_dual(x).tangent for x in call(*duals)]
    for own, right in zip(found, tangents, strict=True):
        close(own, right, 1e-8)


def test_vectorised_jacobians(given):
    call = lambda v: given.solve(v, on_failure="raise").z  # noqa: E731
    functional = torch.autograd.functional
    right = functional.jacobian(call, given.v)
    close(functional.jacobian(call, given.v, vectorize=True), right)
    options = {"vectorize": True, "strategy": "forward-mode"}
    close(functional.jacobian(call, given.v, **options), right)


def test_A_and_params_under_transforms(given):
    family, p = given.family, given.params[0]
    options = {"h": family.h, "activation": family.activation}
    call = lambda A, p: taut.project(given.v, A, given.b, params=(p,), **options).z.sin().sum()  # noqa: E731
    A, leaf = family.A.clone().requires_grad_(), p.clone().requires_grad_()
    right = torch.autograd.grad(call(A, leaf), (A, leaf))
    for own, other in zip(grad(call, (0, 1))(family.A, p), right, strict=True):
        close(own, other)
    two = torch.stack([family.A, 2 * family.A])
    b = given.b
    mapped = vmap(lambda A, b: taut.project(given.v, A, b, params=(p,), **options).z)(
        two, torch.stack([b, 2 * b])
    )
    close(mapped[0], mapped[1])
    own = family.A.repeat(4, 1, 1).requires_grad_()
    (each,) = torch.autograd.grad(call(own, p), own)
    close(each.sum(0), right[0])


def test_sparse_A_gets_gradients(given):
    family = given.family
    sparse = family.A.to_sparse().requires_grad_()
    options = {"h": family.h, "params": given.params, "activation": family.activation}
    z = taut.project(given.v, sparse, given.b, **options).z
    (g,) = torch.autograd.grad(z.sin().sum(), sparse)
    dense = family.A.clone().requires_grad_()
    (right,) = torch.autograd.grad(
        taut.project(given.v, dense, given.b, **options).z.sin().sum(), dense
    )
    close(g.to_dense(), right * (family.A != 0))


def test_learned_parameter_of_all_samples():
    """p.expand(N, …): one number, its gradient the sum over samples."""
    v = torch.randn(5, 3, generator=generator(450))
    p = torch.tensor([2.0], requires_grad=True)
    z = taut.project(v, h=norm, params=(p.expand(5, 1),)).z
    (g,) = torch.autograd.grad(z.sum(), p)
    unit = v / v.norm(dim=-1, keepdim=True)
    close(g, (unit.sum() / (2 * p.detach().sqrt())).reshape(1), 1e-12)


def test_gradients_where_outputs_are_held():
    v = torch.randn(1, 2, generator=generator(460)).requires_grad_()
    ends = torch.full((1, 1), -torch.inf)
    options = {"h": norm, "params": (torch.ones(1, 1),), "activation": "exp"}
    call = lambda v: taut.project(torch.cat([ends, v], -1), **options).z  # noqa: E731
    assert torch.autograd.gradcheck(call, (v,))
    assert torch.autograd.gradgradcheck(call, (v,))


# The matched loss


@pytest.mark.parametrize(
    "name", ["norm/exp", "simplex, squares/exp", "distillation/mixed", "toy/linear"]
)
def test_two_forms_of_the_loss_and_its_envelope(name):
    """B(y‖σ(v)) − B(z‖σ(v)); ∂v = z − y, ∂b = −λ_A, ∂A = λ_A zᵀ, ∂θ = (∂h/∂θ)ᵀλ_h."""
    given = FAMILIES[name].problem(5, 0.3, 470 + SEED)
    leaves, family = inputs(given), given.family
    activation = taut.activations.resolve(family.activation)
    solution = solve(given, *leaves)
    y = given.z
    loss = taut.matched_loss(solution, y, reduction="none")
    σ = activation.sigma(given.v)
    right = (activation.bregman(y, σ) - activation.bregman(solution.z, σ)).sum(-1)
    size = 1 + (given.v * y).abs().sum(-1)
    assert ((loss - right).abs() <= 1e-11 * size).all()
    found = torch.autograd.grad(loss.sum(), leaves)
    z, λ = solution.z.detach(), solution.multipliers.detach()
    close(found[0], z - y, 1e-11)
    rest, rows = found[1:], 0
    if given.b is not None:
        rows = given.b.shape[-1]
        close(rest[1], -λ[:, :rows], 1e-11)
        close(rest[0], λ[:, :rows].mT @ z, 1e-10)
        rest = rest[2:]
    for own, p in zip(rest, given.params, strict=True):
        leaf = p.clone().requires_grad_()
        (right,) = torch.autograd.grad((family.h(z, leaf) * λ[:, rows:]).sum(), leaf)
        close(own, right, 1e-10)


def test_second_derivatives_of_the_loss():
    given = FAMILIES["simplex, squares/exp"].problem(1, 0.3, 480 + SEED)
    y = given.z.clone().requires_grad_()
    call = lambda y, *x: taut.matched_loss(solve(given, *x), y)  # noqa: E731
    assert torch.autograd.gradgradcheck(call, (y, *inputs(given)))


def test_loss_under_transforms(given):
    family, p = given.family, given.params[0]

    def loss(v, b, p, y):
        options = {"h": family.h, "params": (p,), "activation": family.activation}
        return taut.matched_loss(taut.project(v, family.A, b, **options), y)

    found = vmap(grad(loss))(given.v, given.b, p, given.z)
    close(found, given.solve().z - given.z, 1e-11)
