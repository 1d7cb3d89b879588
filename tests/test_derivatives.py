"""The closed-form backward: gradcheck twice, an unrolled solver, hard and failed samples."""

import functools
import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import taut
from tables import (
    FEW,
    K,
    apply,
    few_activations,
    needs_cpu,
    patchy,
    prepared,
    problem,
    shared_or_own,
    target,
)
from taut import Status, project

# many solves: the shapes are checked elsewhere
pytestmark = pytest.mark.usefixtures("as_user")


def leaves(given):
    """v, A and b, each of which asks for its gradient."""
    return [x.clone().requires_grad_() for x in given]


def outputs(activation, v, A, b):
    solution = taut.project(v, A, b, activation=activation)
    return solution.z, solution.multipliers, solution.u


@few_activations
@shared_or_own
def test_gradcheck(activation, own):
    """∂(z, λ, u)/∂(v, A, b), entry by entry for the sigmoid, in random directions for all."""
    slow = activation is FEW["sigmoid"]
    assert gradcheck(
        functools.partial(outputs, activation),
        leaves(problem(activation, n=2, own=own, size=1.5)),
        fast_mode=not slow,
    )


@few_activations
@shared_or_own
def test_gradgradcheck(activation, own):
    inputs = leaves(problem(activation, n=1 + own, own=own, size=1.5))
    assert gradgradcheck(functools.partial(outputs, activation), inputs, fast_mode=True)


@few_activations
def test_gradcheck_of_the_matched_loss(activation):
    v, A, b = leaves(problem(activation, n=2, size=1.5))
    y = target(activation, 2)
    inputs = (v, A, b, y.requires_grad_())

    def loss(v, A, b, y):
        return taut.matched_loss(taut.project(v, A, b, activation=activation), y, reduction="none")

    assert gradcheck(loss, inputs, fast_mode=True)
    assert gradgradcheck(loss, inputs, fast_mode=True)


@pytest.mark.parametrize("output", ["z", "multipliers", "u"])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["v", "A", "b"])
def test_each_gradient_alone(which, output):
    """Also where only one input asks for it, and only one output is used."""
    inputs = list(problem(n=2, size=1.5))
    inputs[which].requires_grad_()

    def f(v, A, b):
        return getattr(taut.project(v, A, b, activation="sigmoid"), output)

    assert gradcheck(f, inputs, fast_mode=True)
    assert gradgradcheck(f, inputs, fast_mode=True)


def unrolled(activation, v, A, b, steps=60):
    """Newton in plain differentiable torch, halving until D falls; autograd goes through it all."""
    multipliers = torch.zeros_like(b)

    def D(multipliers):
        u = v + multipliers @ A
        return activation.phi(u).sum(-1) - (b * multipliers).sum(-1)

    for _ in range(steps):
        u = v + multipliers @ A
        H = torch.einsum("ik,nk,jk->nij", A, activation.slope(u), A)
        step = torch.linalg.solve(H, activation.sigma(u) @ A.mT - b)
        with torch.no_grad():
            size = torch.ones(len(v), 1)
            for _ in range(30):
                worse = D(multipliers - size * step) > D(multipliers) + 1e-12
                size = torch.where(worse[:, None], size / 2, size)
        multipliers = multipliers - size * step
    return activation.sigma(v + multipliers @ A), multipliers, v + multipliers @ A


@few_activations
def test_agrees_with_autograd_through_an_unrolled_solver(activation):
    inputs = leaves(problem(activation, n=3, size=1.5))
    ours, theirs = outputs(activation, *inputs), unrolled(activation, *inputs, steps=25)
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other, rtol=1e-9, atol=1e-10)
    for one, other in zip(ours, theirs, strict=True):
        weights = torch.randn_like(one)
        expected = torch.autograd.grad((other * weights).sum(), inputs, retain_graph=True)
        obtained = torch.autograd.grad((one * weights).sum(), inputs, retain_graph=True)
        for g, h in zip(obtained, expected, strict=True):
            assert_close(g, h, rtol=1e-8, atol=1e-9)


@few_activations
def test_second_derivatives_agree_with_the_unrolled_solver(activation):
    v, A, b = leaves(problem(activation, n=1, size=1.5))

    def curvature(z):
        (g,) = torch.autograd.grad(z.square().sum(), v, create_graph=True)
        return torch.autograd.grad(g.square().sum(), (v, A, b))

    ours = curvature(outputs(activation, v, A, b)[0])
    theirs = curvature(unrolled(activation, v, A, b, steps=25)[0])
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other, rtol=1e-7, atol=1e-8)


@few_activations
def test_gradient_of_z_keeps_the_constraint(activation):
    """A ∂z/∂v = 0: whatever v does, A z = b."""
    v, A, b = leaves(problem(activation, n=1, size=1.5))
    J = torch.autograd.functional.jacobian(lambda v: outputs(activation, v, A, b)[0].squeeze(0), v)
    assert_close(A @ J.squeeze(1), torch.zeros(2, K), rtol=0, atol=1e-12)
    J = torch.autograd.functional.jacobian(lambda b: outputs(activation, v, A, b)[0].squeeze(0), b)
    assert_close(A @ J.squeeze(1), torch.eye(2), rtol=0, atol=1e-11)


@few_activations
def test_redundant_equations_have_gradients(activation):
    """z is as if the redundant equation were not there."""
    v, A, b = problem(activation, n=2, size=1.5)
    v.requires_grad_()
    mix = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, -2.0]])
    weights = torch.randn(2, K)
    one = taut.project(v, A, b, activation=activation)
    other = taut.project(v, mix @ A, b @ mix.mT, activation=activation)
    g = [torch.autograd.grad((s.z * weights).sum(), v)[0] for s in (one, other)]
    assert_close(*g, rtol=1e-9, atol=1e-10)


def test_redundant_equations_pass_gradcheck_in_v():
    A = torch.randn(2, K)
    A = torch.cat([A, A.sum(0, keepdim=True)])
    b = apply(A, target(FEW["sigmoid"], 2))
    v = torch.randn(2, K, requires_grad=True)
    f = functools.partial(outputs, FEW["sigmoid"])
    assert gradcheck(lambda v: f(v, A, b), v)
    assert gradgradcheck(lambda v: f(v, A, b), v, fast_mode=True)


@pytest.mark.parametrize("shape", [(0, K), (K, K), (1, 1)], ids=["I = 0", "I = K", "K = 1"])
def test_gradients_of_extreme_shapes(shape):
    v = torch.randn(3, shape[1], requires_grad=True)
    A = (torch.eye(*shape) + 0.1 * torch.randn(*shape)).requires_grad_()
    b = (torch.sigmoid(torch.randn(3, shape[1])) @ A.detach().mT).requires_grad_()
    assert gradcheck(lambda *x: outputs(FEW["sigmoid"], *x)[0], (v, A, b), fast_mode=True)


@pytest.mark.parametrize("batch", [(), (0,), (2, 2)], ids=str)
def test_gradients_of_every_batch_shape(batch):
    activation = FEW["tanh"]
    v, A = torch.randn(*batch, K, requires_grad=True), torch.randn(2, K, requires_grad=True)
    b = apply(A.detach(), target(activation, *batch)).requires_grad_()
    z = taut.project(v, A, b, activation=activation).z
    for g, x in zip(torch.autograd.grad(z.sum(), (v, A, b)), (v, A, b), strict=True):
        assert g.shape == x.shape
        assert g.isfinite().all()
    if z.numel():
        assert gradcheck(lambda *x: outputs(activation, *x)[0], (v, A, b), fast_mode=True)


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
    v, A, b = problem("exp", n=2, size=1.5)
    solution = taut.project(v, A, b, activation="exp")
    assert not solution.z.requires_grad
    assert not solution.multipliers.requires_grad
    v.requires_grad_()
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            assert_close(taut.project(v, A, b, activation="exp").z, solution.z)
    assert taut.project(v, A, b, activation="exp").residual.requires_grad is False


# Hard samples


@pytest.mark.parametrize("activation", ["sigmoid", "tanh", "exp"])
def test_targets_at_the_ends_have_finite_gradients(activation):
    v, A, _ = problem(activation, I=3, K=8, size=3.0)
    lower, upper = taut.activations.ACTIVATIONS[activation].range.bounds(v)
    one_hot = torch.eye(8)[:6]
    y = torch.where(one_hot > 0, upper if upper.isfinite() else torch.ones(()).to(v), lower)
    v.requires_grad_()
    solution = taut.project(v, A.abs(), y @ A.abs().mT, activation=activation, on_failure="return")
    assert solution.z.isfinite().all()
    (gradient,) = torch.autograd.grad(solution.z.square().sum(), v)
    assert gradient.isfinite().all()


def checks(function, inputs):
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    assert gradcheck(function, inputs, eps=1e-6, atol=1e-6, rtol=1e-4)
    assert gradgradcheck(function, inputs, eps=1e-6, atol=1e-5, rtol=1e-3)


def test_gradients_of_saturated_samples():
    v, A, b = problem(n=3, size=20.0)
    checks(lambda v, b: taut.project(v, A, b, activation="sigmoid").z, (v, b))


@pytest.mark.parametrize("gap", [1e-2, 1e-3])
def test_gradients_near_the_edge_of_feasibility(gap):
    # Σz = 5 − gap with five sigmoids: every z is close to 1.
    v = torch.randn(3, 5)
    A, b = torch.ones(1, 5), torch.full((3, 1), 5 - gap)
    inputs = (v.clone().requires_grad_(), b.requires_grad_())
    # A step in b must stay well inside the gap.
    assert gradcheck(
        lambda v, b: taut.project(v, A, b, activation="sigmoid").z,
        inputs,
        eps=1e-4 * gap,
        atol=1e-6,
        rtol=1e-4,
    )


def test_gradients_of_z_with_redundant_equations():
    v, A, free = problem(n=3, size=1.5)
    whole = torch.cat([A, A.sum(0, keepdim=True)])

    def z(v, b):
        # b stays consistent, as it must: the last entry is the sum of the others.
        b = torch.cat([b, b.sum(-1, keepdim=True)], -1)
        return taut.project(v, whole, b, activation="sigmoid").z

    checks(z, (v, free))
    plain = taut.project(v, A, free, activation="sigmoid").z
    assert_close(z(v, free), plain, rtol=1e-12, atol=1e-12)


def test_multipliers_of_redundant_equations_are_the_smallest():
    v, A, b = problem(n=3, size=1.5)
    whole, demands = torch.cat([A, A[:1]]), torch.cat([b, b[:, :1]], -1)
    found = taut.project(v, whole, demands, activation="sigmoid").multipliers
    alone = taut.project(v, A, b, activation="sigmoid").multipliers
    assert_close(found[:, 0], found[:, 2])
    assert_close(found[:, 0] + found[:, 2], alone[:, 0])


def test_gradients_do_not_depend_on_the_start():
    v, A, b = problem(n=3, size=1.5)
    start = taut.project(v, A, b, activation="sigmoid").multipliers.detach()

    def z(v, b, init):
        return taut.project(v, A, b, activation="sigmoid", init=init).z

    checks(lambda v, b: z(v, b, start + 0.1), (v, b))
    gradients = []
    for init in (None, start, start + 5):
        x = v.clone().requires_grad_()
        gradients.append(torch.autograd.grad(z(x, b, init).square().sum(), x)[0])
    assert_close(gradients[0], gradients[1], rtol=1e-11, atol=1e-13)
    assert_close(gradients[0], gradients[2], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("size", [5.0, 15.0, 18.0, 30.0])
@needs_cpu
def test_saturated_tanh_keeps_its_slope(size):
    """λ answers to v by shares of the slopes, however small they are."""
    v = torch.tensor([[size, size + 0.5, size + 1.0]], requires_grad=True)
    b = torch.tanh(v.detach()).sum(-1, keepdim=True)

    def gradient(backend):
        solution = taut.project(v, prepared(torch.ones(1, 3), "tanh", backend), b)
        return torch.autograd.grad(solution.u[0, 0], v)[0]

    assert_close(gradient("cpu"), gradient("torch"), rtol=1e-12, atol=1e-14)


def test_batched_gradients():
    v, A, b = problem("tanh", n=3, I=3)
    v.requires_grad_()
    z, directions = taut.project(v, A, b, activation="tanh").z, torch.randn(4, 3, 5)
    (all_at_once,) = torch.autograd.grad(z, v, directions, is_grads_batched=True, retain_graph=True)
    for one, direction in zip(all_at_once, directions, strict=True):
        (alone,) = torch.autograd.grad(z, v, direction, retain_graph=True)
        assert_close(one, alone, rtol=0, atol=1e-13)


# Samples that fail


def test_gradients_of_a_batch_with_a_bad_sample():
    """The failed sample has zero gradient, the others theirs, and A the sum of theirs."""
    v, A, b = problem(n=4)
    v[1, 0], b[2, 0] = math.nan, 1e3
    weights = torch.randn(4, K)

    def gradients(keep):
        inputs = [x.clone().requires_grad_() for x in (v[keep], A, b[keep])]
        solution = project(*inputs, activation="sigmoid", on_failure="return")
        ok = solution.converged
        return solution, torch.autograd.grad((solution.z * weights[keep])[ok].sum(), inputs)

    solution, whole = gradients([0, 1, 2, 3])
    _, good = gradients([0, 3])
    assert solution.status.tolist() == [0, Status.NONFINITE, Status.INFEASIBLE, 0]
    assert_close(whole[0][[0, 3]], good[0])
    assert_close(whole[1], good[1])
    assert_close(whole[2][[0, 3]], good[2])
    assert whole[0][[1, 2]].abs().max() == 0


@pytest.mark.filterwarnings("ignore::taut.FailureWarning")
@pytest.mark.parametrize("loss", ["z", "multipliers", "u", "matched"])
def test_a_failed_sample_sends_no_nan_back(loss):
    """Also where the caller does not mask it: sum over everything, then backward."""
    v, A, b = problem(n=4)
    b[2, 0] = 1e3
    inputs = [x.requires_grad_() for x in (v, A, b)]
    solution = project(*inputs, activation="sigmoid", on_failure="return")
    if loss == "matched":
        taut.matched_loss(solution, torch.rand(4, K)).backward()
    else:
        getattr(solution, loss).sum().backward()
    for x in inputs:
        assert x.grad.isfinite().all()
    assert bool((b.grad[2] == 0).all())
    assert v.grad[[0, 1, 3]].abs().min() > 0 or loss == "matched"


# Sparse A


@pytest.mark.parametrize(
    ("n", "I", "K"), [(1, 2, 4), pytest.param(3, 4, 9, marks=pytest.mark.slow)]
)
def test_gradients_to_the_values_of_sparse_A(n, I, K):
    v, dense, b = problem(n=n, I=I, K=K, size=1.5, matrix=patchy)
    pattern = dense.to_sparse().coalesce()

    def solve(v, values, b):
        A = torch.sparse_coo_tensor(
            pattern.indices(), values, pattern.shape, check_invariants=False
        )
        solution = taut.project(v, A, b, activation="sigmoid")
        return solution.z, solution.multipliers, solution.u

    inputs = [x.detach().clone().requires_grad_() for x in (v, pattern.values(), b)]
    assert gradcheck(solve, inputs)
    assert gradgradcheck(solve, inputs)


def test_gradient_has_the_layout_of_sparse_A():
    v, dense, b = problem("tanh", n=3, I=4, K=9, size=1.5, matrix=patchy)
    A = dense.to_sparse().requires_grad_()
    reference = dense.clone().requires_grad_()
    taut.project(v, A, b, activation="tanh").z.square().sum().backward()
    taut.project(v, reference, b, activation="tanh").z.square().sum().backward()
    assert A.grad.layout == torch.sparse_coo
    expected = reference.grad * (dense != 0)
    assert_close(A.grad.to_dense(), expected, rtol=1e-9, atol=1e-12)
