"""What became of the samples: verdicts with their messages, and the error that carries them."""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor


@final
class Status(IntEnum):
    """How the solve of a sample ended.

    >>> Status(2).name
    'INFEASIBLE'
    """

    CONVERGED = 0
    """A z = b holds to rounding. With h, also h(z) = 0, and no neighbour of z that satisfies the
    equations is as near to σ(v). That z is the nearest of all is not promised."""
    MAX_ITERATIONS = 1
    """Not decided."""
    INFEASIBLE = 2
    """No z in the range of the activation satisfies A z = b: proven."""
    INCONSISTENT = 3
    """Redundant equations contradict one another."""
    NONFINITE = 4
    """NaN or inf in v, A, b or params, an overflow, or h is not a number wherever it was tried."""
    STUCK = 5
    """With h: its violation has a minimum above 0 here. Probably there is no solution; no proof."""
    NOT_NEAREST = 6
    """With h: z satisfies the equations and is stationary, but a neighbour is as near or nearer."""

    @classmethod
    def _missing_(cls, value: object) -> "Status | None":
        # Status(solution.status[3]) is what one writes first.
        return cls(value.item()) if isinstance(value, Tensor) and value.numel() == 1 else None

    # Of the int that it is, torch.compile knows neither: a tensor of verdicts would never be equal.
    def __eq__(self, other: object) -> Any:
        return int(self) == other

    def __ne__(self, other: object) -> Any:
        return int(self) != other

    __hash__ = IntEnum.__hash__

    @property
    def message(self) -> str:
        """What happened, and what to try.

        >>> Status.CONVERGED.message
        'A z = b holds to rounding'
        """
        return _MESSAGES[self]


_MESSAGES = {
    Status.CONVERGED: "A z = b holds to rounding",
    Status.MAX_ITERATIONS: (
        "not decided within the iterations allowed: b may lie on the edge of what the activation "
        "can reach, or A may be ill-conditioned. Try taut.Newton(max_iterations=500), float64, "
        "or a start `init` from a nearby problem"
    ),
    Status.INFEASIBLE: (
        "no z in the range of the activation satisfies A z = b: the multipliers hold a "
        "certificate (taut.is_certificate). Check b, or use an activation with a wider range"
    ),
    Status.INCONSISTENT: (
        "redundant equations ask for different things: b is not in the span of A's columns. "
        "Make b consistent (b = A y for some y), or drop the redundant equations"
    ),
    Status.NONFINITE: (
        "what was given, or what it gives, is NaN or inf, or overflows in this dtype. Look "
        "upstream for the first non-finite value, or solve in float64"
    ),
    Status.STUCK: (
        "the violation has a minimum above 0 here, so probably no z near it satisfies A z = b; "
        "this is no proof. Check the equations and params, or start elsewhere: init=(u, "
        "multipliers) with u = activation.inverse(y) of a y that satisfies them"
    ),
    Status.NOT_NEAREST: (
        "z satisfies A z = b but is not the nearest such point, not even among its neighbours: a "
        "saddle, or one of several equally near, as at the centre of a sphere. It may be used as "
        "it is; it has no gradient. Move v a little, or start elsewhere with init"
    ),
}


@final
@dataclass(frozen=True, eq=False, slots=True)
class Outcome:
    """What a solver found for N samples. Status −1 is open: somebody else must decide."""

    z: Float[Tensor, "N K"]
    multipliers: Float[Tensor, "N I"]
    u: Float[Tensor, "N K"]
    residual: Float[Tensor, "N"]  # max_i |A z − b|_i
    iterations: Int[Tensor, "N"]
    status: Int[Tensor, "N"]
    failed: int  # how many samples have not converged
    held: bool = False  # are there outputs at an end, or a bound, with u = ±inf?

    @staticmethod
    def open(v: Float[Tensor, "N K"], equations: int) -> "Outcome":
        """Nothing is decided.

        >>> Outcome.open(torch.zeros(2, 3), 1).failed
        2
        """
        n = len(v)
        z, u, status = torch.zeros_like(v), torch.zeros_like(v), v.new_full((n,), -1).long()
        iterations = torch.zeros_like(status)
        return Outcome(z, v.new_zeros(n, equations), u, v.new_zeros(n), iterations, status, n)

    def left(self) -> Int[Tensor, "n"]:
        """The places of the samples that are open."""
        return (self.status < 0).nonzero().squeeze(-1)

    def copied(self) -> "Outcome":
        """z, λ and u in memory of their own; derivatives go through them."""
        found = self.z.clone(), self.multipliers.clone(), self.u.clone()
        counts = self.residual, self.iterations, self.status
        return Outcome(*found, *counts, self.failed, self.held)

    def take(self, index: Int[Tensor, "n"]) -> "Outcome":
        """The samples at `index`; how many of them have failed is not counted."""
        names = ("z", "multipliers", "u", "residual", "iterations", "status")
        return replace(self, **{name: getattr(self, name)[index] for name in names})

    def write(self, index: Int[Tensor, "n"], part: "Outcome") -> "Outcome":
        """With the samples of `part`, all that were open, at `index`; in place."""
        for name in ("z", "multipliers", "u", "residual", "iterations", "status"):
            getattr(self, name).index_copy_(0, index, getattr(part, name))
        return replace(self, failed=part.failed, held=self.held or part.held)


@final
class SolveError(RuntimeError):
    """Some samples did not converge; the message names them and says what to try.

    >>> import taut
    >>> A, b = torch.ones(1, 2), torch.tensor([3.0])
    >>> try:
    ...     taut.project(torch.zeros(2), A, b, activation="sigmoid")
    ... except taut.SolveError as error:
    ...     print(error.status)
    tensor(2)
    """

    def __init__(self, message: str, status: Tensor, residual: Tensor):
        super().__init__(message)
        self.status = status
        """That of the `Solution` which could not be returned."""
        self.residual = residual
        """That of the `Solution` which could not be returned."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.status, self.residual)


@final
class FailureWarning(UserWarning):
    """What was asked for was given, and may not be what was meant.

    Samples that have no solution are left out of a loss, or targets break the constraints.

    >>> issubclass(FailureWarning, UserWarning)
    True
    """


_BETWEEN = ("taut", "torch", "jaxtyping")


def warn(text: str, category: type[Warning] = FailureWarning) -> None:
    """Warn at the user's line: the nearest one that is neither ours nor of what is between."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__")).split(".")[0] in _BETWEEN:
        depth, frame = depth + 1, frame.f_back
    warnings.warn(text, category, stacklevel=depth)


#: What can be said of a verdict on the samples at these places, beside `Status.message`: sentences,
#: and of which sample each is; "{sample}" is where its name goes.
Remark = Callable[[Status, Tensor], dict[str, int]]


def failure(
    status: Tensor, residual: Tensor, remark: Remark, statement: str = "A z = b"
) -> SolveError:
    """The error to raise for these samples."""
    advice = (
        'Pass on_failure="return", to a layer when it is built, to get all samples with their '
        "status instead."
    )
    words = explain(status, residual, remark, statement)
    return SolveError(f"{words}\n{advice}", status, residual)


def tally(status: Tensor) -> dict[Status, int]:
    """How many samples have each status, the frequent ones first.

    >>> tally(torch.tensor([0, 0, 2]))
    {<Status.CONVERGED: 0>: 2, <Status.INFEASIBLE: 2>: 1}
    """
    values, counts = status.unique(return_counts=True)
    pairs = sorted(zip(values.tolist(), counts.tolist(), strict=True), key=lambda p: -p[1])
    return {Status(value): count for value, count in pairs}


def explain(
    status: Tensor,
    residual: Tensor,
    remark: Remark,
    statement: str = "A z = b",
    shown: int = 5,
) -> str:
    """In words: how many samples failed, the first ones of each kind, and advice."""
    total = status.numel()
    failed = int((status != Status.CONVERGED).sum())
    if not failed:
        return f"All {total} samples satisfy {statement}."
    lines = [f"{failed} of {total} samples could not be projected on {statement}."]
    for verdict, count in tally(status).items():
        if verdict is Status.CONVERGED:
            continue
        here = status == verdict
        names = places(here, shown)
        at = f" (sample {names})" if names else ""
        what = "|A z − b|" if statement == "A z = b" else "violation"
        size = f"largest {what} {residual[here].max().item():.1e}"
        message = verdict.message.replace("A z = b", statement)
        if statement == "the constraints":
            message = message.replace("Check b", "Check b and the sides")
        lines.append(
            f"{count} {verdict.name}{at}, {size}: {message}.{_told(here, verdict, remark)}"
        )
    return "\n".join(lines)


def _told(here: Tensor, verdict: Status, remark: Remark) -> str:
    said = remark(verdict, here.reshape(-1).nonzero().squeeze(-1))
    if not here.ndim:
        return "".join(said).replace("In sample {sample}", "Here")
    numbers = torch.arange(here.numel(), device=here.device).reshape(here.shape)
    names = (_name((numbers == place).nonzero()[0]) for place in said.values())
    return "".join(x.replace("{sample}", name) for x, name in zip(said, names, strict=True))


def places(which: Tensor, shown: int = 5) -> str:
    """The first samples of `which`, by index; nothing where there are no batch dimensions.

    >>> places(torch.tensor([True, False, True]))
    '0, 2'
    """
    if which.ndim == 0:
        return ""
    found = which.nonzero()
    names = [_name(i) for i in found[:shown]]
    return ", ".join(names) + (", …" if len(found) > shown else "")


def _name(index: Tensor) -> str:
    return str(index.item() if index.numel() == 1 else tuple(index.tolist()))
