"""A diag(w) Aᵀ s = r, solved for each sample alone: what the steps of solvers need."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from taut.maps import DenseMap, LinearMap

_APART = 1e-6  # pivots above this part of |a|² are far from 0


@final
@dataclass(frozen=True, eq=False)
class Factor:
    """A diag(w) Aᵀ of every sample, factorised: `solve` as often as you like."""

    triangle: Float[Tensor, "N I I"]
    left_out: Bool[Tensor, "*n I"] | None
    scale: Float[Tensor, "N I"] | None  # of samples that had to be scaled to be factorised

    def solve(self, rhs: Float[Tensor, "N I"]) -> Float[Tensor, "N I"]:
        """s with A diag(w) Aᵀ s = rhs; equations left out get s = 0."""
        if self.left_out is not None:
            rhs = rhs.masked_fill(self.left_out, 0)
        if self.scale is None:
            return self._solve(rhs)
        return self.scale * self._solve(self.scale * rhs)

    def _solve(self, rhs: Tensor) -> Tensor:
        # torch.cholesky_solve does the same, and copies the factor first.
        half = torch.linalg.solve_triangular(self.triangle, rhs.unsqueeze(-1), upper=False)
        return torch.linalg.solve_triangular(self.triangle.mT, half, upper=True).squeeze(-1)

    def take(self, index: Tensor) -> "Factor":
        """The samples at `index`."""
        left_out = self.left_out
        if left_out is not None and left_out.ndim > 1:
            left_out = left_out[index]
        return Factor(
            self.triangle[index], left_out, None if self.scale is None else self.scale[index]
        )


@final
@dataclass(frozen=True, eq=False)
class SharedFactor:
    """A diag(w) Aᵀ where A and w are the same for all samples: its inverse, once."""

    inverse: DenseMap
    left_out: Bool[Tensor, "I"] | None

    def solve(self, rhs: Float[Tensor, "N I"]) -> Float[Tensor, "N I"]:
        """s with A diag(w) Aᵀ s = rhs; equations left out get s = 0."""
        if self.left_out is not None:
            rhs = rhs.masked_fill(self.left_out, 0)
        return self.inverse.apply(rhs)

    def take(self, index: Tensor) -> "SharedFactor":
        """The samples at `index`."""
        return self


def share(A: LinearMap, w: Float[Tensor, "K"], left_out: Bool[Tensor, "I"] | None) -> SharedFactor:
    """`factorise` for all samples at once.

    >>> A, w = DenseMap(torch.ones(1, 4)), torch.ones(4)
    >>> share(A, w, None).solve(torch.tensor([[4.0], [8.0]]))
    tensor([[1.],
            [2.]])
    """
    factor = factorise(A, w.unsqueeze(0), left_out)
    inverse = torch.cholesky_inverse(factor.triangle[0])
    if factor.scale is not None:
        inverse = inverse * factor.scale[0] * factor.scale[0].unsqueeze(-1)
    return SharedFactor(DenseMap(inverse), left_out)


def factorise(
    A: LinearMap, w: Float[Tensor, "N K"], left_out: Bool[Tensor, "*n I"] | None
) -> Factor:
    """Factorise A diag(w) Aᵀ for each sample.

    Cholesky's factorisation does not mind equations of very different size. Where the matrix is
    singular to rounding, the least multiple of its diagonal that mends it is added.

    >>> A, w = DenseMap(torch.ones(1, 4)), torch.ones(1, 4)
    >>> factorise(A, w, None).solve(torch.tensor([[4.0]]))
    tensor([[1.]])
    """
    gram = _gram(A, w, left_out)
    triangle, info = torch.linalg.cholesky_ex(gram)
    if not bool(info.any()):
        return Factor(triangle, left_out, None)
    bad = info.nonzero().squeeze(-1)
    lifted, scale = _factorise_singular(gram[bad])
    every = torch.ones_like(gram[..., 0]).index_copy(0, bad, scale)
    # In place: another memory layout would round the solves of the other samples differently.
    return Factor(triangle.index_copy_(0, bad, lifted), left_out, every)


def factorise_unseen(
    A: LinearMap, w: Float[Tensor, "N K"], left_out: Bool[Tensor, "*n I"] | None
) -> tuple[Factor, Bool[Tensor, "N"]]:
    """`factorise`, and where there is a factor: on a device nobody looks whether all have one."""
    triangle, info = torch.linalg.cholesky_ex(_gram(A, w, left_out))
    return Factor(triangle, left_out, None), info == 0


def independent(
    A: LinearMap, w: Float[Tensor, "N K"], left_out: Bool[Tensor, "*n I"] | None
) -> Bool[Tensor, "N"]:
    """Are the equations far from dependent, seen in the outputs with w = 1 of 0 and 1 alone?

    >>> A, w = DenseMap(torch.tensor([[1.0, 0.0], [1.0, 1.0]])), torch.tensor([[1.0, 1], [1, 0]])
    >>> independent(A, w, None)
    tensor([ True, False])
    """
    gram = _gram(A, w, left_out)
    size = A.gram_diagonal(torch.ones_like(w))
    if left_out is not None:
        size = size.masked_fill(left_out, 1)
    triangle, info = torch.linalg.cholesky_ex(gram)
    pivots = triangle.diagonal(dim1=-2, dim2=-1).square()
    return (info == 0) & (pivots > _APART * size).all(-1)


def _gram(A: LinearMap, w: Tensor, left_out: Tensor | None) -> Tensor:
    gram = A.gram(_floored(w))
    if left_out is not None:
        gram = gram.masked_fill(left_out.unsqueeze(-1) | left_out.unsqueeze(-2), 0)
        gram = gram + torch.diag_embed(left_out.to(gram.dtype))
    if A.sparse:
        # Its equations were not looked at: keep those that others imply from running off.
        gram.diagonal(dim1=-2, dim2=-1).mul_(1 + _lift(gram))
    return gram


def _factorise_singular(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Scale to a unit diagonal, and add the least that makes the matrix positive definite."""
    scale = gram.diagonal(dim1=-2, dim2=-1).rsqrt().nan_to_num(0.0, 0.0, 0.0)
    unit = gram * scale.unsqueeze(-1) * scale.unsqueeze(-2)
    # NaN would keep the loop below from ending: no multiple of the diagonal removes it.
    unit = unit.nan_to_num(0.0, 0.0, 0.0)
    lift = _lift(gram)
    triangle, info = unit, torch.ones(len(unit), dtype=torch.int32, device=gram.device)
    while bool(info.any()):
        bad = info.nonzero().squeeze(-1)
        raised = unit[bad]
        raised.diagonal(dim1=-2, dim2=-1).fill_(1 + lift)
        again, code = torch.linalg.cholesky_ex(raised)
        triangle, info = triangle.index_copy(0, bad, again), info.index_copy(0, bad, code)
        lift *= 100
    return triangle, scale


def _floored(w: Tensor) -> Tensor:
    # Slopes that have underflowed would make the matrix zero; the floor keeps a direction in it.
    return w.clamp_min(torch.finfo(w.dtype).tiny * 1e20)


def _lift(gram: Tensor) -> float:
    # Not less: along a direction that A does not see, λ would move by the rounding over this.
    return torch.finfo(gram.dtype).eps ** (2 / 3)


def solve_gram(
    A: LinearMap,
    w: Float[Tensor, "N K"],
    rhs: Float[Tensor, "N I"],
    left_out: Bool[Tensor, "*n I"] | None,
) -> Float[Tensor, "N I"]:
    """s with A diag(w) Aᵀ s = rhs to rounding; equations in `left_out` get s = 0."""
    if A.iterative:
        return solve_lifted(A, w, None, rhs, left_out)
    factor = factorise(A, w, left_out)
    s = factor.solve(rhs)
    if A.sparse:  # refine, to take back what was added to the diagonal
        s = s + factor.solve(rhs - A.apply(w * A.adjoint(s)))
    return s


def solve_lifted(
    A: LinearMap,
    w: Float[Tensor, "N K"],
    lift: Float[Tensor, "N I"] | None,
    rhs: Float[Tensor, "N I"],
    left_out: Bool[Tensor, "*n I"] | None,
    accuracy: float | Float[Tensor, "N"] = 2.0**-52,
) -> Float[Tensor, "N I"]:
    """s with (A diag(w) Aᵀ + diag(lift)) s = rhs, by conjugate gradients; 0 in `left_out`."""
    w = _floored(w)
    diagonal = A.gram_diagonal(w)
    diagonal = diagonal if lift is None else diagonal + lift
    inverse = torch.where(diagonal > 0, diagonal.reciprocal(), torch.zeros_like(diagonal))
    if left_out is not None:  # then no step has a part there
        inverse = inverse.masked_fill(left_out, 0)
    return conjugate_gradient(A, w, rhs, inverse.mul, accuracy, 10 * rhs.shape[-1], lift)


@final
class Rough(NamedTuple):
    """A shared, well-conditioned A of many equations: float32, its rows of length 1."""

    unit: DenseMap
    inverse: DenseMap  # of unit·unitᵀ
    norms: Float[Tensor, "I"]

    @staticmethod
    def of(A: Float[Tensor, "I K"]) -> "Rough":
        """What `solve` and `solve_gram_roughly` need of A."""
        norms = A.norm(dim=-1, keepdim=True)
        unit = A / norms
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(unit @ unit.mT))
        return Rough(DenseMap(unit.float()), DenseMap(inverse.float()), norms.squeeze(-1))

    def solve(self, rhs: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        """(A Aᵀ)⁻¹ rhs, to a few digits."""
        return self.inverse.apply((rhs / self.norms).float()).to(rhs.dtype) / self.norms


def solve_gram_roughly(
    A: LinearMap,
    rough: Rough,
    w: Float[Tensor, "N K"],
    rhs: Float[Tensor, "N I"],
    accuracy: Float[Tensor, "N"],
) -> tuple[Float[Tensor, "N I"], Bool[Tensor, "N"]]:
    """`solve_gram` to a relative `accuracy` of not less than 1e-5, and where it is exact.

    (A Aᵀ)⁻¹ A diag(w) Aᵀ has its eigenvalues between the smallest and the largest w, so while
    these are not far apart a few conjugate gradients cost less than a factorisation; and for so
    few digits float32 is enough.
    """
    unit, inverse, norms = rough
    largest = w.amax(-1, keepdim=True)
    uneven = ~(w.amin(-1) > 1e-2 * largest.squeeze(-1))
    scaled = rhs / norms
    size = scaled.abs().amax(-1, keepdim=True)
    single = ((w / largest).float(), (scaled / size).float())
    enough = accuracy.masked_fill(uneven, torch.inf)
    solution = conjugate_gradient(unit, *single, inverse.apply, enough, 40)
    solution = solution.to(rhs.dtype).mul_(size / largest).div_(norms)
    index = uneven.nonzero().squeeze(-1)
    if len(index):
        solution.index_copy_(0, index, solve_gram(A, w[index], rhs[index], None))
    return solution, uneven


def conjugate_gradient(
    A: LinearMap,
    w: Float[Tensor, "N K"],
    rhs: Float[Tensor, "N I"],
    precondition: Callable[[Tensor], Tensor],
    accuracy: float | Float[Tensor, "N"],
    limit: int,
    lift: Float[Tensor, "N I"] | None = None,
) -> Float[Tensor, "N I"]:
    """s with A diag(w) Aᵀ s = rhs, the matrix only applied, never formed.

    `accuracy` is that of s in the norm of the preconditioner, relative to the start. A sample
    that has reached it stands still. `lift` is added to the diagonal.

    >>> A, w, rhs = DenseMap(torch.eye(2)), torch.tensor([[2.0, 4.0]]), torch.tensor([[2.0, 2.0]])
    >>> conjugate_gradient(A, w, rhs, lambda r: r / w, 1e-6, 10)
    tensor([[1.0000, 0.5000]])
    """
    solution = torch.zeros_like(rhs)
    rest, step = rhs, precondition(rhs)
    energy = (rest * step).sum(-1, keepdim=True)
    goal = energy * torch.as_tensor(accuracy, dtype=w.dtype, device=w.device).square().unsqueeze(-1)
    zero = torch.zeros_like(energy)
    for _ in range(limit):
        unfinished = energy > goal
        if not bool(unfinished.any()):
            break
        image = A.apply(A.adjoint(step).mul_(w))
        image = image if lift is None else image.addcmul_(lift, step)
        length = torch.where(unfinished, energy / (step * image).sum(-1, keepdim=True), zero)
        solution.addcmul_(length, step)
        rest = torch.addcmul(rest, length, image, value=-1)
        scaled = precondition(rest)
        previous, energy = energy, (rest * scaled).sum(-1, keepdim=True)
        step = torch.where(unfinished, torch.addcmul(scaled, energy / previous, step), step)
    return solution
