"""What a projection returns, and what it says when it cannot."""

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, final

from jaxtyping import Bool, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from taut.dual import Dual
    from taut.kernel import Kernel


@final
class Status(IntEnum):
    """The verdict on one sample; `.message` says what happened and what to try.

    >>> Status.INFEASIBLE.message.split(":")[0]
    'no z in the range of the activation satisfies A z = b'
    """

    CONVERGED = 0
    MAX_ITERATIONS = 1
    INFEASIBLE = 2
    INCONSISTENT = 3
    NONFINITE = 4

    @classmethod
    def _missing_(cls, value: object) -> "Status | None":
        # Status(solution.status[3]) is what one writes first.
        return cls(value.item()) if isinstance(value, Tensor) and value.numel() == 1 else None

    @property
    def message(self) -> str:
        """What happened, and what to try."""
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
        "certificate (taut.is_certificate). Check b, or use an activation with a wider range, "
        "such as taut.activations.bounded or linear"
    ),
    Status.INCONSISTENT: (
        "redundant rows of A ask for different things: b is not in the span of A's columns. "
        "Make b consistent (b = A y for some y), or drop the redundant rows"
    ),
    Status.NONFINITE: (
        "v, A or b holds NaN or inf, or overflows in this dtype. Look upstream for the first "
        "non-finite value, or solve in float64"
    ),
}


@final
@dataclass(frozen=True, eq=False)
class Solution:
    """The result of `taut.project`: everything is measured at this very z.

    `z`, `multipliers` and `u` carry gradients to v, A and b. `residual` is max_i |A z − b|_i.
    `condition` estimates the condition number of A's rows, scaled to length 1 (NaN for sparse A):
    rounding moves z by about `condition`·eps, the multipliers by up to `condition`²·eps.

    >>> import torch, taut
    >>> v, A, b = torch.zeros(3), torch.ones(1, 3), torch.tensor([1.0])
    >>> solution = taut.project(v, A, b, activation="exp")
    >>> solution.z, solution.converged
    (tensor([0.3333, 0.3333, 0.3333]), tensor(True))
    """

    z: Float[Tensor, "*batch K"]
    multipliers: Float[Tensor, "*batch I"]
    u: Float[Tensor, "*batch K"]
    residual: Float[Tensor, "*batch"]
    iterations: Int[Tensor, "*batch"]
    status: Int[Tensor, "*batch"]
    condition: Float[Tensor, "*batch"]
    problem: "Dual"
    kernel: "Kernel | None" = None  # the compiled code, where it took part
    complete: bool = False  # is it known, without a look at `status`, that all have converged?

    @property
    def converged(self) -> Bool[Tensor, "*batch"]:
        """Which samples satisfy A z = b to tolerance."""
        return self.status == Status.CONVERGED

    def report(self) -> str:
        """In words: how many samples failed, which ones first, why, and what to try.

        >>> import torch, taut
        >>> v, A, b = torch.zeros(2, 3), torch.ones(1, 3), torch.tensor([[1.0], [4.0]])
        >>> solution = taut.project(v, A, b, activation="sigmoid", on_failure="return")
        >>> print(solution.report()[:50])
        1 of 2 samples could not be projected on A z = b.
        """
        return explain(self.status, self.residual, self.problem)

    def __repr__(self) -> str:
        counts = ", ".join(f"{n} {status.name}" for status, n in tally(self.status).items())
        worst = f"{self.residual.max().item():.1e}" if self.residual.numel() else "none"
        return f"Solution(z={tuple(self.z.shape)}, {counts or 'empty'}, residual ≤ {worst})"


def tally(status: Tensor) -> dict[Status, int]:
    """How many samples have each status, the frequent ones first.

    >>> import torch
    >>> tally(torch.tensor([0, 0, 2]))
    {<Status.CONVERGED: 0>: 2, <Status.INFEASIBLE: 2>: 1}
    """
    values, counts = status.unique(return_counts=True)
    pairs = sorted(zip(values.tolist(), counts.tolist(), strict=True), key=lambda p: -p[1])
    return {Status(value): count for value, count in pairs}


@final
class SolveError(RuntimeError):
    """Some samples did not converge; the message names them and says what to try.

    >>> import torch, taut
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
        self.residual = residual

    def __reduce__(self) -> tuple:
        return type(self), (self.args[0], self.status, self.residual)


def explain(status: Tensor, residual: Tensor, problem: "Dual", shown: int = 5) -> str:
    """The sentence of a SolveError: counts, the first samples of each kind, advice."""
    total = status.numel()
    failed = int((status != Status.CONVERGED).sum())
    if not failed:
        return f"All {total} samples satisfy A z = b."
    lines = [f"{failed} of {total} samples could not be projected on A z = b."]
    for verdict, count in tally(status).items():
        if verdict is Status.CONVERGED:
            continue
        where = (status == verdict).nonzero()[:shown]
        names = [str(i.item() if i.numel() == 1 else tuple(i.tolist())) for i in where]
        at = (
            f" (sample {', '.join(names)}{', …' if count > shown else ''})"
            if names[0] != "()"
            else ""
        )
        worst = residual[status == verdict].max().item()
        size = f"largest |A z − b| {worst:.1e}"
        lines.append(f"{count} {verdict.name}{at}, {size}: {verdict.message}.")
        if verdict is Status.NONFINITE:
            lines[-1] += _culprits(problem)
    return "\n".join(lines)


def _culprits(problem: "Dual") -> str:
    """Which of v, A and b hold what is not a number, and how often."""
    given = {"v": problem.v, "A": problem.A.data, "b": problem.b}
    bad = {name: int((~x.isfinite()).sum()) for name, x in given.items()}
    found = [f"{n} of the {given[name].numel()} entries of {name}" for name, n in bad.items() if n]
    return f" Not finite: {', '.join(found) or 'what they give; all entries are'}."
