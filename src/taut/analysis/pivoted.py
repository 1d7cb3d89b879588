"""Redundant equations of very different size: which of them to leave out, for each sample.

What the rounding of b makes equations disagree by has to go somewhere. It is rounding where the
equation left out has the largest b of those that depend on each other; in a far smaller one it
would be far more than the digits of its b.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from taut.analysis.basis import Basis, Orthonormal, Reduced, Scaled, times
from taut.maps import LinearMap, as_map

# An equation is left out where its b is this part of what implies it, or more.
_EVEN = 0.1
# Others may take its place where the rest then stay about as independent as they are.
_PART = 0.01
_NOTHING = 1e-12


@final
@dataclass(frozen=True, eq=False)
class Pivoted(Reduced):
    """`Reduced`, with the equations that each sample leaves out."""

    chosen: Bool[Tensor, "n I"]
    circuits: Float[Tensor, "n m I"]  # as `null`; each has 1 at one equation left out, else 0 there

    _tensors: ClassVar = (*Reduced._tensors, "chosen", "circuits")

    @property
    def left_out(self) -> Bool[Tensor, "n I"]:
        return self.chosen

    def folded(self, scale: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        sums = times(self.circuits.abs(), scale)  # of each group of equations
        sums = times(((self.circuits != 0) & self.chosen.unsqueeze(-2)).to(scale.dtype).mT, sums)
        return torch.where(self.chosen, sums, scale)

    def take(self, index: Int[Tensor, "n"]) -> "Pivoted":
        each = {"chosen": self.chosen[index], "circuits": self.circuits[index]}
        if self.condition.ndim == 0:
            return replace(self, **each)
        taken = {name: getattr(self, name)[index] for name in Reduced._tensors}
        return replace(self, map=self.map.take(index), **taken, **each)


def uneven(basis: Basis, b: Float[Tensor, "n I"]) -> Bool[Tensor, "n"] | None:
    """The samples that should leave out other equations; None where all may keep to the same."""
    if isinstance(basis, Scaled):
        return uneven(basis.of, basis.scale * b)
    if not isinstance(basis, Reduced):
        return None
    size = b.abs()
    apart = (size < _EVEN * basis.folded(size)) & basis.out
    if isinstance(basis, Orthonormal):
        apart = apart & basis.own.unsqueeze(-1)
    found = apart.any(-1)
    return found if bool(found.any()) else None


def pivoted(basis: Basis, A: LinearMap, b: Float[Tensor, "n I"]) -> Basis:
    """The basis of samples that `uneven` found: each leaves out its equations of the largest b."""
    if isinstance(basis, Scaled):
        return Scaled(pivoted(basis.of, A.scaled(basis.scale), basis.scale * b), basis.scale)
    assert isinstance(basis, Reduced)  # noqa: S101
    found = {name: getattr(basis, name) for name in Reduced._tensors}
    chosen, circuits = eliminate(basis.null, A, b.abs())
    map_ = as_map(A.data) if isinstance(basis, Orthonormal) else basis.map
    return Pivoted(map_, **found, chosen=chosen, circuits=circuits)


def eliminate(
    null: Float[Tensor, "*n m I"], A: LinearMap, size: Float[Tensor, "n I"]
) -> tuple[Bool[Tensor, "n I"], Float[Tensor, "n m I"]]:
    """Gauss–Jordan on N, whose rows A maps to nothing, by the largest |n_i|·`size`_i.

    So what is left out has the largest of its group, and what implies it the smallest rounding.
    """
    # Rows of zeros are of samples with fewer redundant equations than others.
    rows = null.expand(len(size), *null.shape[-2:]).clone()
    size = size / size.amax(-1, keepdim=True).clamp_min(torch.finfo(size.dtype).tiny)
    norm = A.largest()
    norm = norm.where(norm > 0, 1)
    chosen = torch.zeros_like(size, dtype=torch.bool)
    free = torch.ones_like(rows[..., 0], dtype=torch.bool)
    each = torch.arange(len(size), device=size.device)
    for _ in range(rows.shape[1]):
        weight = rows.abs() * norm.unsqueeze(-2)
        most = weight.amax(-1, keepdim=True)
        score = torch.where(weight > _PART * most, rows.abs() * (size.unsqueeze(-2) + 1e-300), 0)
        best, at = (score * free.unsqueeze(-1)).flatten(1).max(-1)
        row, column = at // size.shape[1], at % size.shape[1]
        live = best > 0
        pivot = torch.where(live, rows[each, row, column], 1)
        line = rows[each, row] / pivot.unsqueeze(-1)
        factor = torch.where(live.unsqueeze(-1), rows[each, :, column], 0)
        rows = rows - factor.unsqueeze(-1) * line.unsqueeze(-2)
        rows[each, row] = torch.where(live.unsqueeze(-1), line, rows[each, row])
        # What is left of numbers that cancel is nothing.
        size_of = rows.abs() * norm.unsqueeze(-2)
        rows = torch.where(size_of > _NOTHING * size_of.amax(-1, keepdim=True), rows, 0)
        chosen[each, column] |= live
        free[each, row] &= ~live
    return chosen, rows
