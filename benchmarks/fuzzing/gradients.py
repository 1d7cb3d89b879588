"""Gradients and Hessian-vector products of some samples, against ball arithmetic.

A sample is well-posed where changes of 2^-52 in its slopes, gradients and A move the true answer by
less than 1e-10 of its largest entry. There ∂v, ∂b, ∂A and the Hessian times a direction must be
right to 1e-8 of their largest entry, elsewhere to ten times what such changes do.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from flint import arb, arb_mat
from numpy.typing import NDArray
from torch import Tensor

import taut
from fuzzing.blocks import Block
from fuzzing.laws import Law, Rng
from fuzzing.precise import Gradients, Precise, activate, column, independent, matrix
from taut import Status
from taut.pose import pose

Array = NDArray[np.floating]

RIGHT, POSED, TIMES = 1e-8, 1e-10, 10.0
_NOTHING = 1e-2  # where 2^-52 has a larger effect, nothing is determined
_LEAST = 1e-250  # below, products of slopes underflow
# Numbers of a dtype that are compared; and the slopes with which, for first and second derivatives,
# nothing on the way leaves its range.
_RANGE = {np.float64: (_LEAST, 1e250), np.float32: (1e-30, 1e30)}
_SLOPES = {np.float64: (1e-280, 1e-90), np.float32: (1e-280, 1e-10)}
_LARGEST = 400  # I·K up to which a sample is looked at: a hundredth of a second
_LEAST_OF, _MOST_OF = 12, 48  # samples of a block: one of 16, but so many


@dataclass(frozen=True)
class Case:
    """One sample at the λ and u returned, what is asked of it, and the direction of its Hessian."""

    law: Law
    A: Array
    multipliers: Array
    u: Array
    g: tuple[Array, Array, Array]  # of z, λ and u
    direction: tuple[Array, Array, Array]  # of v, b and A
    kept: tuple[int, ...]
    exact: bool  # is A given exactly, as whole numbers are?
    fixed: Array | None = None  # outputs at a bound, NaN elsewhere: they do not move with u

    def truth(self) -> tuple[Gradients, Gradients, float] | None:
        """The gradients, the Hessian times the direction, and how changes of 2^-52 move them."""
        found = activate(self.law, self.u)
        if found is None:
            return None
        z, w, bend = found
        if self.fixed is not None:
            free = np.isnan(self.fixed)
            w, bend = (
                column([x * int(f) for x, f in zip(y.entries(), free, strict=True)])
                for y in (w, bend)
            )
            pairs = zip(z.entries(), self.fixed, free, strict=True)
            z = column([x if f else arb(float(end)) for x, end, f in pairs])
        sample = Precise(matrix(self.A), column(self.multipliers), z, w, bend, self.kept)
        try:
            first, second = self._answers(sample, np.random.default_rng(0), 0.0)
            if not all(np.isfinite(x).all() for y in (first, second) for x in y.named().values()):
                return None  # beyond the numbers there are
            effect = 0.0
            for trial in range(5):
                rng = np.random.default_rng(trial)
                moved = self._answers(_blurred(sample, rng, self.exact), rng, 2.0**-52)
                for one, other in zip((first, second), moved, strict=True):
                    gaps = distance(one, other).values()
                    effect = max(effect, *gaps)
        except ZeroDivisionError:  # slopes that have underflowed leave H singular
            return None
        return first, second, effect

    def _answers(self, sample: Precise, rng: Rng, size: float) -> tuple[Gradients, Gradients]:
        g = [
            column(
                [
                    x * (1 + size * e)
                    for x, e in zip(column(g).entries(), _signs(rng, len(g)), strict=True)
                ]
            )
            for g in self.g
        ]
        dv, db, dA = self.direction
        second = sample.hessian_product(*g, column(dv), column(db), matrix(dA))
        return sample.gradients(*g), second


def _signs(rng: Rng, n: int) -> list[arb]:
    return [arb(x) for x in rng.choice([-1, 1], size=n) * rng.uniform(0.5, 1, size=n)]


def _blurred(sample: Precise, rng: Rng, exact: bool) -> Precise:
    def blur(x: arb_mat) -> arb_mat:
        signs = _signs(rng, x.nrows() * x.ncols())
        moved = [y * (1 + arb(2.0) ** -52 * e) for y, e in zip(x.entries(), signs, strict=True)]
        return arb_mat(x.nrows(), x.ncols(), moved)

    A = sample.A if exact else blur(sample.A)
    return replace(sample, A=A, w=blur(sample.w), bend=blur(sample.bend))


def distance(one: Gradients, other: Gradients) -> dict[str, float]:
    """The largest difference of each, of its largest entry; of that of all three if it is 0."""
    sizes = {name: np.abs(x).max(initial=0.0) for name, x in one.named().items()}
    found = {}
    for name, x in one.named().items():
        size = sizes[name] if sizes[name] > _LEAST else max(_LEAST, *sizes.values())
        found[name] = float(np.abs(x - other.named()[name]).max(initial=0.0) / size)
    return found


def allowed(effect: float, eps: float) -> float:
    """What may be wrong where changes of 2^-52 have this effect, for answers rounded to `eps`."""
    if effect > _NOTHING:
        return np.inf
    return max(RIGHT, TIMES * effect) + (4 * eps if eps > RIGHT else 0.0)


@dataclass(frozen=True)
class Asked:
    """What is asked of n samples, each with its A: gradients that come in, and directions."""

    g: tuple[Tensor, Tensor, Tensor]  # of z, λ and u
    direction: tuple[Tensor, Tensor, Tensor]  # of v, A and b

    @classmethod
    def draw(cls, rng: Rng, A: Array, dtype: type) -> "Asked":
        """Gradients of all kinds: of z, u or λ alone, of one output, nearly along the equations."""
        n, I, K = A.shape
        kind = rng.integers(7, size=(n, 1))
        g_z, g_u, g_λ = rng.normal(size=(n, K)), rng.normal(size=(n, K)), rng.normal(size=(n, I))
        one = np.eye(K)[rng.integers(K, size=n)]
        along = np.matmul(A.mT.astype(np.float64), rng.normal(size=(n, I, 1)))[..., 0]
        size = np.abs(along).max(1, keepdims=True)
        along = along / np.where(size > 0, size, 1) + 10.0 ** rng.uniform(-6, 0) * g_z
        g_z = np.select(
            [kind == 1, kind == 2, (kind == 3) | (kind == 4)], [one, along, 0 * g_z], g_z
        )
        g_u = np.where((kind == 3) | (kind == 5), g_u, 0)
        g_λ = np.where((kind == 4) | (kind == 5), g_λ, 0)
        direction = rng.normal(size=(n, K)), rng.normal(size=A.shape), rng.normal(size=(n, I))
        parts = [torch.from_numpy(x.astype(dtype)) for x in (g_z, g_λ, g_u, *direction)]
        return cls(tuple(parts[:3]), tuple(parts[3:]))


def differentiate(
    solve: Any, leaves: list[Tensor], asked: Asked
) -> tuple[taut.Solution, dict[str, Tensor], dict[str, Tensor]]:
    """The solution of v, A and b, its gradients, and its Hessian times the direction."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    solution = solve(*leaves)
    found = solution.z, solution.multipliers, solution.u
    loss = sum((x * g).sum() for x, g in zip(found, asked.g, strict=True))
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    along = sum((x * d).sum() for x, d in zip(first, asked.direction, strict=True))
    second = torch.autograd.grad(along, leaves, allow_unused=True)
    second = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, second, strict=True)]
    names = "∂v", "∂A", "∂b"
    first = [x.detach() for x in first]
    return solution, dict(zip(names, first, strict=True)), dict(zip(names, second, strict=True))


def gradients_of(parts: dict[str, Tensor], row: int) -> Gradients:
    """∂v, ∂b and ∂A of one sample; what is not among the parts is NaN."""
    v, b, A = (
        parts[name][row].double().numpy() if name in parts else np.array(np.nan)
        for name in ("∂v", "∂b", "∂A")
    )
    return Gradients(v[:, None], b[:, None], A)


def case_of(law: Law, A: Array, solution: taut.Solution, asked: Asked, row: int) -> Case:
    """A sample, at the λ and u of its solution."""
    A = A.astype(np.float64)
    at = [x[row].detach().double().numpy() for x in (solution.multipliers, solution.u)]
    g = tuple(x[row].double().numpy() for x in asked.g)
    dv, dA, db = (x[row].double().numpy() for x in asked.direction)
    exact = bool((A == np.round(A)).all())
    return Case(law, A, *at, g, (dv, db, dA), independent(A), exact)


def check_gradients(block: Block) -> tuple[list[tuple[int, str]], Counter[str]]:
    """Failures as (row, check), and how many samples were looked at."""
    counts: Counter[str] = Counter()
    n, (I, K) = len(block), block.A.shape[1:]
    if I == 0 or I * K > _LARGEST:
        return [], counts
    rng = np.random.default_rng([block.seed, block.number, 3])
    rows = np.sort(rng.permutation(n)[: min(max(_LEAST_OF, n // 16), _MOST_OF)])
    A = np.ascontiguousarray(block.A[rows] if len(block.A) == n else block.A.repeat(len(rows), 0))
    init = None if block.init is None else torch.from_numpy(block.init[rows].copy())
    asked = Asked.draw(rng, np.nan_to_num(A, posinf=0, neginf=0), block.dtype)

    def solve(v: Tensor, A: Tensor, b: Tensor) -> taut.Solution:
        return block.project({"v": v, "A": A, "b": b, "init": init})

    leaves = [torch.from_numpy(x) for x in (block.v[rows], A, block.b[rows])]
    solution, first, second = differentiate(solve, leaves, asked)
    found = [("", first), ("Hessian times a direction: ", second)]
    found += [("compiled: ", kernel) for kernel in _compiled(block, A, solution, asked)]
    failures = []
    for place in (solution.status == int(Status.CONVERGED)).nonzero().flatten().tolist():
        case = case_of(block.law, A[place], solution, asked, place)
        about, wrong = _judge(block, case, solution, place, found)
        counts["gradients " + about] += 1
        failures += [(int(rows[place]), text) for text in wrong]
    return failures, counts


def _judge(
    block: Block, case: Case, solution: taut.Solution, place: int, found: list
) -> tuple[str, list[str]]:
    """Was a sample compared, and which of its derivatives are wrong?"""
    redundant = solution._problem.prepared.basis.left_out
    kept = len(case.A) if redundant is None else len(case.A) - int(redundant[place].sum())
    if kept != len(case.kept):
        return "not compared: equations redundant to rounding only", []
    slopes = np.abs(block.law.slope(case.u.astype(np.longdouble)))
    least, enough = _SLOPES[block.dtype]
    truth = case.truth() if slopes.min() > least * max(1.0, slopes.max()) else None
    if truth is None:
        return "not compared: slopes underflow", []
    first, second, effect = truth
    low, high = _RANGE[block.dtype]
    wrong, long = [], max(np.abs(x).max() for x in case.direction)
    for name, parts in found:
        again = name.startswith("Hessian")
        if again and slopes.min() < enough:
            continue
        true = second if again else first
        if max(np.abs(x).max() for x in true.named().values()) >= high:
            continue  # what leaves the dtype takes the others with it
        # A second derivative in float32 is made of first ones rounded to float32.
        most = allowed(effect * (block.eps / 2.0**-52 if again else 1.0), block.eps)
        for what, gap in distance(true, gradients_of(parts, place)).items():
            size = terms = np.abs(true.named()[what]).max()
            if again and block.eps > 2.0**-52:  # they may cancel
                terms = max(size, long * np.abs(first.named()[what]).max())
            if low < size and what in parts and not gap * size <= most * terms:
                wrong.append(f"{name}{what} is that of ball arithmetic")
    return "compared" + ("" if effect < POSED else ", not well-posed"), wrong


def _compiled(block: Block, A: Array, solution: taut.Solution, asked: Asked) -> list[dict]:
    """∂v and ∂b of the compiled backend at the same λ and u, where all samples share A."""
    if len(block.A) != 1:
        return []
    prepared = block.prepare()
    problem, _ = pose(
        prepared, solution.z.detach(), None, torch.from_numpy(block.b[0].copy()), None
    )
    prepared.backend.attempt(problem, taut.Newton().rules)  # which makes the plan
    found = prepared.backend.pullback(solution.u.detach(), solution.status, asked.g)
    if found is None or found[2]:
        return []
    dv, db, _ = found
    return [{"∂v": dv, "∂b": db}]
