"""What targets can show: that they break the constraints, or that z is not the nearest."""

import torch
from torch import Tensor

from taut.activations import Activation
from taut.matched import learnable
from taut.outcome import places, warn
from taut.pose import check_range
from taut.problems import Inequalities, Nonlinear, Problem
from taut.remarks import at_ends

_PLAIN = 1e-3  # of the size of its terms: so far from its side, a row of targets is plainly off
_FAINT = 1e-3  # of the largest output of a sample
_ROUNDING = 1e3  # units of rounding of its terms: by so much a loss must be below 0 to be so
_ONCE = " It will not be said again of these matrices."


def check_targets(y: Tensor, status: Tensor, activation: Activation) -> None:
    """Refuse targets out of range. Samples that fail have no loss, whatever their target."""
    inside = activation.sigma(torch.zeros_like(y))
    y = torch.where(learnable(status).unsqueeze(-1), y, inside)
    check_range("targets", y, activation)
    if bool(y.isinf().any()):  # at an open end of the range, but no number
        samples = places(y.isinf().any(-1))
        where = f" in sample {samples}" if samples else ""
        raise ValueError(f"targets must be finite; got {y[y.isinf()][0].item()}{where}.")


def look(problem: Problem, y: Tensor, status: Tensor | None, loss: Tensor) -> None:
    """Say once of these matrices what targets, and their losses, show."""
    unsaid = problem.prepared.unsaid
    if "targets" in unsaid:
        unsaid.discard("targets")
        _look_at_targets(problem, y, status)
    if isinstance(problem, Nonlinear):
        _look_at_loss(problem, y, loss)
    else:
        unsaid.clear()


def _look_at_targets(problem: Problem, y: Tensor, status: Tensor | None) -> None:
    """The first targets beside these matrices: do they plainly break the constraints?

    The loss differs from B(y‖z) by (b − A y)ᵀλ then, and has no lower bound. The later ones are not
    looked at, as that would cost a part of every training step.
    """
    with torch.no_grad():
        C, *sides = problem.sides
        lower, upper, *ends = (x.double() for x in sides)
        least, most = at_ends(problem, *ends)
        y, C = y.double(), C.over(C.data.double())
        found = torch.cat([C.apply(y), y], -1)
        # Outputs that are nothing beside the others of their sample have no digits of their own.
        terms = y.abs() + _FAINT * y.abs().amax(-1, keepdim=True)
        size = torch.cat([C.abs().apply(terms), terms], -1)
        low, high = torch.cat([lower, least], -1), torch.cat([upper, most], -1)
        side = torch.where(found < low, low, torch.where(found > high, high, found))
        off = (found - side).abs() > _PLAIN * size
        if status is not None:
            off = off & learnable(status).reshape(-1, 1)
    if not bool(off.any()):
        return
    if any(x.requires_grad for x in problem.inputs[1:]):
        warn(
            "a matrix or a side is learned, and targets do not satisfy the constraints that it "
            "makes. The matched loss has no lower bound then, and training may run away: take "
            f"another loss, as taut.bregman_loss(layer.solve(v, b).u, y, activation).{_ONCE}"
        )
    else:
        sample, row = off.nonzero()[0].tolist()
        numbers = found[sample, row].item(), side[sample, row].item()
        shape = off.shape[:1] if status is None else status.shape
        name = places(torch.arange(len(y), device=y.device).eq(sample).reshape(shape))
        warn(
            f"{int(off.any(-1).sum())} of {len(y)} targets do not satisfy the constraints: "
            f"{f'in sample {name}' if name else 'here'}, {_said(problem, sample, row, *numbers)}. "
            "Their matched loss has no lower bound, and training on it may run away. Let targets "
            "satisfy the constraints (taut.reconcile), or train with another loss, as "
            f"taut.bregman_loss(solution.u, y, activation).{_ONCE}"
        )


def _said(problem: Problem, sample: int, row: int, found: float, side: float) -> str:
    rows = problem.prepared.map.shape[0]
    equations = problem.equations if isinstance(problem, Inequalities) else rows
    if row < equations:
        return f"equation {row}, A y is {found:.6g} and b is {side:.6g}"
    if row < rows:
        return f"row {row - equations} of G, G y is {found:.6g} and its side {side:.6g}"
    held = problem.inputs[0][sample, row - rows].isinf()
    what = "v = ±inf holds it at" if bool(held) else "its bound"
    return f"output {row - rows}, y is {found:.6g} and {what} {side:.6g}"


def _look_at_loss(problem: Nonlinear, y: Tensor, loss: Tensor) -> None:
    """Is a loss below 0? Beside h it is ℓ = B(y‖σ(v)) − B(z‖σ(v))."""
    with torch.no_grad():
        v, activation = problem.v, problem.prepared.activation
        size = (activation.psi(y).abs() + (y * v).abs()).sum(-1)
        below = loss < -_ROUNDING * torch.finfo(loss.dtype).eps * size
    if bool(below.any()):
        problem.prepared.unsaid.discard("nearer")
        warn(
            f"the matched loss of {int(below.sum())} of {len(loss)} samples is below 0: their "
            "target is nearer to σ(v) than z is. If it satisfies the equations, z is not the "
            f"nearest point: start from the target, init=(activation.inverse(y), zeros).{_ONCE}"
        )
