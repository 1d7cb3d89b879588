"""Thin nn.Modules over `project`: the Lagrange units of the paper as layers."""

from collections.abc import Sequence
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from taut import compiled
from taut.accept import Numbers, as_floating, check_h, check_matrix
from taut.activations import Activation, resolve
from taut.autograd import (
    check_recorded,
    followed,
    recording,
    transforming,
    uncompiled,
    unseen,
)
from taut.losses import Reduction, matched_loss, reduced
from taut.maps import as_map
from taut.memory import LagrangeMemory
from taut.outcome import warn
from taut.pose import fitted, fitted_curved, fitted_sides
from taut.prepare import Prepared, Unprepared, examined_copy
from taut.problems.surface import Equations
from taut.projection import (
    Init,
    OnFailure,
    begin,
    check_settings,
    curved,
    known,
    known_with,
    pair,
    project,
    projected,
    projected_curved,
    projected_within,
)
from taut.solution import Solution
from taut.solvers import Newton, Solver
from taut.training import loss_at_once


@final
class Projection(nn.Module):
    """The last layer of a constrained network: v → z with A z = b, and lower ≤ G z ≤ upper.

    Without G, `lower` and `upper` bound z itself. `h` adds nonlinear equations h(z, *params) = 0,
    as in `taut.project`; `params` come with each call. Matrices and sides are buffers: they move
    with `.to()` and are in the `state_dict`. A matrix that is an `nn.Parameter` stays one, and is
    learned. Sides given to `forward` or `solve` go before those given here: None keeps the
    layer's, ±inf lifts it.

    >>> layer = Projection(torch.ones(1, 3), b=torch.ones(1), activation="exp")
    >>> layer(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[0.0900, 0.2447, 0.6652]])
    >>> layer(torch.tensor([[1.0, 2.0, 3.0]]), upper=0.5)
    tensor([[0.1345, 0.3655, 0.5000]])
    """

    A: Tensor | None
    b: Tensor | None
    G: Tensor | None
    lower: Tensor | None
    upper: Tensor | None

    def __init__(
        self,
        A: Float[Tensor, "*batch I K"] | Numbers | None = None,
        b: Float[Tensor, "*batch I"] | Numbers | None = None,
        *,
        G: Float[Tensor, "*G_batch M K"] | Numbers | None = None,
        lower: Float[Tensor, "..."] | Numbers | float | None = None,
        upper: Float[Tensor, "..."] | Numbers | float | None = None,
        h: Equations | None = None,
        activation: str | Activation = "linear",
        solver: Solver = Newton(),
        on_failure: OnFailure = "raise",
    ):
        super().__init__()
        check_settings(solver, on_failure)
        if h is not None:
            check_h(h, G is not None or lower is not None or upper is not None)
        self.h = h
        dtype, device = _own_dtype(A if A is not None else G), None
        given: dict[str, Any] = {"A": A, "G": G, "b": b, "lower": lower, "upper": upper}
        for name, x in given.items():
            if x is not None:
                x = _held(name, x, dtype, device)
                given[name], dtype, device = x, x.dtype, x.device
        for name, side in (("A", given["b"]), ("G", None)):
            if given[name] is not None:
                check_matrix(given[name], side, name)
        # Those that are None go last: torch.export counts the buffers of a module with them.
        for name in sorted(("A", "b", "G", "lower", "upper"), key=lambda x: given[x] is None):
            if isinstance(given[name], nn.Parameter):
                self.register_parameter(name, given[name])
            else:
                self.register_buffer(name, given[name])
        self.activation: Activation = resolve(activation)
        self.solver = solver
        self.on_failure: OnFailure = on_failure
        self._prepared: Prepared | None = None
        self._warned = False  # of samples that fail
        self._sparse = any(
            x is not None and x.layout is not torch.strided for x in (self.A, self.G)
        )

    def forward(
        self,
        v: Float[Tensor, "*batch K"],
        b: Float[Tensor, "*b_batch I"] | None = None,
        *,
        lower: Float[Tensor, "..."] | float | None = None,
        upper: Float[Tensor, "..."] | float | None = None,
        params: Sequence[Float[Tensor, "..."]] = (),
    ) -> Float[Tensor, "*batch K"]:
        """z alone. Where `on_failure` is "return", the first samples that fail are warned of."""
        solution = self.solve(v, b, lower=lower, upper=upper, params=params)
        if solution._outcome.failed > 0 and not self._warned:
            self._warned = True
            warn(
                f"this layer was told to return samples that fail, and has: {solution}. Use "
                "layer.solve(v, b) to see their status. It will not be said again."
            )
        return solution.z

    def solve(
        self,
        v: Float[Tensor, "*batch K"],
        b: Float[Tensor, "*b_batch I"] | None = None,
        init: Init = None,
        *,
        lower: Float[Tensor, "..."] | float | None = None,
        upper: Float[Tensor, "..."] | float | None = None,
        params: Sequence[Float[Tensor, "..."]] = (),
    ) -> Solution:
        """The whole `Solution`; `init` starts the multipliers, for example from a memory."""
        if torch.compiler.is_compiling() or recording():
            check_recorded()
            if self._sparse:  # which a compiler cannot even look at
                sides = {"lower": lower, "upper": upper, "params": params}
                return uncompiled(self.solve, compiled.SPARSE)(v, b, init, **sides)
            options = self._options(init, lower, upper, params)
            return project(v, self.A, self.b if b is None else b, **options)
        if self.h is not None or params:
            sided = lower is not None or upper is not None
            return self._solve_curved(v, b, init, params, sided)
        if init is not None and not isinstance(init, Tensor):
            init = begin(init)
        b, A = self.b if b is None else b, self.A
        # Asked of the buffers, as an attribute takes long to find: one that is not among them has
        # become a parameter.
        own = self._buffers
        free = own.get("G", own) is own.get("lower", own) is own.get("upper", own) is None
        if A is None or lower is not None or upper is not None or not free:
            lower = self.lower if lower is None else lower
            upper = self.upper if upper is None else upper
            given = fitted_sides(v, A, b, self.G, lower, upper, init)
            prepared = self._known(given.A, given.G, True)
            if given.G is None and isinstance(prepared, Prepared):
                prepared = prepared.bounded
            return projected_within(prepared, given, True, self.solver, self.on_failure)
        if b is None:
            raise ValueError(
                "this Projection has no b of its own: pass one, layer(v, b), or give it at "
                "construction, Projection(A, b)."
            )
        v, A, b, init = fitted(v, A, b, init)
        return projected(self._known(A), v, A, b, self.solver, init, self.on_failure)

    def loss(
        self,
        v: Float[Tensor, "*batch K"],
        y: Float[Tensor, "*batch K"] | Numbers,
        b: Float[Tensor, "*b_batch I"] | None = None,
        *,
        lower: Float[Tensor, "..."] | float | None = None,
        upper: Float[Tensor, "..."] | float | None = None,
        params: Sequence[Float[Tensor, "..."]] = (),
        memory: LagrangeMemory | None = None,
        index: Int[Tensor, "*batch"] | None = None,
        reduction: Reduction = "mean",
    ) -> Float[Tensor, "*rest"]:
        """A training step in one line: `solve`, `matched_loss`, and `store` in the memory.

        With a memory the solve starts from the multipliers of the samples at `index`, and what it
        finds is kept there; without one it starts from 0.

        >>> layer = Projection(torch.ones(1, 3), activation="exp")
        >>> memory, v = LagrangeMemory(10, 1), torch.zeros(2, 3, requires_grad=True)
        >>> y, index = torch.tensor([[0.0, 0.0, 1.0], [0.5, 0.5, 0.0]]), torch.tensor([7, 2])
        >>> layer.loss(v, y, y.sum(-1, keepdim=True), memory=memory, index=index).backward()
        >>> 2 * v.grad[0]  # z − y; the mean is over two samples
        tensor([ 0.3333,  0.3333, -0.6667])
        """
        known = memory is None or isinstance(memory, LagrangeMemory)
        if not known or (memory is None) != (index is None):
            raise _not_a_memory(memory, index)
        if self._sparse and followed():
            sides = {"lower": lower, "upper": upper, "params": params, "reduction": reduction}
            loss = uncompiled(self.loss, compiled.SPARSE)
            return loss(v, y, b, memory=memory, index=index, **sides)
        own = self._buffers
        free = own.get("G", own) is own.get("lower", own) is own.get("upper", own) is None
        if free and lower is None and upper is None and self.h is None and not params:
            given = v, self.A, self.b if b is None else b, y
            table = None if memory is None else memory.multipliers
            rows = None if memory is None or index is None else memory.rows(index)
            found = loss_at_once(self._known, self.solver, given, table, rows, reduction)
            if found is not None:
                return found
        init = None if memory is None or index is None else self._recalled(v, memory, index)
        if torch.compiler.is_compiling():
            options = self._options(init, lower, upper, params)
            found = compiled.loss(v, self.A, self.b if b is None else b, y, options)
            if found is not None:
                if memory is not None and index is not None:
                    memory.overwrite(index, found[1])
                return reduced(found[0], reduction)
        solution = self.solve(v, b, init, lower=lower, upper=upper, params=params)
        loss = matched_loss(solution, y, reduction)
        if memory is not None and index is not None:
            memory.store(index, solution)
        return loss

    def _recalled(self, v: Any, memory: LagrangeMemory, index: Any) -> Tensor | None:
        """Where to start the samples at `index`.

        Beside h nowhere: without their u, multipliers lead to other points and take more steps.
        """
        if self.h is not None:
            return None
        rows = sum(x.shape[-2] for x in (self.A, self.G) if x is not None)
        return memory.recalled(index, torch.as_tensor(v).shape[:-1], rows)

    def _options(self, init: Any, lower: Any, upper: Any, params: Any) -> dict[str, Any]:
        """What `project` is given beside v, A and b."""
        return {
            "G": self.G,
            "lower": self.lower if lower is None else lower,
            "upper": self.upper if upper is None else upper,
            "h": self.h,
            "params": params,
            "activation": self.activation,
            "solver": self.solver,
            "init": init,
            "on_failure": self.on_failure,
        }

    def _solve_curved(self, v: Tensor, b: Any, init: Any, params: Any, sided: bool) -> Solution:
        if self.h is None:
            raise ValueError(
                "params are what h takes after z, and this layer has no h: Projection(A, b, h=h)."
            )
        check_h(self.h, sided)
        given = fitted_curved(v, self.A, self.b if b is None else b, params, pair(init))
        known = curved(self._known(given.A), self.h)
        return projected_curved(known, given, True, self.solver, self.on_failure)

    def _known(
        self, A: Tensor, G: Tensor | None = None, sided: bool = False
    ) -> Prepared | Unprepared:
        """What is known of A and G: worked out once, and again when they were moved or changed."""
        before = self._prepared
        if transforming() and unseen(A, G):
            return known_with(A, G, self.activation) if sided else known(A, self.activation)
        if (
            before is None
            or before.activation is not self.activation
            or not _same(before.A, A)
            or (G is not None and (before.G is None or not _same(before.G, G)))
        ):
            before = self._prepared = examined_copy(A, G, self.activation)
        return before

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared": None}

    def extra_repr(self) -> str:
        given = {"A": self.A, "G": self.G}
        shapes = ", ".join(f"{k}={tuple(x.shape)}" for k, x in given.items() if x is not None)
        if self.h is not None:
            name = getattr(self.h, "__name__", type(self.h).__name__)
            shapes = f"{shapes}, h={name}" if shapes else f"h={name}"
        shapes = f"{shapes}, " if shapes else ""
        return f"{shapes}activation={self.activation.name!r}, solver={self.solver}"


def _not_a_memory(memory: object, index: object) -> TypeError:
    if memory is None:
        return TypeError("index says which samples of a memory these are: pass memory as well.")
    if index is None:
        return TypeError(
            "memory and index belong together: pass the samples of this batch as index."
        )
    return TypeError(f"memory must be a taut.LagrangeMemory; got {type(memory).__name__}.")


def _own_dtype(A: object) -> torch.dtype | None:
    """An array that is floating keeps its dtype; lists and integers get the default one."""
    return None if "float" in str(getattr(A, "dtype", "")) else torch.get_default_dtype()


def _same(known: Tensor, A: Tensor) -> bool:
    """Is A still what it was?"""
    if known.dtype is not A.dtype or known.device != A.device or known.layout is not A.layout:
        return False
    if A.layout is torch.strided:
        return torch.equal(known, A)
    before, now = as_map(known.detach()), as_map(A.detach())
    same = torch.equal(before.pattern.columns, now.pattern.columns)  # pyright: ignore
    same = same and torch.equal(before.pattern.rows, now.pattern.rows)  # pyright: ignore
    return same and torch.equal(before.data, now.data)


def _held(name: str, x: Any, dtype: Any, device: Any) -> Tensor:
    """A tensor as a layer holds it: its own copy, or the parameter that it learns."""
    floating = as_floating(name, x, dtype, device)
    if isinstance(x, nn.Parameter):
        # Half precision becomes float32, and is learned all the same.
        return x if floating is x else nn.Parameter(floating.detach(), x.requires_grad)
    if floating.requires_grad:
        raise ValueError(
            f"{name} requires a gradient, and a layer learns parameters only: give it "
            f"nn.Parameter({name}), or {name}.detach(), or pass {name} in each call to "
            "taut.project."
        )
    return floating.detach().clone()
