"""matched_loss and bregman_loss: eq. 1, envelope gradients, closed forms, targets at the ends."""

import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import taut
from measures import output_rounding
from tables import (
    ALL,
    K,
    apply,
    both_dtypes,
    each_activation,
    each_backend,
    few_activations,
    prepared,
    problem,
    target,
)
from taut import bregman_loss, matched_loss, project
from taut.activations import bounded, weighted


def posed(activation, n=6):
    """v that asks for its gradient, A, b, and a y with A y = b."""
    given = problem(activation, n=n)
    return given.v.requires_grad_(), given.A, given.b, given.y


@each_activation
def test_it_is_the_bregman_divergence(activation):
    v, A, b, y = posed(activation)
    solution = project(v, A, b, activation=activation)
    loss = matched_loss(solution, y, reduction="none")
    # From z itself, u is known to the rounding of z over the slope; not at all at an end.
    z, w = solution.z.detach(), activation.slope(solution.u.detach())
    lower, upper = activation.range.bounds(z)
    inside = ((z > lower) & (z < upper)).all(-1)
    most = 1e-10 + ((y - z).abs() * output_rounding(activation, z) / w).sum(-1)
    error = (loss - activation.bregman(y, z).sum(-1)).abs()
    assert bool((error <= most)[inside].all()) and inside.any()
    assert_close(
        loss, bregman_loss(solution.u, y, activation, reduction="none"), rtol=1e-8, atol=1e-10
    )
    assert bool((loss > 0).all())


@each_activation
def test_pythagoras(activation):
    """B(y‖σ(v)) = B(y‖z) + B(z‖σ(v)) for feasible y: the paper's saddle-point objective."""
    v, A, b, y = posed(activation)
    solution = project(v, A, b, activation=activation)
    start = activation.sigma(v)
    difference = (activation.bregman(y, start) - activation.bregman(solution.z, start)).sum(-1)
    loss = matched_loss(solution, y, reduction="none")
    assert_close(loss, difference, rtol=1e-8, atol=1e-10)


@each_activation
def test_zero_at_the_target(activation):
    v = torch.randn(6, K)
    y = activation.sigma(v)
    A = torch.randn(2, K)
    loss = matched_loss(project(v, A, apply(A, y), activation=activation), y, reduction="none")
    assert loss.abs().max() < 1e-13 * (1 + activation.psi(y).abs().sum(-1).max())


@each_activation
@pytest.mark.parametrize("noise", [0.0, 0.1], ids=["feasible y", "noisy y"])
def test_gradient_is_z_minus_y(activation, noise):
    v, A, b, y = posed(activation)
    lower, upper = activation.range.bounds(y)
    room = torch.minimum(torch.minimum(y - lower, upper - y), torch.tensor(1.0))
    y = y + noise * room * torch.randn_like(y).clamp(-1, 1)
    solution = project(v, A, b, activation=activation)
    matched_loss(solution, y, reduction="sum").backward()
    assert_close(v.grad, (solution.z - y).detach(), rtol=0, atol=1e-14)


class Recorded(TorchDispatchMode):
    """The names of all operations torch runs meanwhile."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@few_activations
def test_no_solve_in_backward(activation):
    """The envelope theorem: λ is a constant in the first derivative."""
    v, A, b, y = posed(activation)
    A.requires_grad_()
    b.requires_grad_()
    solution = project(v, A, b, activation=activation)
    loss = matched_loss(solution, y)
    with Recorded() as backward:
        loss.backward(retain_graph=True)
    solves = [name for name in backward.names if "cholesky" in name or "linalg" in name]
    assert backward.names and solves == []
    with Recorded() as backward:  # any other loss does need one
        solution.z.square().sum().backward()
    assert any("cholesky" in name or "linalg" in name for name in backward.names)


def test_other_gradients_are_those_of_the_envelope():
    """∂b = −λ, ∂A = λ zᵀ, ∂y = u(y) − v."""
    activation = ALL["sigmoid"]
    v, A, b, y = posed(activation)
    A.requires_grad_(), b.requires_grad_(), y.requires_grad_()
    solution = project(v, A, b, activation=activation)
    matched_loss(solution, y, reduction="sum").backward()
    multipliers, z = solution.multipliers.detach(), solution.z.detach()
    assert_close(b.grad, -multipliers)
    assert_close(A.grad, multipliers.mT @ z)
    assert_close(y.grad, (activation.inverse(y) - v).detach())


@pytest.mark.parametrize("way", ["at once", "three calls", "rows", "bounds", "h"])
def test_targets_that_break_the_constraints_are_told_once(way):
    """Of the first of a layer; in the rounding of their dtype they may be off."""
    A, y = torch.ones(1, K), torch.rand(6, K).float().double()
    rows, sides = {"G": torch.eye(K)} if way == "rows" else {}, {}
    if way in ("rows", "bounds"):
        sides["upper"] = 1.0
    if way == "h":
        rows["h"], sides["params"] = lambda z, c: z[:, :1] * z[:, 1:2] - c, (y[:, :1] * y[:, 1:2],)
    layers = [taut.Projection(A, **rows, activation="exp") for _ in range(3)]
    v, b = y.log(), apply(A, y)

    def loss(layer, y, b):
        if way == "at once":
            return layer.loss(v, y, b)
        return matched_loss(layer.solve(v, b, **sides), y)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(layers[0], y, b)
        loss(layers[0], 1.1 * y, b)  # only the first are looked at
        loss(layers[1], y * (1 + 1e-6 * torch.randn(6, K)), b)
    with pytest.warns(taut.FailureWarning, match=r"1 of 6 targets .* in sample 2, equation 0, A y"):
        loss(layers[2], y + 0.1 * torch.eye(6, 1).roll(2, 0), b)
    if way in ("rows", "bounds"):
        what = "row 3 of G, G y" if way == "rows" else "output 3, y"
        y[1, 3] = 2.0
        sides["upper"] = 1.5
        with pytest.warns(taut.FailureWarning, match=f"{what} is 2 and its (side|bound) 1.5"):
            loss(taut.Projection(A, **rows, activation="exp"), y, apply(A, y))


def test_samples_have_their_place_in_the_batch():
    layer = taut.Projection(torch.ones(1, 3), activation="sigmoid", on_failure="return")
    y, b = torch.full((2, 3, 3), 1 / 3), torch.ones(2, 3, 1)
    y[1, 1], b[1, 2] = 0.9, 9.0
    with pytest.warns(taut.FailureWarning) as warned:
        layer.loss(torch.zeros(2, 3, 3), y, b)
    said = " ".join(str(x.message) for x in warned)
    assert "1 of 6 samples were not solved (sample (1, 2))" in said
    assert "1 of 6 targets do not satisfy the constraints: in sample (1, 1), eq" in said


def test_targets_that_contradict_an_infinite_v_are_told():
    v, b = torch.zeros(2, 3), torch.ones(2, 1)
    v[1, 2] = -torch.inf
    agree, clash = torch.tensor([[0.3, 0.3, 0.4], [0.5, 0.5, 0.0]]), torch.full((2, 3), 1 / 3)
    layers = [taut.Projection(torch.ones(1, 3), activation="sigmoid") for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        matched_loss(layers[0].solve(v, b), agree)
    said = r"1 of 2 targets .* in sample 1, output 2, y is 0.333333 and v = ±inf holds it at 0\."
    with pytest.warns(taut.FailureWarning, match=said):
        matched_loss(layers[1].solve(v, b), clash)


def test_the_loss_of_targets_that_break_the_constraints_has_no_lower_bound():
    y, b = torch.tensor([[0.2, 0.3]]), torch.tensor([1.0])
    for size in (10.0, 100.0, 1000.0):
        v = torch.full((1, 2), -size)
        assert matched_loss(project(v, torch.ones(1, 2), b, activation="exp"), y) < 2 - 0.4 * size


def test_a_noisy_target_does_not_move_the_minimum():
    """With yᵀAᵀλ in place of bᵀλ the gradient in v would not be z − y."""
    v, A, b, y = posed(ALL["linear"])
    noisy = y + torch.randn_like(y)
    solution = project(v, A, b)
    loss = matched_loss(solution, noisy, reduction="none")
    P = torch.eye(K) - A.mT @ torch.linalg.solve(A @ A.mT, A)
    expected = 0.5 * ((noisy - solution.z) ** 2).sum(-1) + apply(A, noisy - y).mul(
        solution.multipliers
    ).sum(-1)
    assert_close(loss, expected)
    (g,) = torch.autograd.grad(loss.sum(), v)
    assert_close(g @ P.mT, (v @ P.mT - noisy @ P.mT).detach())


@both_dtypes
def test_cross_entropy(dtype):
    v = torch.randn(6, K, dtype=dtype, requires_grad=True)
    labels = torch.randint(K, (6,))
    one = torch.ones(1, dtype=dtype)
    solution = project(v, torch.ones(1, K, dtype=dtype), one, activation="exp")
    loss = matched_loss(solution, F.one_hot(labels, K).to(dtype))
    assert_close(loss, F.cross_entropy(v, labels))
    (g,) = torch.autograd.grad(loss, v)
    (h,) = torch.autograd.grad(F.cross_entropy(v, labels), v)
    assert_close(g, h)
    assert_close(solution.multipliers, -v.logsumexp(-1, keepdim=True))


def test_bce_with_logits():
    v, y = torch.randn(6, K), torch.rand(6, K).round()  # at the ends of the range
    expected = F.binary_cross_entropy_with_logits(v, y, reduction="none").sum(-1)
    assert_close(bregman_loss(v, y, "sigmoid", reduction="none"), expected)
    solution = project(v, torch.zeros(0, K), torch.zeros(0), activation="sigmoid")
    assert_close(matched_loss(solution, y, reduction="none"), expected)


def test_half_squared_error():
    v, y = torch.randn(6, K), torch.randn(6, K)
    expected = 0.5 * (v - y).square().sum(-1)
    assert_close(bregman_loss(v, y, "linear", reduction="none"), expected)
    A = torch.randn(2, K)
    solution = project(v, A, apply(A, y))
    expected = 0.5 * (solution.z - y).square().sum(-1)
    assert_close(matched_loss(solution, y, reduction="none"), expected)


def test_poisson():
    v, y = torch.randn(6, K), torch.poisson(torch.rand(6, K) * 3)
    expected = F.poisson_nll_loss(v, y, reduction="none") + torch.xlogy(y, y) - y
    assert_close(bregman_loss(v, y, "exp", reduction="none"), expected.sum(-1))


@each_backend
@both_dtypes
@pytest.mark.parametrize("name", ["bounded", "tanh"])
def test_targets_next_to_the_ends_of_the_range(name, dtype, backend):
    """Scaled back, rounding puts some beyond the ends: the loss is a number all the same."""
    n = 200
    low = torch.randn(n)
    inner = bounded(low, low + torch.rand(n)) if name == "bounded" else name
    activation = weighted(inner, torch.rand(n) + 1e-3)
    lower, upper = activation.range.bounds(torch.zeros(1, dtype=dtype))
    y = torch.stack([lower.nextafter(upper), upper.nextafter(lower)])
    A, v = torch.randn(2, n, dtype=dtype), torch.randn(2, n, dtype=dtype)
    b = apply(A, activation.sigma(torch.randn_like(v)))
    solution = project(v, prepared(A, activation, backend), b)
    assert matched_loss(solution, y, reduction="none").isfinite().all()


@pytest.mark.parametrize(
    "name", ["sigmoid", "tanh", "exp", "bounded each", "bounded below", "bounded above"]
)
@pytest.mark.parametrize("side", [0, 1])
@both_dtypes
def test_targets_at_the_ends_of_the_range(name, side, dtype):
    activation = ALL[name]
    v = torch.randn(6, K, dtype=dtype, requires_grad=True)
    end = activation.range.bounds(v)[side].expand(6, K)
    y = torch.where(end.isfinite(), end, activation.sigma(torch.zeros_like(v)))
    A = torch.ones(1, K, dtype=dtype)
    b = apply(A, activation.sigma(torch.randn(6, K, dtype=dtype)))
    solution = project(v, A, b, activation=activation)
    for loss in (matched_loss(solution, y), bregman_loss(solution.u, y, activation)):
        assert loss.isfinite()
        (g,) = torch.autograd.grad(loss, v, retain_graph=True)
        assert g.isfinite().all()
    assert_close(
        torch.autograd.grad(matched_loss(solution, y, reduction="sum"), v)[0],
        (solution.z - y).detach(),
        rtol=0,
        atol=64 * torch.finfo(dtype).eps,
    )


@few_activations
def test_bregman_loss_of_any_predictor(activation):
    """Joint or predicted multipliers: gradient σ(u) − y in u, and Aᵀ of it in λ."""
    v, A, b, y = posed(activation)
    multipliers = torch.randn(6, 2, requires_grad=True)
    u = v + multipliers @ A
    loss = bregman_loss(u, y, activation, reduction="none")
    assert_close(loss, activation.bregman(y, activation.sigma(u)).sum(-1), rtol=1e-8, atol=1e-10)
    dv, dm = torch.autograd.grad(loss.sum(), (v, multipliers))
    assert_close(dv, (activation.sigma(u) - y).detach())
    assert_close(dm, (apply(A, activation.sigma(u)) - b).detach())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reductions(reduction):
    v, A, b, y = posed(ALL["tanh"])
    solution = project(v, A, b, activation="tanh")
    each = row_losses = matched_loss(solution, y, reduction="none")
    assert each.shape == (6,)
    expected = row_losses if reduction == "none" else getattr(each, reduction)()
    assert_close(matched_loss(solution, y, reduction=reduction), expected)
    other = bregman_loss(solution.u, y, "tanh", reduction=reduction)
    assert_close(other, expected, rtol=1e-9, atol=1e-10)


def test_default_reduction_is_the_mean():
    v, A, b, y = posed(ALL["tanh"])
    solution = project(v, A, b, activation="tanh")
    assert_close(matched_loss(solution, y), matched_loss(solution, y, reduction="none").mean())


def test_unbatched_and_leading_dimensions():
    A = torch.randn(2, K)
    for batch in ((), (2, 3)):
        y = target(ALL["sigmoid"], *batch)
        solution = project(torch.randn(*batch, K), A, apply(A, y), activation="sigmoid")
        assert matched_loss(solution, y, reduction="none").shape == batch
        assert matched_loss(solution, y).shape == ()


def test_integer_targets_are_numbers():
    v, y = torch.randn(6, K), torch.randint(2, (6, K))
    solution = project(v, torch.ones(1, K), torch.full((1,), 2.0), activation="sigmoid")
    assert_close(bregman_loss(v, y.double(), "sigmoid"), F.binary_cross_entropy_with_logits(
        v, y.double(), reduction="none").sum(-1).mean())  # fmt: skip
    assert matched_loss(solution, y.double()).isfinite()


@pytest.mark.usefixtures("as_user")
def test_wrong_shape_of_y_is_quoted():
    solution = project(torch.randn(6, K), torch.ones(1, K), torch.ones(1))
    with pytest.raises(ValueError, match=r"shape of solution\.z, \(6, 5\); got \(6,\)"):
        matched_loss(solution, torch.ones(6))
    with pytest.raises(ValueError, match=r"shape of u, \(6, 5\); got \(5,\)"):
        bregman_loss(solution.u, torch.ones(5), "linear")


@pytest.mark.usefixtures("as_user")
def test_unknown_reduction():
    solution = project(torch.randn(6, K), torch.ones(1, K), torch.ones(1))
    with pytest.raises(ValueError, match='reduction must be "mean", "sum" or "none"; got \'max\''):
        matched_loss(solution, torch.ones(6, K), reduction="max")


def test_gradient_descent_trains_as_in_the_paper():
    """A λ that is not optimal still has the gradient of ℓ at that λ: z − y with its own z."""
    v, A, b, y = posed(ALL["sigmoid"])
    solver = taut.GradientDescent()
    solution = project(3 * v, A, b, activation="sigmoid", solver=solver, on_failure="return")
    matched_loss(solution, y, reduction="sum").backward()
    assert not solution.converged.all()
    assert_close(v.grad, 3 * (solution.z - y).detach(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["exp", "sigmoid", "tanh", "linear", "srlu"])
def test_eq_1_is_the_matched_loss_up_to_a_constant(name):
    """ℓ = −yᵀu + eᵀφ(u), the paper's loss; ours adds ψ(y)."""
    activation = ALL[name]
    v, A, b, y = posed(activation)
    solution = project(v, A, b, activation=activation)
    paper = -(y * solution.u).sum(-1) + activation.phi(solution.u).sum(-1)
    ours = matched_loss(solution, y, reduction="none")
    assert_close(ours - activation.psi(y).sum(-1), paper, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("which", ["v", "b"])
def test_a_write_between_solve_and_loss_is_noticed(which):
    v, A, b = problem(n=7)
    solution = taut.project(v, A, b, activation="sigmoid")
    {"v": v, "b": b}[which].add_(1.0)
    with pytest.raises(ValueError, match=f"{which} was changed in place after the solve"):
        taut.matched_loss(solution, torch.rand(7, K))


def test_a_buffer_may_be_used_again_after_the_loss():
    v, A, b = problem(n=7)
    v.requires_grad_()
    y = torch.rand(7, K)
    solution = taut.project(v, A, b, activation="sigmoid")
    z, loss = solution.z.detach().clone(), taut.matched_loss(solution, y, reduction="sum")
    b.zero_()
    loss.backward()
    assert_close(v.grad, z - y)


def test_solutions_can_be_kept_in_files():
    solution = taut.project(torch.zeros(2, 3), torch.ones(1, 3), torch.ones(1), activation="exp")
    again = pickle.loads(pickle.dumps(solution))
    y = torch.full((2, 3), 1 / 3)
    assert_close(taut.matched_loss(again, y), torch.zeros(()), rtol=0, atol=1e-15)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_failed_sample_adds_nothing_to_the_loss(reduction):
    """Value and gradient 0 where there is no solution, and the mean is over all samples."""
    v, A, b = torch.randn(6, K), torch.ones(1, K), torch.full((6, 1), 0.5 * K)
    b[1], v[3, 0] = 2.0 * K, torch.nan
    v.requires_grad_()
    y = torch.rand(6, K)
    solution = project(v, A, b, activation="sigmoid", on_failure="return")
    with pytest.warns(taut.FailureWarning, match=r"2 of 6 .* not solved \(sample 1, 3\)"):
        loss = matched_loss(solution, y, reduction=reduction)
    (g,) = torch.autograd.grad(loss.sum(), v)
    good = [0, 2, 4, 5]
    part = v.detach()[good].requires_grad_()
    each = matched_loss(project(part, A, b[good], activation="sigmoid"), y[good], reduction="none")
    (expected,) = torch.autograd.grad(each.sum() / (6 if reduction == "mean" else 1), part)
    assert g[[1, 3]].abs().max() == 0
    assert_close(g[good], expected)
    if reduction == "none":
        assert loss[[1, 3]].abs().max() == 0
        assert_close(loss[good], each)
    else:
        assert_close(loss, each.sum() / (6 if reduction == "mean" else 1))


def test_an_undecided_sample_keeps_its_loss():
    """The paper trains with a solver that stops early."""
    v, A, b = torch.randn(5, K, requires_grad=True), torch.randn(2, K), torch.randn(5, 2)
    y, solver = torch.rand(5, K), taut.Newton(max_iterations=0)
    solution = project(v, A, b, activation="exp", solver=solver, on_failure="return")
    assert (solution.status == taut.Status.MAX_ITERATIONS).all()
    loss = matched_loss(solution, y, reduction="sum")
    assert_close(loss, bregman_loss(v, y, "exp", reduction="sum"))
    (g,) = torch.autograd.grad(loss, v)
    assert_close(g, (v.exp() - y).detach())


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", ["exp", "sigmoid", "tanh", "bounded each", "mixed"])
def test_a_target_outside_the_range_is_an_error(name, backend, monkeypatch):
    activation = ALL[name]
    v, A = torch.randn(4, K), torch.ones(1, K)
    z = activation.sigma(torch.randn(4, K))
    prepared = taut.prepare(A, activation)
    if backend == "torch":
        monkeypatch.setattr(type(prepared.backend), "loss", lambda *_: None)
    solution = project(v, prepared, apply(A, z))
    y, lower = z.clone(), activation.range.bounds(z)[0].expand(4, K)
    places = lower[0].isfinite().nonzero()[0]
    y[2, places] = lower[2, places] - 0.1
    with pytest.raises(ValueError, match=r"targets must lie in .*closed range.*in sample 2"):
        matched_loss(solution, y)
    with pytest.raises(
        ValueError, match=r"targets must lie in .*closed range.*in sample 2"
    ) as error:
        bregman_loss(solution.u, y, activation)
    assert len(str(error.value)) < 250 and "tensor" not in str(error.value)
    y[2, places] = torch.nan
    with pytest.raises(ValueError, match=r"got nan in sample 2"):
        matched_loss(solution, y, reduction="none")


@pytest.mark.usefixtures("as_user")
def test_the_loss_of_z_alone_says_what_to_pass():
    layer = taut.Projection(torch.ones(1, 3), activation="exp")
    with pytest.raises(TypeError, match=r"Use layer.solve\(v, b\) instead of layer\(v, b\)"):
        matched_loss(layer(torch.zeros(2, 3), torch.ones(1)), torch.ones(2, 3))


def test_a_target_outside_the_range_of_an_output_that_is_held():
    solution = project(torch.zeros(2), torch.ones(1, 2), torch.tensor([2.0]), activation="sigmoid")
    assert (solution.z == 1).all()
    with pytest.raises(ValueError, match="targets must lie in"):
        matched_loss(solution, torch.tensor([5.0, -3.0]))
