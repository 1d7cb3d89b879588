"""What every solver shares: its interface, its way in and out, and how a residual is measured."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from taut.activations import Activation
from taut.activations.codes import bends
from taut.analysis import Basis
from taut.maps import LinearMap
from taut.outcome import Outcome, Status
from taut.problems import Linear, Problem

_FAR = 1e3  # a start is absurd where it moves u by more than so many times the size of v


class Solver(ABC):
    """How the multipliers are found; `dtype` is that of the solve, None for that of v."""

    dtype: torch.dtype | None

    @abstractmethod
    def solve(self, problem: Problem) -> Outcome:
        """Solve N samples: numbers only, no derivatives, a verdict on every sample."""


@final
@dataclass(frozen=True, eq=False)
class Task:
    """Equations in the dtype of a solver, every number finite."""

    activation: Activation
    A: LinearMap
    v: Float[Tensor, "n K"]
    b: Float[Tensor, "n I"]
    basis: Basis
    eps: float  # the precision in which v, A and b were given

    def take(self, index: Int[Tensor, "n"]) -> "Task":
        """The samples at `index`."""
        A, basis = self.A.take(index), self.basis.take(index)
        return replace(self, A=A, v=self.v[index], b=self.b[index], basis=basis)

    @property
    def bends(self) -> Float[Tensor, "K"] | None:
        """1 for the outputs whose σ bends, 0 for the others; None where all bend."""
        found = bends(self.activation, self.v.shape[-1])
        return None if found is None else found.to(self.v)

    def residual(self, z: Float[Tensor, "n K"]) -> Float[Tensor, "n I"]:
        """A z − b."""
        return self.A.excess(z, self.b)

    def rounding_scale(self, u: Tensor, z: Tensor) -> Float[Tensor, "n I"]:
        """The size of what is rounded in A z − b: |b| + |A|(|z| + σ'(u)(|u| + |v|)).

        The first two are the terms of the sum. The last is what z = σ(u) inherits from the
        rounding of u = v + Aᵀλ; with large logits it is the larger part.
        """
        spread = z.abs() + self.activation.slope(u) * (u.abs() + self.v.abs())
        return self.b.abs() + self.A.abs().apply(spread)


def relative(residual: Tensor, scale: Tensor) -> Tensor:
    """max_i |A z − b|_i over its scale, for each sample."""
    if residual.shape[-1] == 0:
        return residual.new_zeros(residual.shape[:-1])
    # Not 0/0; and a scale that has overflowed must not make every residual small.
    limits = torch.finfo(scale.dtype)
    return residual.abs().div_(scale.clamp(limits.tiny, 1e-8 * limits.max)).amax(-1)


def enter(problem: Linear, dtype: torch.dtype) -> tuple[Task, Tensor, Bool[Tensor, "N"] | None]:
    """The samples in the dtype of the solver, where to start, and which are finite.

    Samples that are not finite are replaced by problems already solved, so that none has to be
    left out. None says that all are finite.
    """
    prepared, v, b, data = problem.prepared, problem.v.to(dtype), problem.b.to(dtype), problem.data
    basis, finite = prepared.basis_in(dtype), None
    A = basis.map
    if basis.transformed:
        A = prepared.map.over(data.where(data.isfinite(), 0).to(dtype))
    if not on_host(v) or not _all_finite(v, b, data):
        n, whole = len(v), data.isfinite()
        whole = whole.all().expand(n) if prepared.map.shared else whole.flatten(1).all(-1)
        finite = v.isfinite().all(-1) & b.isfinite().all(-1) & whole
        keep = finite.unsqueeze(-1)
        v = v.where(keep, 0)
        b = b.where(keep, A.apply(prepared.activation.sigma(v)))
    task = Task(prepared.activation, A, v, b, basis, torch.finfo(problem.v.dtype).eps)
    start = problem.start
    start = torch.zeros_like(b) if start is None else usable(task, start.to(dtype))
    return task, start, finite


def leave(
    problem: Linear,
    task: Task,
    finite: Bool[Tensor, "N"] | None,
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> Outcome:
    """λ, u, z, iterations and status, as found, in the dtype of v; the residual is that of z."""
    multipliers, u, wide, iterations, status = found
    dtype = problem.v.dtype
    multipliers, u, z = (x.to(dtype) for x in (multipliers, u, wide))
    terms = task.A.abs().apply(wide.abs()).to(dtype)
    if not on_host(z) or not _all_finite(multipliers, z, terms):  # too large for the dtype of v
        fits = torch.cat([multipliers, z, terms], -1).isfinite().all(-1)
        status = status.where(fits, int(Status.NONFINITE))
    if finite is not None:
        keep = finite.unsqueeze(-1)
        status = status.where(finite, int(Status.NONFINITE))
        multipliers, u = multipliers.where(keep, 0), u.where(keep, problem.v)
        z = z.where(keep, problem.prepared.activation.sigma(u))
    if finite is None or not on_host(z):
        # Not in float32: a long sum would have more rounding than residual.
        residual = task.A.excess(z.to(wide.dtype), problem.b.to(wide.dtype)).to(dtype)
    else:
        residual = problem.residual(z)
    if finite is not None and not on_host(z):
        residual = residual.where(finite.unsqueeze(-1), problem.residual(z))
    largest = residual.abs().amax(-1) if residual.shape[-1] else residual.new_zeros(len(z))
    failed = int((status != Status.CONVERGED).sum())
    return Outcome(z, multipliers, u, largest, iterations, status, failed)


def on_host(x: Tensor) -> bool:
    """Is it cheap to look at numbers of x? On a device each look waits for all that was asked."""
    return x.is_cpu


def look(*numbers: Tensor) -> list[int]:
    """Several numbers on a device, at once.

    >>> look(torch.tensor(3), torch.tensor(True))
    [3, 1]
    """
    return torch.stack([x.long() for x in numbers]).tolist()


def places(which: Bool[Tensor, "n"], count: int) -> Int[Tensor, "count"]:
    """`which.nonzero()`, where it is known that there are `count`: on a device without a look.

    >>> places(torch.tensor([False, True, True]), 2)
    tensor([1, 2])
    """
    if on_host(which):
        return which.nonzero().squeeze(-1)
    return (~which).byte().argsort(stable=True)[:count]


def _all_finite(*tensors: Tensor) -> bool:
    """Is every entry a number? A sum that overflows says no where it is yes: look again."""
    return all(bool(x.sum().isfinite()) for x in tensors)


def usable(task: Task, start: Tensor) -> Tensor:
    """A start that is not a number, or absurdly far, is worse than none: then 0."""
    if start.numel() == 0:
        return start
    which, size = task.bends, task.v.abs().amax(-1)
    if which is None:
        if on_host(start) and task.A.abs().adjoint(start.abs()).max() < _FAR:
            return start
        size = 1 + size
    else:  # outputs that do not bend go as far as b asks
        w = task.activation.slope(task.v)
        size = which.amax() + size + (task.b.abs() / task.A.abs().apply(w)).nan_to_num().amax(-1)
    y = task.A.adjoint(start.nan_to_num()).abs().amax(-1)
    near = start.isfinite().all(-1) & (y <= _FAR * size)
    return start.where(near.unsqueeze(-1), 0)
