"""Derivatives where slopes lie so far apart that A diag(w) Aᵀ drowns the small ones.

The rows of A are changed, sample by sample, to the basis B of its heaviest independent columns,
T = B⁻¹A: weighted Gauss–Jordan elimination. Then T diag(w) Tᵀ, scaled, is I + GGᵀ with small G,
on which Cholesky's factorisation is safe whatever the slopes; and g_z − Tᵀg_z[basis] takes away
exactly what the constraints undo of g_z, so that w∘(g_z − Aᵀs) does not have to cancel.

Equations that depend on others among the outputs with slopes have no pivot. With F, which makes
every equation of those with a pivot, s is the least of all that move the outputs alike, Fᵀ⁺s, and
g_ν counts as far as it is possible, F⁺g_ν. Both are solves of the same kind.
"""

from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

# An entry that elimination leaves of numbers so much larger is rounding. Left in place it would,
# where heavy columns depend on each other, outweigh the true entries of light ones.
_ROUNDING = 1e-13
_AT_A_TIME = 2**22  # entries of T


@final
class Pulled(NamedTuple):
    """x = g_u + w∘t with A x = −g_ν; s; and t = g_z − Aᵀs."""

    x: Float[Tensor, "n K"]
    s: Float[Tensor, "n I"]
    t: Float[Tensor, "n K"]


@final
class Rebased(NamedTuple):
    """T = E A, in which the columns `place` are those of the identity.

    A row without a pivot is 0 in T and has place K. It is left out, or it is `lost`: it depends on
    others, or has slopes 0 only, and its row of E is the combination of equations that is nothing.
    """

    T: Float[Tensor, "n I K"]
    E: Float[Tensor, "n I I"]
    place: Int[Tensor, "n I"]
    lost: Bool[Tensor, "n I"]


def floored(w: Tensor) -> Tensor:
    """Slopes so small that their products underflow, raised; a slope of 0 stays: it moves nothing.

    >>> floored(torch.tensor([0.0, 1e-300, 1.0], dtype=torch.float64)) > 0
    tensor([False,  True,  True])
    """
    return torch.where(w > 0, w.clamp_min(torch.finfo(w.dtype).tiny * 1e20), 0)


def _power(x: Tensor, share: int) -> Tensor:
    """A power of two near x^(1/share), with which products are exact; 0 for 0."""
    exponent = torch.div(torch.frexp(x).exponent, share, rounding_mode="floor")
    return torch.where(x > 0, torch.ldexp(torch.ones_like(x), exponent), 0)


def rebase(
    A: Float[Tensor, "#n I K"], w: Float[Tensor, "n K"], left_out: Bool[Tensor, "n I"] | None
) -> Rebased:
    """Gauss–Jordan with the largest |T_ik|·w_k^½ of all as the next pivot.

    >>> A, w = torch.tensor([[[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]]]), torch.tensor([[1.0, 1e-6, 1e-8]])
    >>> rebase(A, w, None).place  # the heaviest columns that are independent
    tensor([[0, 1]])
    """
    (n, K), I = w.shape, A.shape[-2]
    scale = _power(A.abs().amax(-1), 1)
    scale = torch.where(scale > 0, scale.reciprocal(), 1).expand(n, I)
    # T and E side by side: what is done to the rows of one is done to those of the other.
    table = torch.cat([A.expand(n, I, K) * scale.unsqueeze(-1), torch.diag_embed(scale)], -1)
    made_of = table[..., :K].abs()  # the largest that each entry of T has been made of
    each, root = torch.arange(n, device=w.device), _power(w, 2).unsqueeze(1)
    place = torch.full((n, I), K, device=w.device)
    taken = torch.zeros_like(place, dtype=torch.bool) if left_out is None else left_out.clone()
    for _ in range(I):
        score = table[..., :K].abs().mul_(root)
        largest, i = score.amax(-1).masked_fill_(taken, 0.0).max(-1)
        live = largest > 0
        if not bool(live.any()):
            break
        k = score[each, i].argmax(-1)
        row, size = table[each, i], made_of[each, i]
        pivot = torch.where(live, row[each, k], 1).unsqueeze(-1)
        row, size = row / pivot, size / pivot.abs()
        row[each, k] = torch.where(live, 1, row[each, k])
        column = table[each, :, k] * live.unsqueeze(-1)
        column[each, i] = 0
        change = column.unsqueeze(-1) * row.unsqueeze(1)
        table.sub_(change)
        torch.maximum(made_of, change[..., :K].abs_(), out=made_of)
        noise = made_of.mul(_ROUNDING).mul_((column != 0).unsqueeze(-1))
        table[..., :K].mul_(table[..., :K].abs() > noise)
        table[each, i], made_of[each, i] = row, size
        unit = torch.zeros_like(column)
        unit[each, i] = 1
        table[each, :, k] = torch.where(live.unsqueeze(-1), unit, table[each, :, k])
        place[each, i] = torch.where(live, k, place[each, i])
        taken[each, i] = True
    unused = place == K
    lost = unused if left_out is None else unused & ~left_out
    return Rebased(table[..., :K].masked_fill(unused.unsqueeze(-1), 0), table[..., K:], place, lost)


def _times(matrix: Float[Tensor, "#n a b"], x: Float[Tensor, "n b"]) -> Float[Tensor, "n a"]:
    return (matrix @ x.unsqueeze(-1)).squeeze(-1)


def solve_stably(
    A: Float[Tensor, "#n I K"],
    w: Float[Tensor, "n K"],
    left_out: Bool[Tensor, "n I"] | None,
    g_z: Float[Tensor, "n K"],
    g_u: Float[Tensor, "n K"],
    g_ν: Float[Tensor, "n I"],
    metric: Float[Tensor, "#n I I"] | None = None,
) -> Pulled:
    """`pull` of each sample in the basis of its heaviest columns.

    With `metric` R the least s is that with the least |R⁻ᵀs|.
    """
    I, K = A.shape[-2:]
    count = max(1, _AT_A_TIME // max(1, I * (I + K)))
    found = []
    for first in range(0, max(1, len(w)), count):
        block = slice(first, first + count)
        own = A if len(A) == 1 else A[block]
        out = None if left_out is None else left_out[block]
        weights = floored(w[block])
        rebased = rebase(own, weights, out)
        length = metric if metric is None or len(metric) == 1 else metric[block]
        given = g_z[block], g_u[block], g_ν[block]
        found.append(solve_least(own, rebased, weights, given, length))
    return Pulled(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def solve_least(
    A: Tensor, rebased: Rebased, w: Tensor, given: tuple[Tensor, ...], metric: Tensor | None
) -> Pulled:
    """`solve_rebased`, with the least s where equations depend on each other."""
    found = solve_rebased(rebased, w, *given)
    index = rebased.lost.any(-1).nonzero().squeeze(-1)
    if not len(index):
        return found
    if metric is None:
        metric = torch.eye(A.shape[-2], dtype=A.dtype, device=A.device).unsqueeze(0)
    A, metric = (x if len(x) == 1 else x[index] for x in (A, metric))
    rebased, w = Rebased(*(x[index] for x in rebased)), w[index]
    g_z, g_u, g_ν = (x[index] for x in given)
    folded = _folded(rebased, w.shape[-1], metric)
    one, zero = torch.ones_like(g_ν), torch.zeros_like(g_ν)
    # Outputs with slope 0 ask for A g_u; what is possible of it and of g_ν is (R F)⁺R g.
    still = w == 0
    g = g_ν + _times(A, torch.where(still, g_u, 0))
    g = solve_rebased(folded, one, _times(metric, g), zero, zero).s
    moving = rebased._replace(T=rebased.T.masked_fill(still.unsqueeze(1), 0))
    x, s, t = solve_rebased(moving, w, g_z, g_u, g)
    # The least s is Rᵀ(R F)ᵀ⁺s. It is another one for outputs with slope 0.
    s = -_times(metric.mT, solve_rebased(folded, one, zero, zero, s).x)
    t = torch.where(still, g_z - _times(A.mT, s), t)
    return Pulled(*(y.index_copy(0, index, z) for y, z in zip(found, (x, s, t), strict=True)))


def _folded(rebased: Rebased, outputs: int, metric: Tensor) -> Rebased:
    """(R F)ᵀ, whose rows are independent."""
    kept, E = rebased.place < outputs, rebased.E
    # A row of E without a pivot is e_i less what makes equation i, times its diagonal.
    made = -E / E.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    fold = torch.where(rebased.lost.unsqueeze(-1) & kept.unsqueeze(-2), made, 0)
    fold = fold + torch.diag_embed(kept.to(fold.dtype))
    fold = metric @ fold
    return rebase(fold.mT, torch.ones_like(fold[:, 0]), ~kept)


def solve_rebased(rebased: Rebased, w: Tensor, g_z: Tensor, g_u: Tensor, g_ν: Tensor) -> Pulled:
    """x, s and t in the basis of the heaviest columns; s is 0 where a row has no pivot."""
    T, E, place, _ = rebased
    K = w.shape[-1]
    unused = place == K  # rows without a pivot
    at_basis = pad(g_z, (0, 1)).gather(1, place)
    based = torch.zeros_like(pad(w, (0, 1)), dtype=torch.bool).scatter(1, place, True)[:, :K]
    h = torch.where(based, 0, g_z - _times(T.mT, at_basis))
    root = w.sqrt()
    d = pad(root, (0, 1), value=1.0).gather(1, place).reciprocal()
    G = T * root.unsqueeze(1) * d.unsqueeze(-1)
    square = G @ G.mT
    square.diagonal(dim1=-2, dim2=-1).add_(unused)
    moved = _times(E, g_ν)
    rhs = _times(G, root * h) + d * (_times(T, g_u) + moved)
    triangle = torch.linalg.cholesky_ex(square).L
    half = torch.linalg.solve_triangular(triangle, rhs.unsqueeze(-1), upper=False)
    half = torch.linalg.solve_triangular(triangle.mT, half, upper=True).squeeze(-1)
    τ = torch.where(unused, 0, d * half)
    s = _times(E.mT, at_basis + τ)
    t = h - _times(T.mT, τ)  # −τ at the basis
    x = torch.where(based, 0, g_u + w * t)
    # At the basis from A x = −g_ν: there g_u + w∘t would cancel.
    pinned = pad(torch.zeros_like(x), (0, 1)).scatter(1, place, -moved - _times(T, x))
    return Pulled(torch.where(based, pinned[:, :K], x), s, t)
