"""The table: σ = φ', σ', u(z), ψ and B belong together; ends, extremes, parameters."""

import math

import mpmath
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from tables import ALL, K, both_dtypes, each_activation, few_activations, generator, target
from taut import activations
from taut.activations import ACTIVATIONS, bounded, srlu


def grid(reach=4.0, n=41):
    """The same values for every coordinate: (n, K)."""
    return torch.linspace(-reach, reach, n)[:, None].repeat(1, K)


def derivative(f, x):
    x = x.detach().requires_grad_()
    y = f(x)
    # the slope of a line is a constant, which has no graph
    return torch.autograd.grad(y.sum(), x)[0] if y.requires_grad else torch.zeros_like(x)


def ends(activation, dtype=torch.float64):
    lower, upper = activation.range.bounds(torch.zeros(K, dtype=dtype))
    return lower.expand(K), upper.expand(K)


@each_activation
def test_sigma_is_the_derivative_of_phi(activation):
    u = grid()
    assert_close(derivative(activation.phi, u), activation.sigma(u), rtol=1e-11, atol=1e-12)
    assert_close(derivative(activation.integral, u), activation.sigma(u), rtol=1e-14, atol=0)


@each_activation
def test_slope_is_the_derivative_of_sigma(activation):
    u = grid()
    assert_close(derivative(activation.sigma, u), activation.slope(u), rtol=1e-11, atol=1e-13)
    assert_close(derivative(activation.output, u), activation.slope(u), rtol=1e-14, atol=0)


@each_activation
def test_slope_is_positive(activation):
    assert bool((activation.slope(grid(30.0)) > 0).all())


@each_activation
def test_sigma_lies_in_the_open_range(activation):
    lower, upper = ends(activation)
    z = activation.sigma(grid())
    assert bool(((lower < z) & (z < upper)).all())
    assert bool(activation.range.contains(z).all())


@each_activation
def test_inverse_inverts_sigma(activation):
    u = grid()
    z = activation.sigma(u)
    # what the rounding of z alone costs is eps·|z|/σ'(u)
    allowed = 8 * torch.finfo(u.dtype).eps * (u.abs() + (1 + z.abs()) / activation.slope(u))
    assert bool(((activation.inverse(z) - u).abs() <= allowed).all())
    assert_close(activation.sigma(activation.inverse(z)), z, rtol=1e-12, atol=1e-14)


@each_activation
def test_derivative_of_the_inverse(activation):
    u = grid()
    slope = derivative(activation.inverse, activation.sigma(u))
    assert_close(slope, activation.slope(u).reciprocal(), rtol=1e-9, atol=0)


@each_activation
def test_psi_is_the_legendre_transform_of_phi(activation):
    u = grid()
    z = activation.sigma(u)
    assert_close(activation.psi(z), z * u - activation.phi(u), rtol=1e-12, atol=1e-12)
    # ψ(z) = max over u' of z·u' − φ(u'): no other u' does better
    other = (z[:, None] * u[None] - activation.phi(u)[None]).amax(1)
    assert bool((other <= activation.psi(z) + 1e-12 * (1 + activation.psi(z).abs())).all())


@each_activation
def test_derivative_of_psi_is_the_inverse(activation):
    u = grid()
    assert_close(derivative(activation.psi, activation.sigma(u)), u, rtol=1e-10, atol=1e-12)


@few_activations
@pytest.mark.parametrize("name", ["output", "integral"])
def test_functions_of_u_are_twice_differentiable(activation, name):
    u = torch.randn(K, requires_grad=True)
    assert gradcheck(getattr(activation, name), u)
    assert gradgradcheck(getattr(activation, name), u)


@few_activations
@pytest.mark.parametrize("name", ["inverse", "psi"])
def test_functions_of_z_are_twice_differentiable(activation, name):
    z = activation.sigma(torch.randn(K)).requires_grad_()
    f = getattr(activation, name)
    assert gradcheck(f, z, eps=1e-7, atol=1e-4, rtol=1e-4)
    assert gradgradcheck(f, z, eps=1e-7, atol=1e-4, rtol=1e-4)


@each_activation
def test_bregman_is_the_definition(activation):
    u, w = torch.randn(50, K), torch.randn(50, K)
    z, v = activation.sigma(u), activation.sigma(w)
    definition = activation.psi(z) - activation.psi(v) - activation.inverse(v) * (z - v)
    assert_close(activation.bregman(z, v), definition, rtol=1e-9, atol=1e-12)
    assert_close(activation.divergence(z, w), definition, rtol=1e-9, atol=1e-12)


@each_activation
def test_bregman_is_zero_only_on_the_diagonal(activation):
    z, v = activation.sigma(torch.randn(50, K)), activation.sigma(torch.randn(50, K))
    assert bool((activation.bregman(z, v) > 0).all())
    assert bool((activation.bregman(z, z) >= 0).all())
    assert activation.bregman(z, z).max() < 1e-14 * (1 + activation.psi(z).abs().max())


CLOSED_BREGMAN = {  # Table 1 of the paper, last column
    "exp": lambda z, v: z * (z / v).log() - z + v,
    "sigmoid": lambda z, v: z * (z / v).log() + (1 - z) * ((1 - z) / (1 - v)).log(),
    "tanh": lambda z, v: (
        0.5 * ((1 + z) * ((1 + z) / (1 + v)).log() + (1 - z) * ((1 - z) / (1 - v)).log())
    ),
    "linear": lambda z, v: 0.5 * (z - v) ** 2,
}


@pytest.mark.parametrize("name", CLOSED_BREGMAN)
def test_bregman_of_table_1(name):
    activation = ACTIVATIONS[name]
    z, v = activation.sigma(torch.randn(100)), activation.sigma(torch.randn(100))
    assert_close(activation.bregman(z, v), CLOSED_BREGMAN[name](z, v), rtol=1e-10, atol=1e-14)


def exact(name, u):
    """(σ, σ', φ) of the paper's table in 60 digits."""
    with mpmath.workdps(120):
        u = mpmath.mpf(u)
        if name == "exp":
            return (mpmath.exp(u),) * 3
        if name == "linear":
            return u, mpmath.mpf(1), u**2 / 2
        if name == "srlu":  # a = 1, b = 0
            p = 1 / (1 + mpmath.exp(-(u**2) / 2))
            return u * p, p + u**2 * p * (1 - p), mpmath.log(1 + mpmath.exp(u**2 / 2))
        factor = 2 if name == "tanh" else 1
        s = 1 / (1 + mpmath.exp(-factor * u))
        slope = s / (1 + mpmath.exp(factor * u))
        if name == "sigmoid":
            return s, slope, mpmath.log1p(mpmath.exp(u))
        return mpmath.tanh(u), 4 * slope, mpmath.log(mpmath.cosh(u))


EXTREMES = [0.0, 1e-30, 1e-8, 1e-3, 0.5, 3.0, 18.0, 37.0, 88.0, 300.0, 700.0, 1e4]


EXACT = ["exp", "sigmoid", "tanh", "linear", "srlu"]


def test_every_activation_of_the_registry_has_an_exact_reference():
    assert set(EXACT) == set(ACTIVATIONS)


@both_dtypes
@pytest.mark.parametrize("function", ["sigma", "slope", "phi"])
@pytest.mark.parametrize("name", EXACT)
def test_accurate_wherever_the_dtype_can_be(name, function, dtype, request):
    limits = torch.finfo(dtype)
    index = ["sigma", "slope", "phi"].index(function)
    for value in EXTREMES + [-x for x in EXTREMES]:
        u = torch.tensor(value, dtype=dtype)
        obtained = getattr(ACTIVATIONS[name], function)(u).item()
        expected = exact(name, u.item())[index]
        if abs(expected) > limits.max:
            assert obtained == math.copysign(math.inf, expected), f"{function}({value})"
            continue
        # σ(u) inherits |u|·eps from u itself where it is an exponential
        error = abs(obtained - expected)
        allowed = 8 * limits.eps * (1 + abs(value) * (name != "linear")) * abs(expected)
        assert error <= allowed + 4 * limits.tiny, (
            f"{function}({value}) = {obtained}, not {expected}"
        )


@both_dtypes
@each_activation
def test_nothing_is_nan_at_ten_thousand(activation, dtype):
    u = torch.tensor([-1e4, 1e4], dtype=dtype)[:, None].repeat(1, K)
    lower, upper = activation.range.bounds(u)
    exponential = lower.isinf() ^ upper.isinf()  # overflows, towards its open end
    for f in (
        activation.sigma,
        activation.slope,
        activation.phi,
        activation.output,
        activation.integral,
    ):
        assert f(u).dtype == dtype
        assert not f(u).isnan().any()
        assert bool((f(u).isfinite() | (exponential & f(u).isinf())).all())
        assert not derivative(f, u).isnan().any()


@both_dtypes
@each_activation
def test_ends_of_the_range(activation, dtype):
    inside = activation.sigma(torch.zeros(K, dtype=dtype))
    for end, sign in zip(ends(activation, dtype), (-1, 1), strict=True):
        finite = end.isfinite()
        z = torch.where(finite, end, inside)
        assert activation.psi(z).isfinite().all()
        assert activation.bregman(z, inside).isfinite().all()
        assert bool((activation.inverse(z)[finite] == sign * math.inf).all())
        assert bool((activation.bregman(z, z) == 0)[finite].all())
        assert bool((activation.bregman(inside, z) == math.inf)[finite].all())
        # σ reaches the end in rounding and never passes it
        far = activation.sigma(torch.full((K,), sign * 1e4, dtype=dtype))
        assert bool((far <= z)[finite].all() if sign > 0 else (far >= z)[finite].all())
        assert_close(far[finite], z[finite])


def test_psi_at_the_ends_is_zero_times_log_zero():
    z = torch.tensor([0.0, 1.0])
    assert_close(activations.sigmoid.psi(z), torch.zeros(2), rtol=0, atol=0)
    assert_close(activations.tanh.psi(2 * z - 1), torch.full((2,), math.log(2)))
    assert activations.exp.psi(z[0]) == 0


@both_dtypes
def test_bounded_can_be_asked_for_its_own_ends(dtype):
    """lower + width rounds, so (upper − lower)/width may not be 1; no NaN may come of it."""
    numbers = (torch.rand(500, 2, generator=generator(1)) * 600 - 300).round() / 100
    for lower, upper in numbers.sort(-1).values.tolist():
        if lower == upper:
            continue
        activation, z = bounded(lower, upper), torch.tensor([lower, upper], dtype=dtype)
        assert activation.psi(z).isfinite().all(), f"ψ at the ends of ({lower}, {upper})"
        assert activation.inverse(z).tolist() == [-math.inf, math.inf], (
            f"u(z) for ({lower}, {upper})"
        )
        far = activation.sigma(torch.tensor([-1e4, 1e4], dtype=dtype))
        assert bool(((z[0] <= far) & (far <= z[1])).all()), f"σ(±1e4) for ({lower}, {upper})"
        assert_close(far, z, rtol=0, atol=8 * torch.finfo(dtype).eps * z.abs().max().item())


@pytest.mark.parametrize(("a", "b"), [(1.0, 0.0), (0.0, 1.0), (0.5, 2.0), (3.0, 3.0), (1e-3, 1e3)])
@both_dtypes
def test_srlu_inverse_to_rounding(a, b, dtype):
    activation = srlu(a, b)
    limits = torch.finfo(dtype)
    size = torch.logspace(-12, 6, 400, dtype=dtype)
    z = torch.cat([-size, torch.zeros(1, dtype=dtype), size])
    u = activation.inverse(z)
    # backward error: z is met to rounding of z and of u
    error = (activation.sigma(u) - z).abs()
    assert bool((error <= 4 * limits.eps * (z.abs() + activation.slope(u) * u.abs())).all())
    assert_close(activation.inverse(-z), -u, rtol=0, atol=0)


def test_srlu_inverse_of_inf_is_inf():
    z = torch.tensor([-math.inf, math.inf, 1.0])
    assert srlu().inverse(z)[:2].tolist() == [-math.inf, math.inf]
    assert_close(srlu().inverse(z)[2], srlu().inverse(z[2]))


def test_srlu_inverse_of_nan_is_nan_and_harms_no_neighbour():
    u = srlu().inverse(torch.tensor([math.nan, 2.0]))
    assert u[0].isnan()
    assert_close(srlu().sigma(u[1]), torch.tensor(2.0), rtol=1e-12, atol=0)


# The lemmas and corollaries of the paper on ψ and B


@each_activation
def test_corollary_psi_is_convex(activation):
    """ψ'(z) = u(z) and ψ''(z) = u'(z) = 1/σ'(u(z)) > 0."""
    u = torch.linspace(-3, 3, 31)[:, None].repeat(1, K)
    z = activation.sigma(u).requires_grad_()
    (first,) = torch.autograd.grad(activation.psi(z).sum(), z, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z)
    assert_close(first.detach(), u, rtol=1e-9, atol=1e-10)
    assert_close(second, activation.slope(u).reciprocal(), rtol=1e-7, atol=0)
    one, other = target(activation, 200), target(activation, 200)
    chord = 0.5 * (activation.psi(one) + activation.psi(other))
    assert bool((activation.psi(0.5 * (one + other)) < chord).all())


@each_activation
def test_corollary_bregman_divergence_is_convex_in_z(activation):
    one, other, v = target(activation, 40), target(activation, 40), target(activation, 40)
    for t in (0.25, 0.5, 0.75):
        chord = t * activation.bregman(one, v) + (1 - t) * activation.bregman(other, v)
        assert bool((activation.bregman(t * one + (1 - t) * other, v) < chord).all())


@each_activation
def test_lemma_difference_of_bregman_divergences_is_linear_in_W(activation):
    """B(y‖σ(Wᵀx)) − B(z‖σ(Wᵀx)) = (z − y)ᵀWᵀx − eᵀψ(z) + eᵀψ(y): no curvature in W."""
    y, z = target(activation, 7), target(activation, 7)
    x = torch.randn(7, 4)
    one, other = 0.3 * torch.randn(2, 4, K)  # B is computed from σ(Wᵀx): it must not saturate

    def difference(W):
        v = activation.sigma(x @ W)
        return (activation.bregman(y, v) - activation.bregman(z, v)).sum(-1)

    closed = ((z - y) * (x @ one)).sum(-1) - activation.psi(z).sum(-1) + activation.psi(y).sum(-1)
    assert_close(difference(one), closed, rtol=1e-8, atol=1e-9)
    for t in (-0.5, 0.3):
        line = t * difference(one) + (1 - t) * difference(other)
        assert_close(difference(t * one + (1 - t) * other), line, rtol=1e-7, atol=1e-8)


def test_corollary_l2_difference_of_bregman_divergences_is_that_of_squared_norms():
    activation = ALL["linear"]
    y, z, v = torch.randn(3, 7, K)
    difference = activation.bregman(y, v) - activation.bregman(z, v)
    assert_close(difference, 0.5 * (y - v).square() - 0.5 * (z - v).square())
    assert_close(difference, (z - y) * v + 0.5 * y.square() - 0.5 * z.square())
