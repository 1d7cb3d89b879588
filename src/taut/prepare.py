"""What is fixed, looked at once: A, σ, and the backend for them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from taut.accept import Numbers, as_floating, check_h, check_matrix
from taut.activations import Activation, resolve
from taut.activations.codes import is_line, width
from taut.analysis import Basis, analyse, sift, unexamined
from taut.autograd import check_followed, outside_inference
from taut.backends import Backend, Torch, backend_for, backend_within, pull_stably
from taut.held import Reach, reach
from taut.maps import LinearMap, as_map, stacked
from taut.problems.surface import Equations
from taut.systems import Pulled, wide


@final
@dataclass(frozen=True, eq=False)
class Prepared:
    """A, G and σ, worked out: what `prepare` returns and `project` takes in place of A.

    It holds copies and no graph: what is written to A or G later does not reach it, and they get
    no gradient through it.

    >>> import taut
    >>> prepared = taut.prepare(torch.ones(1, 3), "exp")
    >>> taut.project(torch.zeros(3), prepared, torch.ones(1)).z
    tensor([0.3333, 0.3333, 0.3333])
    """

    A: Tensor  # as given, detached
    activation: Activation
    map: LinearMap  # of C = [A; G], flat: (I, K), or (N, I, K) for one matrix a sample
    basis: Basis
    backend: Backend
    finite: bool  # does A hold numbers only?
    G: Tensor | None = None  # as given, detached
    alone: "Prepared | None" = None  # A by itself, where there is more: G, bounds, h
    h: Equations | None = None  # h(z, *params) = 0
    unsaid: set[str] = field(default_factory=lambda: {"targets", "nearer"})  # what is said once

    pull_stably: ClassVar[Callable[..., Pulled]] = staticmethod(pull_stably)

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
        """The basis in the dtype of a solver; that of A, if there are inequalities."""
        if self.alone is not None:
            return self.alone.basis_in(dtype)
        return self.basis if dtype == self.basis.map.data.dtype else self.single

    def basis_of(self, A: LinearMap) -> Basis:
        return self.basis

    def joined(self, A: LinearMap, mapped: bool, times: int) -> "Prepared | Unprepared":
        """For a batch that is `times` this one; where A is `mapped`, each with its own."""
        if mapped:
            return self.anew(A)
        if self.map.shared:
            return self
        return self.take(torch.arange(len(self.map.data), device=self.A.device).repeat(times))

    def anew(self, A: LinearMap) -> "Unprepared":
        """For another A, which cannot be looked at yet."""
        if self.alone is None or self.h is not None:
            return Unprepared(self.activation, A, h=self.h)
        return Unprepared(self.activation, A, self.alone.map.shape[0])

    def take(self, index: Tensor) -> "Prepared":
        """For the samples at `index`, where each has its A."""
        alone = self.alone
        if alone is not None and not alone.map.shared:
            alone = alone.take(index)
        basis = self.basis.take(index)
        return replace(self, map=self.map.take(index), basis=basis, alone=alone)

    @cached_property
    def bounded(self) -> "Prepared":
        """The same for problems with bounds on z."""
        basis = _kinked_basis(self.map)
        backend: Backend = Torch()
        if self.finite:
            backend = backend_within(basis, self, self.activation)  # pyright: ignore
        return replace(self, basis=basis, backend=backend, alone=self)

    def curved(self, h: Equations) -> "Prepared":
        """The same with nonlinear equations beside A z = b."""
        return replace(self, backend=Torch(), alone=self, h=h)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.alone is not None and self.G is self.h is None:
            return attrgetter("bounded"), (self.alone,)
        return partial(prepare, G=self.G, h=self.h), (self.A, self.activation)


@final
@dataclass(frozen=True, eq=False)
class Unprepared:
    """σ and the way A is held, where A itself cannot be looked at: under a transform."""

    activation: Activation
    map: LinearMap
    equations: int | None = None  # how many rows are A's, where there are inequalities or bounds
    h: Equations | None = None
    finite: bool = False
    backend: Backend = field(default_factory=Torch)
    unsaid: ClassVar[frozenset[str]] = frozenset()

    pull_stably: ClassVar[Callable[..., Pulled]] = staticmethod(pull_stably)

    @cached_property
    def line(self) -> bool:
        """Is σ a line?"""
        return is_line(self.activation)

    def reach(self) -> None:
        raise RuntimeError("A cannot be looked at here.")

    def basis_of(self, A: LinearMap) -> Basis:
        if self.equations is not None:
            return _kinked_basis(A)
        return _basis(A, aloud=False)  # for derivatives: the solve has warned

    def basis_in(self, dtype: torch.dtype) -> Basis:
        raise RuntimeError("A cannot be looked at here.")

    def take(self, index: Tensor) -> "Unprepared":
        return replace(self, map=self.map.take(index))

    def joined(self, A: LinearMap, mapped: bool, times: int) -> "Unprepared":
        return self.anew(A) if mapped else self

    def anew(self, A: LinearMap) -> "Unprepared":
        """For another A."""
        return replace(self, map=A)

    def prepared(self, A: LinearMap) -> Prepared:
        """Now that A can be looked at."""
        if self.h is not None:
            return _prepared(A.data, self.activation, A).curved(self.h)
        if self.equations is None:
            return _prepared(A.data, self.activation, A)
        equations = A.only(torch.arange(self.equations, device=A.data.device))
        alone = _prepared(equations.data, self.activation, equations)
        return _kinked(alone, A, None)


def prepare(
    A: Float[Tensor, "*batch I K"] | Numbers | None = None,
    activation: str | Activation = "linear",
    *,
    G: Float[Tensor, "*G_batch M K"] | Numbers | None = None,
    h: Equations | None = None,
) -> Prepared:
    """Look at A, G and σ once, for many calls of `project`; h, nonlinear equations, goes with them.

    A and G are copied: what is written to them later does not count.

    >>> prepare(torch.ones(2, 3), "sigmoid").basis.condition
    tensor(1., dtype=torch.float64)
    """
    check_followed()
    if A is None and G is None and h is None:
        raise ValueError("there is nothing to prepare: pass A, G, h, or several of them.")
    chosen = resolve(activation)
    if h is not None:
        check_h(h, G is not None)
        # Without A, how many outputs there are is known when v comes.
        alone = torch.zeros(0, width(chosen) or 1) if A is None else _fixed(A, "A")
        return examined_copy(alone, None, chosen).curved(h)
    if G is None:
        return examined_copy(_fixed(A, "A"), None, chosen)
    rows = _fixed(G, "G")
    equations = rows.new_zeros(0, rows.shape[-1]) if A is None else _fixed(A, "A")
    return examined_copy(equations, rows, chosen)


def _fixed(A: Any, name: str) -> Tensor:
    """A matrix that may be prepared."""
    A = as_floating(name, A, torch.get_default_dtype())
    check_matrix(A, None, name)
    if A.requires_grad:
        raise ValueError(
            f"{name} requires a gradient, and a Prepared gives it none. Pass {name} itself to "
            f"project, or use taut.Projection, whose {name} may be learned; or prepare "
            f"{name}.detach()."
        )
    return A


def examined_copy(A: Tensor, G: Tensor | None, activation: Activation) -> Prepared:
    """`examined`, of copies: a write to `A.data`, or through NumPy, leaves no trace in A.

    What is found in inference mode serves training too.
    """
    with outside_inference():
        A = A.detach().clone()
        if G is None:
            return examined(A, activation)
        return examined_with(A, G.detach().clone(), activation)


def examined_with(A: Tensor, G: Tensor, activation: Activation) -> Prepared:
    """`examined`, for A with inequalities."""
    alone, G = examined(A, activation), _plain(G)
    return _kinked(alone, stacked(alone.A, G), G)


def _kinked(alone: Prepared, C: LinearMap, G: Tensor | None) -> Prepared:
    finite = bool(C.data.isfinite().all())
    basis = _kinked_basis(C)
    backend: Backend = Torch()
    if finite:
        backend = backend_within(basis, alone, alone.activation)  # pyright: ignore
    return Prepared(alone.A, alone.activation, C, basis, backend, finite, G, alone)


def _kinked_basis(C: LinearMap) -> Basis:
    """All rows, as they are: which of them are active is another matter in each sample.

    Any of them are conditioned as well as all of them.
    """
    data = C.data.detach()
    number = data.where(data.isfinite(), 0).to(wide(data))
    if C.sparse:
        return unexamined(C.over(number))
    basis = analyse(number, 0.0, aloud=False)
    if basis.left_out is None and not basis.transformed:
        return basis
    return unexamined(C.over(number))


def _plain(A: Tensor) -> Tensor:
    """Detached, and fit to be saved for a backward pass."""
    return A.detach().clone() if A.is_inference() else A.detach()


def examined(A: Tensor, activation: Activation) -> Prepared:
    """`prepare`, whether A requires a gradient or not."""
    A = _plain(A)
    flat = A if A.ndim < 4 else A.flatten(0, -3)
    return _prepared(A, activation, as_map(flat))


def _prepared(A: Tensor, activation: Activation, flat: LinearMap) -> Prepared:
    outputs = width(activation)
    if outputs is not None and outputs != flat.shape[1]:
        raise ValueError(
            f"the activation {activation.name!r} has parameters for {outputs} outputs, "
            f"but A has K = {flat.shape[1]} columns; got A {tuple(A.shape)}."
        )
    finite = bool(flat.data.isfinite().all())
    basis = _basis(flat)
    backend = backend_for(basis, activation) if finite else Torch()
    return Prepared(A, activation, flat, basis, backend, finite)


def _basis(A: LinearMap, aloud: bool = True) -> Basis:
    """What there is to know of A, in float64 where the device has it."""
    data = A.data.detach()
    number, eps = data.where(data.isfinite(), 0).to(wide(data)), torch.finfo(data.dtype).eps
    return sift(A.over(number), eps, aloud) if A.sparse else analyse(number, eps, aloud)
