"""Proofs that no solution exists.

If z lies in the range of the activation, then (Aᵀλ)ᵀz ≤ Σ_k sup{y_k z : z in the range of k} with
y = Aᵀλ. A λ for which bᵀλ exceeds that sum therefore proves that no such z has A z = b.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from taut.activations import Activation, Interval, resolve
from taut.maps import LinearMap, as_map


def support(y: Float[Tensor, "*batch K"], within: Interval) -> Float[Tensor, "*batch K"]:
    """sup{y·z : z in the interval}, elementwise.

    >>> support(torch.tensor([2.0, -3.0]), Interval(-1.0, 1.0))
    tensor([2., 3.])
    """
    lower, upper = within.bounds(y)
    zero = torch.zeros_like(y)
    # y = 0 gives 0 also where the range is unbounded (0·inf is NaN).
    return torch.where(y > 0, y * upper, torch.where(y < 0, y * lower, zero))


def certifies(
    multipliers: Float[Tensor, "N I"],
    A: LinearMap,
    b: Float[Tensor, "N I"],
    activation: Activation,
    which: Bool[Tensor, "N"],
) -> Bool[Tensor, "N"]:
    """For the samples in `which`: does λ prove that there is no solution?

    The inequality is tried in plain floating point, and what passes is proven with `proves`.
    """
    terms = support(A.adjoint(multipliers), activation.range)
    likely = which & ((b * multipliers).sum(-1) > terms.sum(-1))
    if not bool(likely.any()):
        return likely
    index = likely.nonzero().squeeze(-1)
    proven = proves(multipliers[index], A.take(index), b[index], activation)
    return likely.index_put((index,), proven)


def is_certificate(
    multipliers: Float[Tensor, "*batch I"],
    A: Float[Tensor, "*A_batch I K"],
    b: Float[Tensor, "*b_batch I"],
    activation: str | Activation,
) -> Bool[Tensor, "*batch"]:
    """Does λ prove that no z in the range of the activation has A z = b?

    Rounding is on the safe side: True is a proof for the numbers given, in exact arithmetic.
    False says only that this λ proves nothing.

    >>> A, b = torch.ones(1, 2), torch.tensor([3.0])  # two numbers below 1 cannot sum to 3
    >>> is_certificate(torch.tensor([1.0]), A, b, "sigmoid")
    tensor(True)
    """
    if multipliers.shape[-1:] != A.shape[-2:-1] or b.shape[-1:] != A.shape[-2:-1]:
        raise ValueError(
            "multipliers and b must have one entry for each equation; got multipliers "
            f"{tuple(multipliers.shape)}, A {tuple(A.shape)}, b {tuple(b.shape)}."
        )
    return proves(multipliers, as_map(A), b, resolve(activation))


def proves(multipliers: Tensor, A: LinearMap, b: Tensor, activation: Activation) -> Tensor:
    """`is_certificate` for a map: bᵀλ > Σ_k sup{y_k z}, every rounding taken against λ."""
    multipliers, data, b = (x.detach().double() for x in (multipliers, A.data, b))
    # Only the direction of λ counts. At a size of 1 its products underflow where they must only.
    size = multipliers.abs().amax(-1, keepdim=True) if multipliers.shape[-1] else multipliers
    multipliers = torch.ldexp(multipliers, -torch.frexp(size.nan_to_num(1.0)).exponent)
    rows = A.shape[0]
    if A.sparse:
        linear = A.over(data)
        y, terms = linear.adjoint(multipliers), linear.abs().adjoint(multipliers.abs())
        error = (rows + 2) * (torch.finfo(y.dtype).eps * terms + torch.finfo(y.dtype).tiny)
        unseen = A.over((data != 0).to(data.dtype)).adjoint((multipliers != 0).to(data.dtype)) == 0
        error = error.masked_fill(unseen, 0)
    else:
        pairs = [(data[..., i, :], multipliers[..., i, None]) for i in range(rows)]
        y, error = _exact_dot(pairs, multipliers)
    terms = torch.maximum(
        support(y - error, activation.range), support(y + error, activation.range)
    )
    gain, doubt = _exact_dot([(b[..., i], multipliers[..., i]) for i in range(rows)], multipliers)
    slack = (terms.shape[-1] + 4) * torch.finfo(y.dtype).eps * terms.abs().sum(-1)
    return gain - doubt > terms.sum(-1) + slack


def _exact_dot(pairs: list[tuple[Tensor, Tensor]], like: Tensor) -> tuple[Tensor, Tensor]:
    """Σ xy and a bound on its error that is 0 when no product or sum was rounded."""
    total = like.new_zeros(())
    lost = like.new_zeros(())
    bound = like.new_zeros(())
    tiny, eps = torch.finfo(like.dtype).tiny, torch.finfo(like.dtype).eps
    for x, y in pairs:
        product, rounding = _two_product(x, y)
        total, carry = _two_sum(total, product)
        lost = lost + (rounding + carry)
        # Below this, the error of a product is no number any more: it counts as `tiny`.
        faint = (product.abs() < tiny / eps**2) & (x != 0) & (y != 0)
        bound = bound + rounding.abs() + carry.abs() + faint * (tiny / eps)
    result, rest = _two_sum(total, lost)
    underflow = (bound > 0) * (4 * len(pairs) * tiny)
    return result, rest.abs() + (2 * len(pairs) + 4) * eps * bound + underflow


def _two_sum(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x + y as a rounded sum and its rounding error (Knuth)."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def _two_product(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x·y as a rounded product and its rounding error (Dekker, Veltkamp's splitting)."""
    product = x * y
    (x1, x2), (y1, y2) = _split(x), _split(y)
    return product, ((x1 * y1 - product) + x1 * y2 + x2 * y1) + x2 * y2


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    scaled = x * 134217729.0  # 2²⁷ + 1
    high = scaled - (scaled - x)
    return high, x - high
