"""Neighbours, positions and gradients: what one sample may not do to another.

A block is solved again with one sample ruined. Where the kernel solved all other samples, every
bit of their z and gradients must be what it was; elsewhere a BLAS may sum another batch in another
order, and they must be the same to rounding. A few samples are solved alone, and must come out the
same to rounding.
"""

import numpy as np
import torch
from torch import Tensor

import taut
from fuzzing.blocks import Block
from taut import Solution, Status
from taut.pose import pose

_LARGEST = 400_000  # entries of A (or of the batch) up to which a block is solved again
_DIGITS = {torch.float64: 1e-13, torch.float32: 1e-5}


def check_bits(block: Block) -> list[tuple[int, str]]:
    """Failures as (row, check)."""
    if block.A.size + block.v.size > _LARGEST:
        return []
    rng = np.random.default_rng([block.seed, block.number, 2])
    weights = torch.from_numpy(rng.normal(size=block.v.shape).astype(block.dtype))
    solution, before = _differentiate(block, block.tensors(), weights)
    failures, complete = _gradients(before), _compiled(block)
    victim = int(rng.integers(len(block)))
    for name, ruined in _ruins(block, victim):
        _, after = _differentiate(block, ruined, weights)
        for what in after.keys() & before.keys() - {"multipliers"}:
            size = _terms(block, solution, weights) if what == "∂v" else 0.0
            changed = _changes(block, solution, complete, before, after, what, size)
            changed[victim] = False
            text = f"{what} of a sample is the same when a neighbour has {name}"
            failures += [(int(r), text) for r in changed.nonzero().flatten()[:3]]
    return failures + _alone(block, before, rng)


def _changes(
    block: Block,
    solution: Solution,
    complete: bool,
    before: dict,
    after: dict,
    what: str,
    size: Tensor | float = 0.0,
) -> Tensor:
    """Samples of which `what`, a sum of terms of that size, is not what it was."""
    x, y = (found[what].reshape(len(block), -1) for found in (before, after))
    if not x.shape[1]:  # b, of no equations
        return torch.zeros(len(block), dtype=torch.bool)
    if what == "status" and not complete:
        return _another_verdict(block, torch.arange(len(block)), before, after)
    if complete:
        return ~((x == y) | (x.isnan() & y.isnan())).all(1)
    converged = (before["status"] == 0) & (after["status"] == 0)
    if what == "z":
        rows = (converged & (x != y).any(1)).nonzero().flatten()
        most = _apart(block, solution.z[rows], solution.u[rows], solution.condition[rows], rows)
        far = ((x - y)[rows].abs() > most).any(1)
        return torch.zeros_like(converged).index_fill(0, rows[far], True)
    # The solve for λ magnifies rounding by κ, the condition number of A diag(w) Aᵀ, and so
    # does the solve for derivatives, at slopes that λ has moved: by the rounding of u, and by
    # as much of u as A z, rounded, does not tell. Beyond 1e-2 nothing is said.
    condition, untold = _condition(block, solution)
    most = _DIGITS[torch.float64] * condition.square() * (1 + solution.u.abs().amax(-1))
    most = most + 4 * condition * untold / np.abs(block.law.temperature).min()
    most = most.where(most < 1e-2, torch.inf) + torch.finfo(x.dtype).eps
    most = most * (x.abs().amax(1) + size)
    return converged & ((x - y).abs().amax(1) > most.detach())


def _terms(block: Block, solution: Solution, weights: Tensor) -> Tensor:
    """∂v = w∘(g − Aᵀs) is a difference; nothing is left of it where I outputs alone can move."""
    return (block.law.activation.slope(solution.u.detach()) * weights.abs()).amax(-1)


def _compiled(block: Block) -> bool:
    """Does the compiled backend solve every sample of the block?"""
    tensors = block.tensors()
    prepared = block.prepare()
    problem, _ = pose(prepared, tensors["v"], None, tensors["b"], tensors["init"])
    return prepared.backend.attempt(problem, taut.Newton().rules).failed == 0


def _another_verdict(block: Block, rows: Tensor, before: dict, after: dict) -> Tensor:
    """Which samples have a verdict that rounding does not explain.

    It may leave a sample undecided; or say of a b that contradicts redundant equations by rounding
    only that it does or does not; or find a b at the very edge solved by the rule, and with other
    sums prove it to be beyond. It never makes any other verdict another.
    """
    one, other = before["status"], after["status"]
    either = torch.tensor([int(Status.CONVERGED), int(Status.INCONSISTENT)])
    threshold = torch.isin(one, either) & torch.isin(other, either)
    undecided = int(Status.MAX_ITERATIONS)
    changed = (one != other) & (one != undecided) & (other != undecided) & ~threshold
    edge = changed & ((one == Status.CONVERGED) | (other == Status.CONVERGED))
    for found in (before, after):
        index = (edge & (found["status"] == Status.INFEASIBLE)).nonzero().flatten()
        if not len(index):
            continue
        A, b = (torch.from_numpy(x) for x in (block.A, block.b))
        A = A[0] if block.shared else A[rows[index]]
        given = found["multipliers"][index], A, b[rows[index]], block.law.activation
        changed[index] = ~taut.is_certificate(*given)
    return changed


def _condition(block: Block, solution: Solution) -> tuple[Tensor, Tensor]:
    """κ of H = A diag(σ'(u)) Aᵀ with rows scaled to length 1; inf where it cannot be told.

    And how far u moves with the rounding r of A z: by Aᵀ H⁻¹ r, at most.
    """
    A = torch.from_numpy(block.A).double()
    w = block.law.activation.slope(solution.u.detach().double())
    gram = (A * w.unsqueeze(-2)) @ A.mT
    scale = gram.diagonal(dim1=-2, dim2=-1).rsqrt()
    unit = (gram * scale.unsqueeze(-1) * scale.unsqueeze(-2)).nan_to_num(0.0, 0.0, 0.0)
    values = torch.linalg.eigvalsh(unit) if unit.shape[-1] else unit.new_ones(len(unit), 1)
    condition = values[:, -1] / values[:, 0].clamp_min(1e-300)
    size = torch.from_numpy(block.b).double().abs()
    size = size + (A.abs() @ solution.z.detach().double().abs().unsqueeze(-1)).squeeze(-1)
    rounding = (8 * 2.0**-52 * scale * size).unsqueeze(-1)
    moves = scale.unsqueeze(-1) * (torch.linalg.pinv(unit).abs() @ rounding)
    untold = (A.abs().mT @ moves).squeeze(-1).amax(-1).nan_to_num(torch.inf)
    return condition.clamp_min(1), untold


def _spread(block: Block, z: Tensor, u: Tensor, rows: Tensor) -> Tensor:
    """How far apart two z of a problem can be that satisfy it to rounding, each entry.

    That is |A z − b| within 32 units of what is rounded in it, or 4 in float32; a change r of it
    moves z by diag(w) Aᵀ H⁻¹r, and λ, rounded, moves u.
    """
    eps, units = torch.finfo(z.dtype).eps, 8 if z.dtype == torch.float32 else 64
    A, b, v = (torch.from_numpy(x).double() for x in (block.A, block.b, block.v))
    A, b, v = A if block.shared else A[rows], b[rows], v[rows]
    z, u = z.detach().double(), u.detach().double()
    w = block.law.activation.slope(u)
    rounded = z.abs() + (w * (u.abs() + v.abs())).nan_to_num(0.0)
    r = units * eps * (b.abs() + (A.abs() @ rounded.unsqueeze(-1)).squeeze(-1))
    root = w.clamp_min(0).sqrt().unsqueeze(-2)  # diag(w) Aᵀ H⁻¹ is √w times the inverse of A √w
    weighted = A * root
    scale = weighted.norm(dim=-1).clamp_min(1e-300).reciprocal()
    weighted = weighted * scale.unsqueeze(-1)
    finite = weighted.isfinite().flatten(1).all(1) & r.isfinite().all(1)
    gain = root.mT * torch.linalg.pinv(weighted.nan_to_num(0.0, 0.0, 0.0))
    most = (gain.abs() @ (scale * r).unsqueeze(-1)).squeeze(-1) + 4 * eps * rounded
    return most.where(finite.unsqueeze(-1), torch.inf)


def _apart(block: Block, z: Tensor, u: Tensor, condition: Tensor, rows: Tensor) -> Tensor:
    """How far apart two z of a problem may be, each entry.

    Where z only tends to an end, it has come as far as the rule asks, and no slope is that of both:
    then it is the same to rounding of z and of u = v + Aᵀλ, times the condition of A.
    """
    v = torch.from_numpy(block.v)[rows]
    size = (1 + z.abs().amax(-1)) * (1 + u.abs().amax(-1) + v.abs().amax(-1))
    size = _DIGITS[z.dtype] * size * condition.nan_to_num(nan=1.0).clamp(min=1)
    return torch.maximum(_spread(block, z, u, rows), size.detach().unsqueeze(-1))


def _ruins(block: Block, victim: int) -> list[tuple[str, dict[str, Tensor | None]]]:
    """The block with one sample spoilt, in several ways."""
    ways = [("NaN in v", "v", float("nan"))]
    if block.A.shape[1]:
        ways += [("inf in b", "b", float("inf")), ("a b out of reach", "b", 1e6)]
        if not block.shared:
            ways += [("NaN in A", "A", float("nan")), ("an A of zeros", "A", 0.0)]
    ruins = []
    for name, place, value in ways:
        tensors = block.tensors()
        tensors[place][victim] = value
        ruins.append((name, tensors))
    return ruins


def _differentiate(block: Block, tensors: dict, weights: Tensor) -> tuple[Solution, dict]:
    leaves = [k for k in ("v", "b", "A") if k != "A" or not block.shared]
    for k in leaves:
        tensors[k].requires_grad_()
    solution = block.project(tensors)
    usable = solution.converged.unsqueeze(-1)
    loss = torch.where(usable, solution.z * weights, torch.zeros_like(weights)).sum()
    gradients = torch.autograd.grad(loss, [tensors[k] for k in leaves], allow_unused=True)
    result = {"z": solution.z, "multipliers": solution.multipliers, "status": solution.status}
    result |= {f"∂{k}": g for k, g in zip(leaves, gradients, strict=True) if g is not None}
    return solution, {k: x.detach() for k, x in result.items()}


def _gradients(result: dict[str, Tensor]) -> list[tuple[int, str]]:
    failures = []
    failed = result["status"] != int(Status.CONVERGED)
    # Where z is astronomical its derivatives, products of several such numbers, may overflow.
    huge = result["z"].abs().amax(-1) > 1e15
    for what in ("∂v", "∂b", "∂A"):
        if what in result:
            flat = result[what].flatten(1)
            wild = ~flat.isfinite().all(1) & ~huge
            rows = wild.nonzero().flatten()[:3]
            failures += [(int(r), f"{what} is finite") for r in rows]
            rows = (failed & (flat != 0).any(1) & ~wild).nonzero().flatten()[:3]
            failures += [(int(r), f"{what} of a failed sample is zero") for r in rows]
    return failures


def _alone(block: Block, batch: dict[str, Tensor], rng: np.random.Generator) -> list:
    """A sample alone is the sample in its batch: same verdict, same z to rounding."""
    failures = []
    for row in torch.from_numpy(rng.permutation(len(block))[:4]).split(1):
        single = block.project(block.one(int(row)))
        names = ("status", "multipliers", "z", "u", "condition")
        own = {name: getattr(single, name).unsqueeze(0) for name in names}
        here = {name: batch[name][row] for name in ("status", "multipliers", "z")}
        converged = (own["status"] == 0) & (here["status"] == 0)
        if bool(_another_verdict(block, row, own, here)):
            failures.append((int(row), "a sample alone has the verdict it has in the batch"))
        elif bool(converged):
            most = _apart(block, *(own[name] for name in ("z", "u", "condition")), row)
            if not ((own["z"] - here["z"]).abs() <= most).all():
                failures.append((int(row), "a sample alone has the z it has in the batch"))
    return failures
