"""The linear system of all derivatives, of any order, differentiable itself.

    t = g_z − Aᵀs,  x = g_u + w∘t,  A x = −g_ν        so  A diag(w) Aᵀ s = A(g_u + w∘g_z) + g_ν

The gradients of a solve are ∂v = x and ∂b = s; its tangents are the same system once more. It needs
g_z, g_u and g_ν apart: once they are summed, what small slopes multiply is gone.
"""

from typing import Any, NamedTuple, Protocol, cast, final, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from taut.activations import Activation
from taut.autograd import apply_mapped, lead
from taut.maps import LinearMap
from taut.systems.gram import Factor, SharedFactor, share, solve_gram
from taut.systems.stable import Pulled

# Cholesky keeps the digits of x where slopes are this near to each other, times the square of A's
# condition, and x is not so faint a part of what it is summed from.
EVEN, CONDITION, FAINT = 3e-5, 1e3, 1e-4
# Else x must be this part of it, times the running error of the pivots.
SAFE = 1e-6
_DENSE = 2**22  # entries of a sparse A up to which it is made dense for a sample that needs it


@final
class Given(NamedTuple):
    """The gradients that come in: of z, u and ν."""

    z: Float[Tensor, "n K"]
    u: Float[Tensor, "n K"]
    ν: Float[Tensor, "n I"]


@runtime_checkable
class Known(Protocol):
    """What is known of an A and a σ, or how to find out: a `Prepared`, or the promise of one."""

    activation: Activation
    map: LinearMap
    finite: bool  # is it known that A holds numbers only?
    backend: Any
    h: Any  # the nonlinear equations; None where there are none
    unsaid: Any  # of what is said once of these matrices

    @property
    def line(self) -> bool:
        """Is σ a line, so that all samples have the same slopes?"""
        ...

    def reach(self) -> Any:
        """What each equation can come to; None where σ has no ends."""
        ...

    def basis_of(self, A: LinearMap) -> Any:
        """The basis for A."""
        ...

    def basis_in(self, dtype: torch.dtype) -> Any:
        """The basis in the dtype of a solver."""
        ...

    def take(self, index: Tensor) -> "Known":
        """For the samples at `index`, where each has its A."""
        ...

    def joined(self, A: LinearMap, mapped: bool, times: int) -> "Known":
        """For a batch that is `times` this one; where A is `mapped`, each with its own."""
        ...

    def anew(self, A: LinearMap) -> "Known":
        """For another A, which cannot be looked at yet."""
        ...

    @staticmethod
    def pull_stably(*given: Any) -> Pulled:
        """`solve_stably`, by whatever is fastest here."""
        ...


def wide(x: Tensor) -> torch.dtype:
    """The dtype derivatives are worked out in: float64, where the device of x has it.

    >>> wide(torch.zeros(1))
    torch.float64
    """
    return torch.float32 if x.device.type == "mps" else torch.float64


def pull(
    w: Float[Tensor, "n K"],
    A: LinearMap,
    mask: Bool[Tensor, "n I"] | None,
    g_z: Float[Tensor, "n K"],
    g_u: Float[Tensor, "n K"],
    g_ν: Float[Tensor, "n I"],
    known: Known,
    whole: bool,
) -> Pulled:
    """x, s and t of each sample, differentiable in w, A and the gradients as often as needed.

    Outputs with w = 0 take no part, and no more do the equations where `mask` is False: s = 0.
    `whole` says that t is used too, alone or for further derivatives, and must keep its digits
    where x = g_u + w∘t would not show them.
    """
    return Pulled(*cast(Any, apply_mapped(_Pull, w, A.data, g_z, g_u, g_ν, mask, A, known, whole)))


@final
class _Pull(torch.autograd.Function):
    """Its derivatives are the same function: the system is symmetric.

    With cotangents c and (x', s', t') = pull(c_x, c_t, −c_s): ∂g_z = x', ∂g_u = t', ∂g_ν = −s',
    ∂w = t∘t', ∂A = −s' xᵀ − s x'ᵀ.
    """

    @staticmethod
    def forward(
        w: Tensor,
        data: Tensor,
        g_z: Tensor,
        g_u: Tensor,
        g_ν: Tensor,
        mask: Tensor | None,
        A: LinearMap,
        known: Known,
        whole: bool,
    ) -> tuple[Any, ...]:
        A = A.over(data)
        basis = known.basis_of(A)
        left_out = basis.left_out
        if mask is not None:
            left_out = ~mask if left_out is None else ~mask | left_out
        g_ν, scale = basis.inward(g_ν), basis.scale
        if scale is not None:  # rows of a size near 1: no square overflows
            A, g_ν = A.scaled(scale), scale * g_ν
        x, s, t = _solve(A, w, Given(g_z, g_u, g_ν), left_out, whole, known)
        s = s.nan_to_num(0.0, 0.0, 0.0)
        return x, basis.outward(s if scale is None else scale * s), t

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        w, data, _, _, _, mask, ctx.map, ctx.known, _ = inputs
        ctx.save_for_backward(w, data, mask, *output)
        ctx.save_for_forward(w, data, mask, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        w, data, mask, x, s, t = ctx.saved_tensors
        A = ctx.map.over(data)
        c_x, c_s, c_t = grads
        again = pull(w, A, mask, c_x, c_t, -c_s, ctx.known, True)
        dA = -A.outer(again.s, x) - A.outer(s, again.x) if ctx.needs_input_grad[1] else None
        return t * again.t, dA, again.x, again.t, -again.s, None, None, None, None

    @staticmethod
    def jvp(
        ctx: Any, dw: Any, dA: Any, dg_z: Any, dg_u: Any, dg_ν: Any, *_: Any
    ) -> tuple[Any, ...]:
        w, data, mask, x, s, t = ctx.saved_tensors
        dg_z = torch.zeros_like(x) if dg_z is None else dg_z
        dg_u = torch.zeros_like(x) if dg_u is None else dg_u
        dg_ν = torch.zeros_like(s) if dg_ν is None else dg_ν
        if dw is not None:
            dg_u = dg_u + dw * t
        if dA is not None:
            change = ctx.map.over(dA)
            dg_z, dg_ν = dg_z - change.adjoint(s), dg_ν + change.apply(x)
        return tuple(pull(w, ctx.map.over(data), mask, dg_z, dg_u, dg_ν, ctx.known, True))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], w: Tensor, data: Tensor, *rest: Any
    ) -> tuple[Any, ...]:
        """A batch of batches is a batch: the mapped dimension joins N."""
        (*grads, mask, A, known, whole), size = rest, info.batch_size
        w = lead(w, in_dims[0], size)
        A = A.joined(data, in_dims[1], size, w.shape[1])
        if in_dims[1] is None:
            known = known.joined(A, False, size)
        g_z, g_u, g_ν = (
            lead(g, d, size).flatten(0, 1) for g, d in zip(grads, in_dims[2:5], strict=True)
        )
        if mask is not None:
            mask = lead(mask, in_dims[5], size).flatten(0, 1)
        found = pull(w.flatten(0, 1), A, mask, g_z, g_u, g_ν, known, whole)
        return tuple(x.unflatten(0, w.shape[:2]) for x in found), (0, 0, 0)


def _solve(
    A: LinearMap, w: Tensor, given: Given, left_out: Tensor | None, whole: bool, known: Known
) -> Pulled:
    basis = known.basis_of(A)
    g = torch.addcmul(given.u, w, given.z)
    if A.iterative or 0 in A.shape:
        return _completed(A, w, given, solve_gram(A, w, A.apply(g) + given.ν, left_out))
    A = A if basis.transformed else basis.map  # which keeps what it has worked out
    c = basis.condition
    rhs = A.apply(g) + given.ν
    line = known.line and A.shared and not A.sparse and basis.left_out is left_out
    if line and len(w) and bool(_even(w[:1], c)):
        factor = share(A, w[0], left_out)
    else:
        factor = _Running.of(A, w, left_out)
    found = _completed(A, w, given, factor.solve(rhs))
    if whole:
        found = _refined(A, w, given, factor, found)
    index = _doubtful(A, w, c, found)
    if index is None or not len(index):
        return found
    if isinstance(factor, _Running) and not whole:
        index = index[~_is_safe(A.take(index), w[index], g[index], found, index, factor)]
    if not len(index):
        return found
    out = None if left_out is None else left_out.expand(len(w), -1)[index]
    part = Given(*(x[index] for x in given))
    stable = _stably(A.take(index), w[index], out, part, rhs[index], known, basis.metric_of(index))
    return Pulled(*(x.index_copy(0, index, y) for x, y in zip(found, stable, strict=True)))


def _even(w: Tensor, c: Tensor) -> Bool[Tensor, "n"]:
    """Are the slopes of a sample near enough to each other, with this condition of A?"""
    return w.amin(-1) >= torch.where(c < CONDITION, EVEN * c.square(), torch.inf) * w.amax(-1)


def _doubtful(A: LinearMap, w: Tensor, c: Tensor, found: Pulled) -> Int[Tensor, "m"] | None:
    """The samples with slopes far apart, or with an x that is a faint part of its terms."""
    (x, s, _), rows, index = found, A.largest(), None
    # w∘Aᵀs is at most max w times this: where x is no faint part of that, it has not cancelled.
    taken = s.abs() @ rows if A.shared else (s.abs() * rows).sum(-1)
    if w.is_cpu and w.numel():
        # Most samples pass by sums already, Σ1/w for 1/min w and Σ|x|/K for max|x|, and with the
        # extremes of all slopes: both cost less than the extremes of each.
        condition, most = (c.max() if c.ndim else c).item(), w.amax().item()
        level = EVEN * condition**2 * most if condition < CONDITION else torch.inf
        rest = torch.sub(x.abs().sum(-1), taken, alpha=FAINT * most * w.shape[-1])
        if w.amin().item() >= level and rest.amin().item() >= 0:
            return None
        sure = (w.reciprocal().sum(-1).mul_(level) <= 1) & (rest >= 0)
        index = (~sure).nonzero().squeeze(-1)
        x, w, taken, c = x[index], w[index], taken[index], c[index] if c.ndim else c
    faint = ~(x.abs().amax(-1) >= FAINT * (w.amax(-1) * taken))
    doubtful = (faint | ~_even(w, c)).nonzero().squeeze(-1)
    return doubtful if index is None else index[doubtful]


def _stably(
    A: LinearMap,
    w: Tensor,
    left_out: Tensor | None,
    given: Given,
    rhs: Tensor,
    known: Known,
    metric: Tensor | None,
) -> Pulled:
    if A.sparse and A.shape[0] * A.shape[1] > _DENSE:  # as right as Cholesky can be
        return _completed(A, w, given, solve_gram(A, w, rhs, left_out))
    matrix = A.dense()
    matrix = matrix.unsqueeze(0) if A.shared else matrix
    return known.pull_stably(matrix, w, left_out, *given, metric)


@final
class _Running(NamedTuple):
    """A diag(w) Aᵀ and its factor, which is none where it `failed`."""

    gram: Float[Tensor, "n I I"]
    factor: Factor
    failed: Int[Tensor, "n"]

    @staticmethod
    def of(A: LinearMap, w: Tensor, left_out: Tensor | None) -> "_Running":
        gram = A.gram(w)
        if left_out is not None:
            gram = gram.masked_fill(left_out.unsqueeze(-1) | left_out.unsqueeze(-2), 0)
            gram = gram + torch.diag_embed(left_out.to(gram.dtype))
        triangle, failed = torch.linalg.cholesky_ex(gram)
        return _Running(gram, Factor(triangle, left_out, None), failed)

    def solve(self, rhs: Tensor) -> Tensor:
        return self.factor.solve(rhs)

    def error(self, index: Tensor) -> Float[Tensor, "m"]:
        """The running error of the pivots, ε_i = (H_ii + Σ_{j<i} L_ij² ε_j)/L_ii²: the largest.

        Small pivots in a chain multiply, which the smallest of them does not show.
        """
        squares = self.factor.triangle[index].square()
        system = 2 * torch.diag_embed(squares.diagonal(dim1=-2, dim2=-1)) - squares
        sizes = self.gram[index].diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        return torch.linalg.solve_triangular(system, sizes, upper=False).squeeze(-1).amax(-1)


def _completed(A: LinearMap, w: Tensor, given: Given, s: Tensor) -> Pulled:
    t = given.z - A.adjoint(s)
    return Pulled(torch.addcmul(given.u, w, t), s, t)


def _refined(
    A: LinearMap, w: Tensor, given: Given, factor: "_Running | SharedFactor", found: Pulled
) -> Pulled:
    """With the digits of t where equations pin an output: g_z − Aᵀs is the rounding of it."""
    more = factor.solve(A.apply(found.x) + given.ν)
    t = found.t - A.adjoint(more)
    return Pulled(torch.addcmul(given.u, w, t), found.s + more, t)


def _is_safe(
    A: LinearMap, w: Tensor, g: Tensor, found: Pulled, index: Tensor, factor: _Running
) -> Bool[Tensor, "m"]:
    """Has Cholesky kept the digits of x in the samples at `index`?"""
    summed = g.abs() + w * A.abs().adjoint(found.s[index].abs())
    enough = found.x[index].abs().amax(-1) >= SAFE * factor.error(index) * summed.amax(-1)
    return enough & (factor.failed[index] == 0)
