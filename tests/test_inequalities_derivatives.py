"""Derivatives and the matched loss under inequalities and bounds: by differences, and by hand."""

import functools

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import taut
from tables import K, apply, few_activations, problem
from taut import matched_loss, project

# many solves: the shapes are checked elsewhere
pytestmark = [
    pytest.mark.usefixtures("as_user"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),  # torch itself
]


def draw(activation, **options):
    return problem(activation, kind="inequalities", **{"n": 2, "I": 1, "size": 1.5, **options})


def leaves(given):
    return [x.detach().clone().requires_grad_() for x in given]


def rows(activation, v, A, b, G, lower, upper):
    found = project(v, A, b, G=G, lower=lower, upper=upper, activation=activation)
    return found.z, found.multipliers, found.u


def bounds(activation, v, A, b, lower, upper):
    found = project(v, A, b, lower=lower, upper=upper, activation=activation)
    return found.z, found.multipliers, found.u


def loss_of_rows(activation, y, v, A, b, G, lower, upper):
    found = project(v, A, b, G=G, lower=lower, upper=upper, activation=activation)
    return matched_loss(found, y, reduction="none")


def loss_of_bounds(activation, y, v, A, b, lower, upper):
    found = project(v, A, b, lower=lower, upper=upper, activation=activation)
    return matched_loss(found, y, reduction="none")


def boxed(activation, **options):
    """Bounds around a solution, about half of which are active."""
    given = draw(activation, structure="boxes", **options)
    sides = given.constraints
    return given, leaves([given.v, given.A, given.b, sides["lower"], sides["upper"]])


def one_sided(inputs):
    """Finite sides only: differences of ±inf are no numbers."""
    *first, lower, upper = inputs
    lower, upper = lower.where(lower.isfinite(), -50.0), upper.where(upper.isfinite(), 50.0)
    return leaves([*first, lower, upper])


@few_activations
def test_gradcheck(activation):
    inputs = one_sided(draw(activation))
    options = {"fast_mode": True, "check_forward_ad": True}
    assert gradcheck(functools.partial(rows, activation), inputs, **options)
    _, inputs = boxed(activation)
    assert gradcheck(functools.partial(bounds, activation), inputs, **options)


@pytest.mark.parametrize("name", ["linear", "exp", "sigmoid"])
def test_gradgradcheck(name):
    inputs = one_sided(draw(name, n=1))
    assert gradgradcheck(functools.partial(rows, name), inputs, fast_mode=True)
    _, inputs = boxed(name, n=1)
    assert gradgradcheck(functools.partial(bounds, name), inputs, fast_mode=True)


@pytest.mark.slow
@few_activations
def test_every_derivative_of_every_activation(activation):
    """Twice, of z, ν, u and of the loss."""
    given = draw(activation)
    inputs = one_sided(given)
    assert gradgradcheck(functools.partial(rows, activation), inputs, fast_mode=True)
    loss = functools.partial(loss_of_rows, activation, given.y)
    assert gradgradcheck(loss, inputs, fast_mode=True)
    given, inputs = boxed(activation)
    assert gradgradcheck(functools.partial(bounds, activation), inputs, fast_mode=True)
    loss = functools.partial(loss_of_bounds, activation, given.y)
    assert gradgradcheck(loss, inputs, fast_mode=True)


@pytest.mark.parametrize("name", ["linear", "exp", "sigmoid"])
def test_gradcheck_of_the_matched_loss(name):
    given = draw(name, n=1)
    function = functools.partial(loss_of_rows, name, given.y)
    inputs = one_sided(given)
    assert gradcheck(function, inputs, fast_mode=True)
    assert gradgradcheck(function, inputs, fast_mode=True)
    given, inputs = boxed(name, n=1)
    function = functools.partial(loss_of_bounds, name, given.y)
    assert gradcheck(function, inputs, fast_mode=True)
    assert gradgradcheck(function, inputs, fast_mode=True)


def test_gradients_to_a_G_for_each_sample():
    inputs = one_sided(draw("exp", own=True))
    assert gradcheck(functools.partial(rows, "exp"), inputs, fast_mode=True)


@few_activations
@pytest.mark.parametrize("size", [1.5, 20.0])
def test_gradients_are_those_of_the_equations_that_are_active(activation, size):
    """At the same u; also where activations have saturated."""
    given = draw(activation, n=1, size=size)
    inputs = leaves(given)
    names = dict(zip(given.constraints, inputs[1:], strict=True))
    found = project(inputs[0], **names, activation=activation)
    seed = torch.randn(1, K)
    gradients = torch.autograd.grad((found.z * seed).sum(), inputs)
    on = found.active[0] != 0
    side = torch.where(found.active > 0, given.constraints["lower"], given.constraints["upper"])
    A = torch.cat([given.A, given.constraints["G"][on]]).requires_grad_()
    b = torch.cat([given.b, side[:, on]], -1).requires_grad_()
    v, kept = given.v.clone().requires_grad_(), torch.cat([torch.tensor([True]), on])
    start = found.multipliers.detach()[:, kept]
    alone = project(v, A, b, activation=activation, init=start)
    right = torch.autograd.grad((alone.z * seed).sum(), (v, A, b))
    tol = {"rtol": 1e-6, "atol": 1e-8 * right[0].abs().max().item() + 1e-10 * (size < 10)}
    assert_close(gradients[0], right[0], **tol)
    tol = {"rtol": 1e-6, "atol": 1e-8}
    assert_close(gradients[1], right[1][:1], **tol)
    assert_close(gradients[3][on], right[1][1:], **tol)
    assert not gradients[3][~on].any()
    sides = gradients[4] + gradients[5]
    assert_close(sides[:, on], right[2][:, 1:], **tol)
    assert not sides[:, ~on].any()
    assert not gradients[4][found.active < 0].any()
    assert not gradients[5][found.active > 0].any()


@few_activations
def test_weakly_active_rows_give_the_derivative_of_the_inactive_side(activation):
    """A row that the solution without it just touches has ν = 0, exactly, and no part in ∂v."""
    given = problem(activation, n=40, I=1)
    v = given.v.clone().requires_grad_()
    alone = project(v, given.A, given.b, activation=activation)
    G = torch.randn(2, K)
    upper = apply(G, alone.z).detach()
    found = project(v, given.A, given.b, G=G, upper=upper, activation=activation)
    assert not found.active.any()
    seed = torch.randn(40, K)
    (right,) = torch.autograd.grad((alone.z * seed).sum(), v)
    (gradient,) = torch.autograd.grad((found.z * seed).sum(), v)
    assert_close(gradient, right, rtol=1e-9, atol=1e-11)


def test_failed_samples_have_no_gradient():
    v = torch.randn(3, 2, requires_grad=True)
    upper = torch.tensor([[1.0], [-1.0], [torch.nan]])
    found = project(v, G=torch.ones(1, 2), upper=upper, activation="exp", on_failure="return")
    assert found.status.tolist() == [0, 2, 4]
    (found.z.sum() + found.u.sum() + found.multipliers.sum()).backward()
    assert v.grad[0].all()
    assert not v.grad[1:].any()


@few_activations
def test_the_loss_is_the_divergence_and_what_slack_costs(activation):
    """ℓ = B(y‖z) + Σ|ν| slack(y) = B(y‖σ(v)) − B(z‖σ(v)), for every y that is feasible."""
    given = draw(activation, n=30)
    found = given.solve()
    loss = matched_loss(found, given.y, reduction="none")
    lower, upper = given.constraints["lower"], given.constraints["upper"]
    ν = found.multipliers[:, 1:]
    c = apply(given.constraints["G"], given.y)
    slack = torch.where(ν > 0, c - lower, torch.where(ν < 0, upper - c, 0.0))
    divergence = activation.divergence(given.y, found.u).sum(-1)
    size = 1e-12 * (1 + divergence + activation.divergence(given.y, given.v).sum(-1))
    assert ((divergence + (ν.abs() * slack).sum(-1) - loss).abs() <= 1e3 * size).all()
    difference = activation.divergence(given.y, given.v) - activation.divergence(found.z, given.v)
    assert ((difference.sum(-1) - loss).abs() <= 1e3 * size).all()
    assert (loss >= divergence - 1e3 * size).all()


@few_activations
def test_the_gradient_of_the_loss_is_z_minus_y(activation):
    given = draw(activation, n=5)
    v = given.v.clone().requires_grad_()
    found = project(v, **given.constraints, activation=activation)
    matched_loss(found, given.y, reduction="sum").backward()
    assert torch.equal(v.grad, found.z.detach() - given.y)


def test_the_loss_is_0_where_z_is_y_and_nowhere_else():
    given = draw("sigmoid", n=5)
    found = given.solve()
    again = project(found.u, **given.constraints, activation="sigmoid")
    assert_close(matched_loss(again, again.z), torch.tensor(0.0), rtol=0, atol=1e-13)
    far = (again.z - given.y).abs().amax(-1) > 1e-3
    assert far.any()
    assert (matched_loss(again, given.y, reduction="none")[far] > 1e-6).all()


def test_transforms():
    """vmap over samples, forward mode inside, and the Jacobian by rows or by columns."""
    given = draw("sigmoid", n=4)
    G, lower, upper = (given.constraints[x] for x in ("G", "lower", "upper"))

    def one(v, b, lower):
        return project(v, given.A, b, G=G, lower=lower, upper=upper[0], activation="sigmoid").z

    upper = upper[:1].expand(4, -1).clone().fill_(torch.inf)
    lower = apply(G, given.y) - 0.05
    each = torch.stack([one(*x) for x in zip(given.v, given.b, lower, strict=True)])
    assert_close(torch.func.vmap(one)(given.v, given.b, lower), each, rtol=1e-11, atol=1e-13)
    by_rows = torch.func.vmap(torch.func.jacrev(one, 2))(given.v, given.b, lower)
    by_columns = torch.func.vmap(torch.func.jacfwd(one, 2))(given.v, given.b, lower)
    assert_close(by_rows, by_columns, rtol=1e-9, atol=1e-11)

    def learned(G):
        found = project(given.v, given.A, given.b, G=G, lower=lower, activation="sigmoid")
        return found.z.sin().sum()

    leaf = G.clone().requires_grad_()
    (right,) = torch.autograd.grad(learned(leaf), leaf)
    assert_close(torch.func.grad(learned)(G), right, rtol=1e-10, atol=1e-12)


def test_the_loss_under_transforms():
    given = draw("sigmoid", n=4)
    G, upper = given.constraints["G"], apply(given.constraints["G"], given.y) + 0.02

    def loss(v, b, upper, y):
        return matched_loss(project(v, given.A, b, G=G, upper=upper, activation="sigmoid"), y)

    inputs = leaves([given.v, given.b, upper])
    right = torch.autograd.grad(4 * loss(*inputs, given.y), inputs)
    found = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(given.v, given.b, upper, given.y)
    for x, y in zip(found, right, strict=True):
        assert_close(x, y, rtol=1e-9, atol=1e-11)


def test_bounds_under_transforms():
    given = draw("exp", n=3, structure="boxes")
    lower, upper = given.constraints["lower"], given.constraints["upper"]

    def one(v, lower, upper):
        return project(v, lower=lower, upper=upper, activation="exp").z

    right = torch.minimum(torch.maximum(given.v.exp(), lower), upper)
    found = torch.func.vmap(one)(given.v, lower, upper)
    assert_close(found, right, rtol=1e-14, atol=0)
    slopes = torch.func.vmap(torch.func.jacrev(one, 1))(given.v, lower, upper)
    assert torch.equal(slopes, torch.diag_embed((given.v.exp() < lower).double()))


def test_held_outputs_have_no_gradient():
    v = torch.tensor([[-torch.inf, 1.0, 2.0, 0.5]], requires_grad=True)
    found = project(v, torch.ones(1, 4), torch.ones(1), upper=0.5, activation="exp")
    part = v.detach()[:, 1:].clone().requires_grad_()
    alone = project(part, torch.ones(1, 3), torch.ones(1), upper=0.5, activation="exp")
    seed = torch.tensor([[3.0, 1.0, -2.0, 0.7]])
    (found.z * seed).sum().backward()
    (alone.z * seed[:, 1:]).sum().backward()
    assert v.grad[0, 0] == 0
    assert_close(v.grad[:, 1:], part.grad, rtol=1e-12, atol=1e-14)
    y = torch.tensor([[0.0, 0.3, 0.4, 0.3]])
    assert_close(matched_loss(found, y), matched_loss(alone, y[:, 1:]), rtol=1e-12, atol=1e-14)


def test_an_undecided_sample_keeps_its_loss():
    """MAX_ITERATIONS: the value and the gradient of ℓ at the ν that it has."""
    given = draw("sigmoid", n=6)
    v = (20 * given.v).requires_grad_()
    solver = taut.Newton(max_iterations=1)
    found = project(
        v, **given.constraints, activation="sigmoid", solver=solver, on_failure="return"
    )
    undecided = found.status == taut.Status.MAX_ITERATIONS
    assert undecided.any()
    matched_loss(found, given.y, reduction="sum").backward()
    assert_close(v.grad[undecided], (found.z - given.y)[undecided].detach())
