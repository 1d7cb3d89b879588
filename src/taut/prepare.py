"""What is fixed, looked at once: A, σ, and the backend for them."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from taut.accept import Numbers, as_floating, check_matrix
from taut.activations import Activation, resolve
from taut.activations.codes import is_line, width
from taut.analysis import Basis, analyse, unexamined
from taut.analysis.sifting import sift
from taut.backends import Backend, Torch, backend_for, pull_stably
from taut.held import Reach, reach
from taut.maps import LinearMap, as_map
from taut.systems import wide


@final
@dataclass(frozen=True, eq=False)
class Prepared:
    """A and σ, worked out: what `prepare` returns and `project` takes in place of A.

    It holds no graph: A gets no gradient through it.

    >>> import taut
    >>> prepared = taut.prepare(torch.ones(1, 3), "exp")
    >>> taut.project(torch.zeros(3), prepared, torch.ones(1)).z
    tensor([0.3333, 0.3333, 0.3333])
    """

    A: Tensor  # as given, detached
    activation: Activation
    map: LinearMap  # of A, flat: (I, K), or (N, I, K) for one matrix a sample
    basis: Basis
    backend: Backend
    finite: bool  # does A hold numbers only?
    version: int | None  # of A when it was looked at

    pull_stably = staticmethod(pull_stably)

    @cached_property
    def line(self) -> bool:
        """Is σ a line?"""
        return is_line(self.activation)

    def reach(self) -> Reach | None:
        """What each equation can come to; None where σ has no ends."""
        return self._reach

    @cached_property
    def _reach(self) -> Reach | None:
        data = self.map.data
        A = self.map.over(data.where(data.isfinite(), 0).to(wide(data)))
        shape = (A.shape[1],) if A.shared else (len(data), A.shape[1])
        lower, upper = (x.expand(shape) for x in self.activation.range.bounds(A.data))
        if not bool((lower.isfinite() | upper.isfinite()).any()):
            return None
        return reach(A, lower, upper)

    @cached_property
    def single(self) -> Basis:
        """The basis in float32."""
        return self.basis.to(torch.float32)

    def basis_in(self, dtype: torch.dtype) -> Basis:
        """The basis in the dtype of a solver."""
        return self.basis if dtype == self.basis.map.data.dtype else self.single

    def basis_of(self, A: LinearMap) -> Basis:
        return self.sifted

    @cached_property
    def sifted(self) -> Basis:
        """The basis for derivatives: a sparse A is looked at when the first are asked for."""
        if self.map.sparse and not self.map.iterative:
            return sift(self.basis.map)
        return self.basis

    def repeated(self, times: int) -> "Prepared":
        if self.map.shared:
            return self
        return self.take(torch.arange(len(self.map.data), device=self.A.device).repeat(times))

    def anew(self, A: LinearMap) -> "Unprepared":
        """For another A, which cannot be looked at yet."""
        return Unprepared(self.activation, A)

    def take(self, index: Tensor) -> "Prepared":
        """For the samples at `index`, where each has its A."""
        return replace(self, map=self.map.take(index), basis=self.basis.take(index))

    def changed(self) -> bool:
        """Was A written to since it was looked at?"""
        return self.version is not None and self.A._version != self.version

    def __reduce__(self) -> tuple:
        return prepare, (self.A, self.activation)


@final
@dataclass(frozen=True, eq=False)
class Unprepared:
    """σ and the way A is held, where A itself cannot be looked at: under a transform."""

    activation: Activation
    map: LinearMap
    finite: bool = False
    backend: Backend = field(default_factory=Torch)

    pull_stably = staticmethod(pull_stably)

    @cached_property
    def line(self) -> bool:
        """Is σ a line?"""
        return is_line(self.activation)

    def reach(self) -> None:
        raise RuntimeError("A cannot be looked at here.")

    def basis_of(self, A: LinearMap) -> Basis:
        return _basis(A, warn=False)  # for derivatives: the solve has warned

    def basis_in(self, dtype: torch.dtype) -> Basis:
        raise RuntimeError("A cannot be looked at here.")

    def take(self, index: Tensor) -> "Unprepared":
        return replace(self, map=self.map.take(index))

    def repeated(self, times: int) -> "Unprepared":
        return self

    def anew(self, A: LinearMap) -> "Unprepared":
        """For another A."""
        return replace(self, map=A)

    def prepared(self, A: LinearMap) -> Prepared:
        """Now that A can be looked at."""
        return _prepared(A.data, self.activation, A, None)


def prepare(
    A: Float[Tensor, "*batch I K"] | Numbers, activation: str | Activation = "linear"
) -> Prepared:
    """Look at A and σ once, for many calls of `project`.

    >>> prepare(torch.ones(2, 3), "sigmoid").basis.condition
    tensor(1., dtype=torch.float64)
    """
    A = as_floating("A", A, torch.get_default_dtype())
    check_matrix(A, None)
    if A.requires_grad:
        raise ValueError(
            "A requires a gradient, and a Prepared gives it none. Pass A itself to project, or "
            "use taut.Projection, whose A may be learned; or prepare A.detach()."
        )
    return examined(A, resolve(activation))


def examined(A: Tensor, activation: Activation) -> Prepared:
    """`prepare`, whether A requires a gradient or not."""
    A = A.detach()
    if A.is_inference():  # has no version counter, and may not be saved for a backward pass
        A = A.clone()
    flat = A if A.ndim < 4 else A.flatten(0, -3)
    version = None if A.is_inference() else A._version
    return _prepared(A, activation, as_map(flat), version)


def _prepared(A: Tensor, activation: Activation, flat: LinearMap, version: int | None) -> Prepared:
    outputs = width(activation)
    if outputs is not None and outputs != flat.shape[1]:
        raise ValueError(
            f"the activation {activation.name!r} has parameters for {outputs} outputs, "
            f"but A has K = {flat.shape[1]} columns; got A {tuple(A.shape)}."
        )
    finite = bool(flat.data.isfinite().all())
    basis = _basis(flat)
    backend = backend_for(basis, activation) if finite else Torch()
    return Prepared(A, activation, flat, basis, backend, finite, version)


def _basis(A: LinearMap, warn: bool = True) -> Basis:
    """What there is to know of A, in float64 where the device has it."""
    data = A.data.detach()
    number = data.where(data.isfinite(), 0).to(wide(data))
    if A.sparse:
        return unexamined(A.over(number))
    return analyse(number, torch.finfo(data.dtype).eps, warn)
