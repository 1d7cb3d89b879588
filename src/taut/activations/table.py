"""The paper's activations (its Table 1).

An activation is a generalized sigmoid σ with its slope σ', its integral φ (so σ = φ'), its inverse
u(z), the negative entropy ψ(z) = z·u(z) − φ(u(z)) and the range of σ. It fixes the geometry of the
projection: the Bregman divergence B(z‖v) = ψ(z) − ψ(v) − ψ'(v)(z − v).

A new activation is one more `Activation(...)`; put it in `ACTIVATIONS` and every test runs on it.
"""

import difflib
import math
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from taut.activations.activation import Activation, Interval, pointwise, written


def _sigmoid(u: Tensor) -> Tensor:
    # torch.sigmoid computes the last few elements of a tensor by another formula, so that a
    # number's bits would depend on its place in the batch. exp has no such tail.
    if u.requires_grad:
        # Beyond this exp overflows, and the derivative of its reciprocal is 0·inf.
        limit = math.log(torch.finfo(u.dtype).max) - 1
        return (torch.exp(-u.clamp(-limit, limit)) + 1).reciprocal()
    return u.neg().exp_().add_(1).reciprocal_()


def _sigmoid_slope(u: Tensor) -> Tensor:
    # Not s(1 − s): that is 0 from u = 37 on, where the slope is still 1e-16.
    small = torch.exp(-u.abs())
    return small / (small + 1).square()


def _softplus(u: Tensor) -> Tensor:
    # torch's softplus switches to u at 20 and is wrong by 2e-9 there.
    return -logsigmoid(-u)


def _logit(z: Tensor) -> Tensor:
    return torch.log(z) - torch.log1p(-z)


def _times(factor: Tensor, logarithm: Tensor) -> Tensor:
    # 0·log 0 = 0; a good deal faster than torch.xlogy. What is out of range stays NaN.
    return factor * logarithm.clamp_min(torch.finfo(factor.dtype).min)


def _sigmoid_psi(z: Tensor) -> Tensor:
    return _times(z, torch.log(z)) + _times(1 - z, torch.log1p(-z))


def _exp_psi(z: Tensor) -> Tensor:
    return _times(z, torch.log(z)) - z


def _tanh_slope(u: Tensor) -> Tensor:
    return 4 * _sigmoid_slope(2 * u)


def _log_cosh(u: Tensor) -> Tensor:
    # softplus(2u) − u − log 2 cancels near 0, where the value is u²/2.
    near = u.abs() < 10
    small = 0.5 * torch.log1p(torch.sinh(torch.where(near, u, 0)).square())
    return torch.where(near, small, _softplus(2 * u) - u - math.log(2))


def _tanh_psi(z: Tensor) -> Tensor:
    return 0.5 * (_times(1 + z, torch.log1p(z)) + _times(1 - z, torch.log1p(-z)))


def _identity(u: Tensor) -> Tensor:
    return u.clone()


def _half_square(u: Tensor) -> Tensor:
    return 0.5 * u.square()


exp: Activation = Activation(
    name="exp",
    sigma=torch.exp,
    slope=torch.exp,
    phi=torch.exp,
    inverse=torch.log,
    psi=_exp_psi,
    range=Interval(0.0, math.inf),
    _written=written("exp"),
)
"""eᵘ, in (0, ∞). Its loss is that of Poisson counts, and with Σz = 1 cross-entropy."""
sigmoid: Activation = Activation(
    name="sigmoid",
    sigma=_sigmoid,
    slope=_sigmoid_slope,
    phi=_softplus,
    inverse=_logit,
    psi=_sigmoid_psi,
    range=Interval(0.0, 1.0),
    _written=written("sigmoid"),
)
"""1/(1 + e⁻ᵘ), in (0, 1). Its loss is binary cross-entropy."""
tanh: Activation = Activation(
    name="tanh",
    sigma=torch.tanh,
    slope=_tanh_slope,
    phi=_log_cosh,
    inverse=torch.atanh,
    psi=_tanh_psi,
    range=Interval(-1.0, 1.0),
    _written=written("tanh"),
)
"""tanh u, in (−1, 1). Its loss is binary cross-entropy on ±1."""
linear: Activation = Activation(
    name="linear",
    sigma=_identity,
    slope=torch.ones_like,
    phi=_half_square,
    inverse=_identity,
    psi=_half_square,
    range=Interval(-math.inf, math.inf),
    _written=written("linear"),
)
"""u itself. Its loss is half the squared error."""


# The soft rectified linear unit: its inverse has no closed form, so ψ and B come from a root.


def _srlu_mean(u: Tensor, a: float, b: float) -> tuple[Tensor, Tensor, Tensor]:
    # σ(u) = u·m with m = a·p + b·q the mean of a and b under p ∝ exp(au²/2), q ∝ exp(bu²/2)
    x = 0.5 * (a - b) * u.square()
    p, q = _sigmoid(x), _sigmoid(-x)
    return a * p + b * q, p, q


def _srlu_sigma(u: Tensor, a: float, b: float) -> Tensor:
    return u * _srlu_mean(u, a, b)[0]


def _srlu_slope(u: Tensor, a: float, b: float) -> Tensor:
    mean, p, q = _srlu_mean(u, a, b)
    return mean + ((a - b) * u).square() * p * q


def _srlu_phi(u: Tensor, a: float, b: float) -> Tensor:
    half = 0.5 * u.square()
    return torch.logaddexp(a * half, b * half)


def _srlu_root(z: Tensor, a: float, b: float) -> Tensor:
    """u with σ(u) = z by Newton inside a bracket: m lies between (a + b)/2 and max(a, b)."""
    target = z.abs()
    low, high = target / max(a, b), target / (0.5 * (a + b))
    u = high
    for _ in range(100):
        excess = _srlu_sigma(u, a, b) - target
        low, high = torch.where(excess < 0, u, low), torch.where(excess > 0, u, high)
        newton = u - excess / _srlu_slope(u, a, b)
        inside = (low <= newton) & (newton <= high)
        updated = torch.where(inside, newton, 0.5 * (low + high))
        moved = (updated - u).abs() > torch.finfo(z.dtype).eps * u
        u = torch.where(z.isinf(), target, updated)
        if not bool(moved.any()):
            break
    return torch.copysign(u, z)


def _srlu_inverse(z: Tensor, a: float, b: float) -> Tensor:
    # Implicit function theorem: u'(z) = 1/σ'(u(z)).
    return pointwise(partial(_srlu_root, a=a, b=b), partial(_srlu_inverse_slope, a=a, b=b), z)


def _srlu_inverse_slope(z: Tensor, a: float, b: float) -> Tensor:
    return _srlu_slope(_srlu_inverse(z, a, b), a, b).reciprocal()


def _srlu_legendre(z: Tensor, a: float, b: float) -> Tensor:
    u = _srlu_root(z, a, b)
    return z * u - _srlu_phi(u, a, b)


def _srlu_psi(z: Tensor, a: float, b: float) -> Tensor:
    # ψ' = u(z), by the definition of ψ.
    return pointwise(partial(_srlu_legendre, a=a, b=b), partial(_srlu_inverse, a=a, b=b), z)


@lru_cache
def srlu(a: float = 1.0, b: float = 0.0) -> Activation:
    """The paper's soft rectified linear unit; φ(u) = log(e^{au²/2} + e^{bu²/2}), a and b ≥ 0.

    >>> srlu(2.0, 2.0).sigma(torch.tensor([3.0]))  # a = b: the line a·u
    tensor([6.])
    """
    if not (math.isfinite(a) and math.isfinite(b) and min(a, b) >= 0 and max(a, b) > 0):
        raise ValueError(
            f"srlu needs a ≥ 0 and b ≥ 0, not both 0, for φ to be convex; got a={a!r}, b={b!r}."
        )
    return Activation(
        name="srlu",
        sigma=partial(_srlu_sigma, a=a, b=b),
        slope=partial(_srlu_slope, a=a, b=b),
        phi=partial(_srlu_phi, a=a, b=b),
        inverse=partial(_srlu_inverse, a=a, b=b),
        psi=partial(_srlu_psi, a=a, b=b),
        range=Interval(-math.inf, math.inf),
        _written=written("srlu", float(a), float(b)),
    )


ACTIVATIONS: dict[str, Activation] = {
    "exp": exp,
    "linear": linear,
    "sigmoid": sigmoid,
    "srlu": srlu(),
    "tanh": tanh,
}
"""The paper's, by name."""


def resolve(activation: str | Activation) -> Activation:
    """The activation of that name, or the activation itself.

    >>> resolve("tanh").name
    'tanh'
    """
    if isinstance(activation, Activation):
        return activation
    if not isinstance(activation, str):
        kind, called = type(activation).__name__, getattr(activation, "__name__", "")
        advice = _ADVICE.get((called or kind).lower(), "")
        raise TypeError(
            f"activation must be a name, as {_nearest(called or kind) or 'exp'!r}, or a "
            f"taut.Activation; got {kind}{f' {called!r}' if called else ''}.{advice} {_MADE}"
        )
    if activation not in ACTIVATIONS:
        near = _nearest(activation)
        hint = f" Did you mean {near!r}?" if near else _ADVICE.get(activation.lower(), "")
        known = ", ".join(sorted(ACTIVATIONS))
        raise ValueError(f"unknown activation {activation!r}.{hint} Known: {known}. {_MADE}")
    return ACTIVATIONS[activation]


_MADE = (
    "taut.activations makes others, by a call: bounded(lower, upper), weighted(σ, d), "
    "tempered(σ, τ), mixed([σ, …]), srlu(a, b)."
)


_POSITIVE = (
    ' For outputs that are not negative pass lower=0.0, which clips them, or take "exp", which '
    "keeps them positive."
)
_SHARES = (
    ' A softmax is "exp" with Σz = 1: project(v, torch.ones(1, K), torch.ones(1), '
    'activation="exp").'
)
#: What to take for functions that are known elsewhere and are none of the table.
_ADVICE = {
    **dict.fromkeys(("relu", "softplus", "relu6", "threshold"), _POSITIVE),
    **dict.fromkeys(("softmax", "softmax2d", "log_softmax", "logsoftmax", "softmin"), _SHARES),
}


def _nearest(name: str) -> str | None:
    if name.lower() in _ADVICE:
        return None
    near = difflib.get_close_matches(name.lower(), ACTIVATIONS, n=1, cutoff=0.4)
    if near == ["srlu"]:  # nearly all names of rectifiers are like it, and they mean others
        near = difflib.get_close_matches(name.lower(), near, cutoff=0.8)
    return near[0] if near else None
