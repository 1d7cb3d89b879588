"""Each row of the table: σ = φ', σ', u(z), ψ and B belong together; ends, extremes, parameters."""

import math

import mpmath
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from tables import ROWS, SHORT, K, generator
from taut import activations
from taut.activations import ACTIVATIONS, bounded, srlu

each_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
each_short = pytest.mark.parametrize("row", SHORT.values(), ids=SHORT.keys())
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def grid(reach=4.0, n=41):
    """The same values for every coordinate: (n, K)."""
    return torch.linspace(-reach, reach, n)[:, None].repeat(1, K)


def derivative(f, x):
    x = x.detach().requires_grad_()
    y = f(x)
    # the slope of a line is a constant, which has no graph
    return torch.autograd.grad(y.sum(), x)[0] if y.requires_grad else torch.zeros_like(x)


def ends(row, dtype=torch.float64):
    lower, upper = row.range.bounds(torch.zeros(K, dtype=dtype))
    return lower.expand(K), upper.expand(K)


@each_row
def test_sigma_is_the_derivative_of_phi(row):
    u = grid()
    assert_close(derivative(row.phi, u), row.sigma(u), rtol=1e-11, atol=1e-12)
    assert_close(derivative(row.integral, u), row.sigma(u), rtol=1e-14, atol=0)


@each_row
def test_slope_is_the_derivative_of_sigma(row):
    u = grid()
    assert_close(derivative(row.sigma, u), row.slope(u), rtol=1e-11, atol=1e-13)
    assert_close(derivative(row.output, u), row.slope(u), rtol=1e-14, atol=0)


@each_row
def test_slope_is_positive(row):
    assert bool((row.slope(grid(30.0)) > 0).all())


@each_row
def test_sigma_lies_in_the_open_range(row):
    lower, upper = ends(row)
    z = row.sigma(grid())
    assert bool(((lower < z) & (z < upper)).all())
    assert bool(row.range.contains(z).all())


@each_row
def test_inverse_inverts_sigma(row):
    u = grid()
    z = row.sigma(u)
    # what the rounding of z alone costs is eps·|z|/σ'(u)
    allowed = 8 * torch.finfo(u.dtype).eps * (u.abs() + (1 + z.abs()) / row.slope(u))
    assert bool(((row.inverse(z) - u).abs() <= allowed).all())
    assert_close(row.sigma(row.inverse(z)), z, rtol=1e-12, atol=1e-14)


@each_row
def test_derivative_of_the_inverse(row):
    u = grid()
    slope = derivative(row.inverse, row.sigma(u))
    assert_close(slope, row.slope(u).reciprocal(), rtol=1e-9, atol=0)


@each_row
def test_psi_is_the_legendre_transform_of_phi(row):
    u = grid()
    z = row.sigma(u)
    assert_close(row.psi(z), z * u - row.phi(u), rtol=1e-12, atol=1e-12)
    # ψ(z) = max over u' of z·u' − φ(u'): no other u' does better
    other = (z[:, None] * u[None] - row.phi(u)[None]).amax(1)
    assert bool((other <= row.psi(z) + 1e-12 * (1 + row.psi(z).abs())).all())


@each_row
def test_derivative_of_psi_is_the_inverse(row):
    u = grid()
    assert_close(derivative(row.psi, row.sigma(u)), u, rtol=1e-10, atol=1e-12)


@each_short
@pytest.mark.parametrize("name", ["output", "integral"])
def test_functions_of_u_are_twice_differentiable(row, name):
    u = torch.randn(K, requires_grad=True)
    assert gradcheck(getattr(row, name), u)
    assert gradgradcheck(getattr(row, name), u)


@each_short
@pytest.mark.parametrize("name", ["inverse", "psi"])
def test_functions_of_z_are_twice_differentiable(row, name):
    z = row.sigma(torch.randn(K)).requires_grad_()
    f = getattr(row, name)
    assert gradcheck(f, z, eps=1e-7, atol=1e-4, rtol=1e-4)
    assert gradgradcheck(f, z, eps=1e-7, atol=1e-4, rtol=1e-4)


@each_row
def test_bregman_is_the_definition(row):
    u, w = torch.randn(50, K), torch.randn(50, K)
    z, v = row.sigma(u), row.sigma(w)
    definition = row.psi(z) - row.psi(v) - row.inverse(v) * (z - v)
    assert_close(row.bregman(z, v), definition, rtol=1e-9, atol=1e-12)
    assert_close(row.divergence(z, w), definition, rtol=1e-9, atol=1e-12)


@each_row
def test_bregman_is_zero_only_on_the_diagonal(row):
    z, v = row.sigma(torch.randn(50, K)), row.sigma(torch.randn(50, K))
    assert bool((row.bregman(z, v) > 0).all())
    assert bool((row.bregman(z, z) >= 0).all())
    assert row.bregman(z, z).max() < 1e-14 * (1 + row.psi(z).abs().max())


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
    row = ACTIVATIONS[name]
    z, v = row.sigma(torch.randn(100)), row.sigma(torch.randn(100))
    assert_close(row.bregman(z, v), CLOSED_BREGMAN[name](z, v), rtol=1e-10, atol=1e-14)


# Extremes


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


def test_every_row_of_the_registry_has_an_exact_reference():
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
@each_row
def test_nothing_is_nan_at_ten_thousand(row, dtype):
    u = torch.tensor([-1e4, 1e4], dtype=dtype)[:, None].repeat(1, K)
    for f in (row.sigma, row.slope, row.phi, row.output, row.integral):
        assert f(u).dtype == dtype
        assert not f(u).isnan().any()
        assert bool((f(u).isfinite() | (f(u) == row.range.bounds(u)[1])).all())
        assert not derivative(f, u).isnan().any()


@both_dtypes
@each_row
def test_ends_of_the_range(row, dtype):
    inside = row.sigma(torch.zeros(K, dtype=dtype))
    for end, sign in zip(ends(row, dtype), (-1, 1), strict=True):
        finite = end.isfinite()
        z = torch.where(finite, end, inside)
        assert row.psi(z).isfinite().all()
        assert row.bregman(z, inside).isfinite().all()
        assert bool((row.inverse(z)[finite] == sign * math.inf).all())
        assert bool((row.bregman(z, z) == 0)[finite].all())
        assert bool((row.bregman(inside, z) == math.inf)[finite].all())
        # σ reaches the end in rounding and never passes it
        far = row.sigma(torch.full((K,), sign * 1e4, dtype=dtype))
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
        row, z = bounded(lower, upper), torch.tensor([lower, upper], dtype=dtype)
        assert row.psi(z).isfinite().all(), f"ψ at the ends of ({lower}, {upper})"
        assert row.inverse(z).tolist() == [-math.inf, math.inf], f"u(z) for ({lower}, {upper})"
        far = row.sigma(torch.tensor([-1e4, 1e4], dtype=dtype))
        assert bool(((z[0] <= far) & (far <= z[1])).all()), f"σ(±1e4) for ({lower}, {upper})"
        assert_close(far, z, rtol=0, atol=8 * torch.finfo(dtype).eps * z.abs().max().item())


# srlu


@pytest.mark.parametrize(("a", "b"), [(1.0, 0.0), (0.0, 1.0), (0.5, 2.0), (3.0, 3.0), (1e-3, 1e3)])
@both_dtypes
def test_srlu_inverse_to_rounding(a, b, dtype):
    row = srlu(a, b)
    limits = torch.finfo(dtype)
    size = torch.logspace(-12, 6, 400, dtype=dtype)
    z = torch.cat([-size, torch.zeros(1, dtype=dtype), size])
    u = row.inverse(z)
    # backward error: z is met to rounding of z and of u
    error = (row.sigma(u) - z).abs()
    assert bool((error <= 4 * limits.eps * (z.abs() + row.slope(u) * u.abs())).all())
    assert_close(row.inverse(-z), -u, rtol=0, atol=0)


def test_srlu_inverse_of_inf_is_inf():
    z = torch.tensor([-math.inf, math.inf, 1.0])
    assert srlu().inverse(z)[:2].tolist() == [-math.inf, math.inf]
    assert_close(srlu().inverse(z)[2], srlu().inverse(z[2]))


def test_srlu_inverse_of_nan_is_nan_and_harms_no_neighbour():
    u = srlu().inverse(torch.tensor([math.nan, 2.0]))
    assert u[0].isnan()
    assert_close(srlu().sigma(u[1]), torch.tensor(2.0), rtol=1e-12, atol=0)
