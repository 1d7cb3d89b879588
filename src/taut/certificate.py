"""Proofs that no solution exists.

If z lies in the range of the activation, then (Aᵀλ)ᵀz ≤ Σ_k sup{y_k z : z in the range of k} with
y = Aᵀλ. A λ for which bᵀλ exceeds that sum therefore proves that no such z has A z = b. For
lower ≤ C z ≤ upper, Σ(lower ν⁺ − upper ν⁻) takes the place of bᵀλ.
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from taut.accept import Numbers, as_floating
from taut.activations import Activation, Interval, resolve
from taut.autograd import check_followed
from taut.maps import LinearMap, as_map, stacked
from taut.systems import solve_lifted


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
    passes = which & likely(multipliers, A, b, activation)
    if not bool(passes.any()):
        return passes
    index = passes.nonzero().squeeze(-1)
    proven = proves(multipliers[index], A.take(index), b[index], activation)
    return passes.index_put((index,), proven)


def likely(
    multipliers: Float[Tensor, "N I"],
    A: LinearMap,
    b: Float[Tensor, "N I"],
    activation: Activation,
) -> Bool[Tensor, "N"]:
    """Where λ would be a proof, but for rounding."""
    terms = support(A.adjoint(multipliers), activation.range)
    return (b * multipliers).sum(-1) > terms.sum(-1)


def is_certificate(
    multipliers: Float[Tensor, "*batch I"] | Numbers,
    A: Float[Tensor, "*A_batch I K"] | Numbers | None,
    b: Float[Tensor, "*b_batch I"] | Numbers | None,
    activation: str | Activation,
    *,
    G: Float[Tensor, "*G_batch M K"] | Numbers | None = None,
    lower: Float[Tensor, "..."] | Numbers | float | None = None,
    upper: Float[Tensor, "..."] | Numbers | float | None = None,
    radius: float | Float[Tensor, "*#batch"] | Numbers = torch.inf,
) -> Bool[Tensor, "*batch"]:
    """Do λ, and ν of G, prove that no z in the range of the activation satisfies the constraints?

    They are A z = b and lower ≤ G z ≤ upper, or, without G, lower ≤ z ≤ upper. With a finite
    `radius`, one for all or one for each sample, it is asked only that no z with |z| ≤ radius does.
    Rounding is on the safe side: True is a proof for the numbers given, in exact arithmetic.
    False says only that this λ proves nothing. An output that v = ±inf, or a y at an end of the
    range, held has both bounds at that end: without G, pass them as `lower` and `upper`.

    >>> A, b = torch.ones(1, 2), torch.tensor([3.0])  # two numbers below 1 cannot sum to 3
    >>> is_certificate(torch.tensor([1.0]), A, b, "sigmoid")
    tensor(True)
    >>> is_certificate(torch.tensor([1.0]), A, b, "linear", upper=1.0)
    tensor(True)
    """
    check_followed()
    if A is None and G is None and lower is None and upper is None:
        raise ValueError("a certificate is one of constraints: it needs A, G or bounds.")
    if A is not None and b is None:
        raise ValueError("A without b: pass the b of A z = b.")
    own = {"multipliers": multipliers, "A": A, "b": b, "G": G, "lower": lower, "upper": upper}
    given: dict[str, Any] = {
        name: x if x is None else as_floating(name, x, torch.float64)
        for name, x in {**own, "radius": radius}.items()
    }
    _check_shapes(given)
    return _certified(resolve(activation), *given.values())


def _certified(
    activation: Activation,
    ν: Tensor,
    A: Any,
    b: Any,
    G: Any,
    lower: Any,
    upper: Any,
    radius: Tensor,
) -> Bool[Tensor, "*batch"]:
    if G is None and lower is None and upper is None and bool((radius == torch.inf).all()):
        return proves(ν, as_map(A), b, activation)
    ends = activation.range.bounds(ν.double())
    if G is None:
        ends = _narrowed(ends, lower, upper)
    if A is None and G is None:  # bounds alone: they are empty, or they are not
        return (ends[0] > ends[1]).any(-1).expand(ν.shape[:-1])
    C, sides = _stacked(A, b, G, lower, upper)
    return reach_of_proof(ν.double(), C, *sides, *ends) >= radius


def _check_shapes(given: dict[str, Any]) -> None:
    """Refuse what does not belong together: rows, outputs, samples."""
    shapes = {name: tuple(x.shape) for name, x in given.items() if x is not None}
    received = ", ".join(f"{k} {v}" for k, v in shapes.items() if v or k == "multipliers")
    matrices = [shapes[name] for name in ("A", "G") if name in shapes]
    if any(len(x) < 2 for x in matrices) or len({x[-1] for x in matrices}) > 1:
        raise ValueError(f"A and G must be (I, K) and (M, K), or of each sample; got {received}.")
    rows = sum(x[-2] for x in matrices)
    if shapes["multipliers"][-1:] != (rows,):
        raise ValueError(
            f"multipliers must have one entry for each of the {rows} rows of A and G; got "
            f"{received}."
        )
    if "b" in shapes and shapes["b"][-1:] != shapes["A"][-2:-1]:
        raise ValueError(f"b must have one entry for each equation; got {received}.")
    width = shapes["G"][-2] if "G" in shapes else matrices[0][-1] if matrices else None
    for name in ("lower", "upper"):
        if width is not None and shapes.get(name, ())[-1:] not in ((), (width,)):
            what = "row of G" if "G" in shapes else "output"
            raise ValueError(
                f"{name} must be a number, or have an entry per {what}; got {received}."
            )
    ends = {"A": -2, "G": -2, "radius": None}
    fronts = [x[: ends.get(name, -1)] for name, x in shapes.items()]
    try:
        torch.broadcast_shapes(*fronts)
    except RuntimeError:
        raise ValueError(f"the samples must be as many everywhere; got {received}.") from None


def _stacked(
    A: Tensor | None, b: Tensor | None, G: Tensor | None, lower: Any, upper: Any
) -> tuple[LinearMap, tuple[Tensor, Tensor]]:
    """C = [A; G] with its lower and upper sides, in float64."""
    matrices, lowers, uppers = [], [], []
    if A is not None and b is not None:
        matrices, lowers, uppers = [A.double()], [b.double()], [b.double()]
    if G is not None:
        shape = G.shape[:-1] if G.ndim > 2 else G.shape[-2:-1]
        matrices.append(G.double())
        for sides, given, none in ((lowers, lower, -torch.inf), (uppers, upper, torch.inf)):
            side = torch.as_tensor(none if given is None else given, dtype=torch.float64)
            sides.append(side.expand(torch.broadcast_shapes(side.shape, shape)))
    if any(x.layout is not torch.strided for x in matrices):
        C = as_map(matrices[0]) if len(matrices) == 1 else stacked(matrices[0], matrices[1])
    else:
        batch = torch.broadcast_shapes(*(x.shape[:-2] for x in matrices))
        C = as_map(torch.cat([x.expand(*batch, *x.shape[-2:]) for x in matrices], -2))
    sides = []
    for parts in (lowers, uppers):
        front = torch.broadcast_shapes(*(x.shape[:-1] for x in parts))
        sides.append(torch.cat([x.expand(*front, x.shape[-1]) for x in parts], -1))
    return C, (sides[0], sides[1])


def _narrowed(ends: tuple[Tensor, Tensor], lower: Any, upper: Any) -> tuple[Tensor, Tensor]:
    """The range of z, with its bounds."""
    low, high = ends
    if lower is not None:
        low = torch.maximum(low, torch.as_tensor(lower, dtype=low.dtype))
    if upper is not None:
        high = torch.minimum(high, torch.as_tensor(upper, dtype=high.dtype))
    return low, high


def reach_of_proof(
    multipliers: Float[Tensor, "*batch M"],
    C: LinearMap,
    lower: Float[Tensor, "*#batch M"],
    upper: Float[Tensor, "*#batch M"],
    least: Float[Tensor, "*#ends"],
    most: Float[Tensor, "*#ends"],
    safe: bool = True,
) -> Float[Tensor, "*batch"]:
    """R such that no z in [least, most] with |z| ≤ R has lower ≤ C z ≤ upper; −1 proves nothing.

    It is inf where the ends alone, or none of the outputs that have no end, decide. With `safe`
    every rounding is taken against ν.
    """
    ν, usable = _scaled(multipliers)
    side = torch.where(ν > 0, lower, torch.where(ν < 0, upper, 0))
    usable = usable & side.isfinite().all(-1)
    side, rows = side.where(side.isfinite(), 0), C.shape[0]
    if safe and rows:
        y, error = _pull(C, ν)
        gain, doubt = _exact_dot([(side[..., i], ν[..., i]) for i in range(rows)], ν)
    else:
        y, gain = C.adjoint(ν), (side * ν).sum(-1)
        error, doubt = torch.zeros_like(y), torch.zeros_like(gain)
    usable = usable & (y + error).isfinite().all(-1) & (gain + doubt).isfinite()
    # Convex in y: over an interval of y the largest value is at an end.
    both = y - error, y + error
    within = Interval(least, most)
    highest = torch.maximum(*(support(x, within) for x in both))
    endless = highest == torch.inf
    slope = torch.where(endless, torch.maximum(*(x.abs() for x in both)), 0).sum(-1)
    terms = highest.masked_fill(endless, 0)
    left = gain - doubt - terms.sum(-1) - _slack(terms, y, error)
    # A proof that needs |z| ≤ R has no R beyond the numbers there are.
    count = terms.shape[-1]
    R = left / (slope * (1 + 1e-12 + count * 2.0**-52))
    R = torch.where(slope > 0, R.clamp_max(torch.finfo(R.dtype).max), torch.inf)
    R = torch.where(usable & (left > 0), R, -1)
    empty = (lower > upper).any(-1) | (least > most).any(-1)
    return torch.where(empty, torch.inf, R)


def rays(
    multipliers: Float[Tensor, "n M"], C: LinearMap, least: Tensor, most: Tensor
) -> Iterator[Float[Tensor, "tries n M"]]:
    """Candidates for a proof, from multipliers that run away: as they are and cleaned; refined.

    What is refined loses rows: then it is refined once more, which may lead to others.
    """
    size = multipliers.abs().amax(-1, keepdim=True)
    ray = (multipliers / size.clamp_min(1e-290)).nan_to_num(0.0, 0.0, 0.0)
    plain = torch.stack([ray.where(ray.abs() > few, 0) for few in (0.0, 1e-3, 0.1)])
    yield plain
    if bool((least.isfinite() & most.isfinite()).all()):
        return
    if C.sparse or C.iterative:
        yield torch.stack(
            [_refined(x, C, least, most, faint) for faint in (0.0, 1e-3) for x in plain]
        )
        return
    faint = plain.new_tensor([0.0, 0.0, 0.0, 1e-3, 1e-3])[:, None, None]
    refined = _refined(torch.cat([plain, plain[:2]]), C, least, most, faint)
    yield refined
    yield _refined(refined, C, least, most, faint)


def _refined(
    ray: Float[Tensor, "*tries n M"],
    C: LinearMap,
    least: Tensor,
    most: Tensor,
    faint: float | Float[Tensor, "tries 1 1"],
) -> Tensor:
    """Inverse iteration: Cᵀν → 0 at the outputs whose ends do not bound it, with ν's signs.

    And where it is so `faint` a part of its terms that it may well be 0.
    """
    support_of, y = ray != 0, C.adjoint(ray)
    harmless = (y > 0) & most.isfinite() | (y < 0) & least.isfinite()
    harmless = harmless & (y.abs() > faint * C.abs().adjoint(ray.abs()))
    harmless = harmless | (least.isfinite() & most.isfinite())
    w = (~harmless).to(ray.dtype)
    top = C.gram_diagonal(w).where(support_of, 0).amax(-1, keepdim=True).clamp_min(1e-290)
    lift = torch.where(support_of, 1e-8 * top, 1)
    triangle = None
    if not C.iterative:
        gram = C.gram(w) * (support_of.unsqueeze(-1) & support_of.unsqueeze(-2))
        gram.diagonal(dim1=-2, dim2=-1).add_(lift)
        triangle = torch.linalg.cholesky_ex(gram).L
    x = ray
    for accuracy in (1e-3, 1e-3, 1e-3, 1e-13):  # the last one takes away what the others left
        x = x.where(support_of, 0)
        if triangle is None:
            x = solve_lifted(C, w, lift, x, ~support_of, accuracy)
        else:
            x = torch.cholesky_solve(x.unsqueeze(-1), triangle).squeeze(-1)
        x = (x / x.abs().amax(-1, keepdim=True).clamp_min(1e-290)).nan_to_num(0.0, 0.0, 0.0)
    return x.where(x * ray > 0, 0)


def proves(multipliers: Tensor, A: LinearMap, b: Tensor, activation: Activation) -> Tensor:
    """`is_certificate` for a map: bᵀλ > Σ_k sup{y_k z}, every rounding taken against λ."""
    multipliers, data, b = (x.detach().double() for x in (multipliers, A.data, b))
    if not A.shape[0]:
        return torch.zeros_like(multipliers.sum(-1), dtype=torch.bool)
    multipliers, sound = _scaled(multipliers)
    rows = A.shape[0]
    y, error = _pull(A.over(data), multipliers)
    terms = torch.maximum(
        support(y - error, activation.range), support(y + error, activation.range)
    )
    gain, doubt = _exact_dot([(b[..., i], multipliers[..., i]) for i in range(rows)], multipliers)
    sound = sound & (y + error).isfinite().all(-1) & (gain + doubt).isfinite()
    return sound & (gain - doubt > terms.sum(-1) + _slack(terms, y, error))


def _scaled(multipliers: Tensor) -> tuple[Tensor, Bool[Tensor, "*batch"]]:
    """λ at a size of 1, and where it is the same λ: finite, with no digit lost.

    Only its direction counts. At a size of 1 its products underflow where they must only.
    """
    if not multipliers.shape[-1]:
        return multipliers, multipliers.new_ones(multipliers.shape[:-1], dtype=torch.bool)
    size = multipliers.abs().amax(-1, keepdim=True)
    exponent = torch.frexp(size.nan_to_num(1.0)).exponent
    scaled = torch.ldexp(multipliers, -exponent)
    same = scaled.isfinite() & (torch.ldexp(scaled, exponent) == multipliers)
    return scaled, same.all(-1)


def _slack(terms: Float[Tensor, "*batch K"], y: Tensor, error: Tensor) -> Tensor:
    """How much Σ terms may be too small: products and sums are rounded, and products underflow."""
    info = torch.finfo(terms.dtype)
    rounded = (terms.shape[-1] + 4) * info.eps * terms.abs().sum(-1)
    return rounded + info.tiny * ((y != 0) | (error != 0)).sum(-1).to(terms.dtype)


def _pull(A: LinearMap, ν: Tensor) -> tuple[Tensor, Tensor]:
    """Aᵀν and a bound on its error."""
    rows, data = A.shape[0], A.data
    if not A.sparse:
        return _exact_dot([(data[..., i, :], ν[..., i, None]) for i in range(rows)], ν)
    y, terms = A.adjoint(ν), A.abs().adjoint(ν.abs())
    error = (rows + 2) * (torch.finfo(y.dtype).eps * terms + torch.finfo(y.dtype).tiny)
    unseen = A.over((data != 0).to(data.dtype)).adjoint((ν != 0).to(data.dtype)) == 0
    return y, error.masked_fill(unseen, 0)


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
        # In the dtype of the numbers: in that of torch's default, this may itself be 0.
        faint = ((product.abs() < tiny / eps**2) & (x != 0) & (y != 0)).to(like.dtype)
        bound = bound + rounding.abs() + carry.abs() + faint * (tiny / eps)
    result, rest = _two_sum(total, lost)
    underflow = (bound > 0).to(like.dtype) * (4 * len(pairs) * tiny)
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
    large = x.abs() > 2.0**970  # it would overflow
    small = torch.where(large, x * 2.0**-54, x)
    scaled = small * 134217729.0  # 2²⁷ + 1
    high = scaled - (scaled - small)
    high = torch.where(large, high * 2.0**54, high)
    return high, x - high
