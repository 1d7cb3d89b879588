"""What is said of samples that fail, beside their verdict: which rows clash, and what they ask."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from taut.certificate import rays, reach_of_proof
from taut.held import reach
from taut.maps import DenseMap, LinearMap
from taut.outcome import Outcome, Remark, Status
from taut.problems import Inequalities, Linear, Nonlinear, Problem

_FEW = 4  # rows that are named
_CASES = 5  # samples that are spoken of
_LOOKED_AT = 1000  # samples that failed, for such that are unlike
_CLEAR = 1e-9  # of what is asked and what is left: so much they must differ to be told
_BARELY = 2e-15  # the same for one row alone, where there is nothing else to tell
_ROOM = 2**22  # entries of an A that is taken apart to find equations that contradict
_WIDE = 1000  # outputs up to which what is left is worked out to the last
_FAR = 1e12  # of the sides: a z beyond it is not worth a word either
_FAINT = 1e-9  # of the largest part of a proof: not worth a word


def remarks(problem: Problem, outcome: Outcome) -> Remark:
    """What can be said of the verdict on samples: sentences on a few that seem unlike."""

    def remark(verdict: Status, sample: int) -> str:
        if verdict not in (Status.INFEASIBLE, Status.INCONSISTENT):
            return problem.remark(verdict, sample)
        if isinstance(problem, Nonlinear):  # proven of A z = b, whatever h is
            own = outcome.multipliers[:, : problem.b.shape[-1]]
            alone = remarks(problem.equations(), replace(outcome, multipliers=own))
            (more,) = alone(verdict, torch.tensor([sample], device=own.device))
            return more
        if not isinstance(problem, Linear | Inequalities):
            return problem.remark(verdict, sample)
        with torch.no_grad():
            one = problem.take(torch.tensor([sample], device=problem.v.device))
            rows, ν = _Rows.of(one), outcome.multipliers[sample].detach().double()
            if verdict is Status.INCONSISTENT:
                return _contradiction(rows.only_equations())
            return _clash(rows, ν) + _held(one) + _as_far_as(rows, ν)

    def told(verdict: Status, samples: Tensor) -> dict[str, int]:
        said: dict[str, int] = {}
        clash = verdict in (Status.INFEASIBLE, Status.INCONSISTENT)
        if isinstance(problem, Nonlinear) and clash:
            proof = f": multipliers[…, :{problem.b.shape[-1]}] prove it"
            said[f" A z = b alone has none{proof if verdict is Status.INFEASIBLE else ''}."] = 0
        for sample in _unlike(problem, outcome, samples) if clash else samples[:1].tolist():
            said.setdefault(remark(verdict, sample), sample)
        return said

    return told


def _unlike(problem: Problem, outcome: Outcome, samples: Tensor) -> list[int]:
    """The first of each kind: by the row that is out of reach, or else that weighs most in the
    proof, on which side, and whether outputs are held.
    """
    rows, outputs = problem.prepared.map.shape
    own = 1 if problem.prepared.map.shared else rows * outputs
    samples = samples[: max(1, min(_LOOKED_AT, _ROOM // max(own, 1)))]
    ν = outcome.multipliers[samples].detach().nan_to_num()
    if not ν.shape[1]:
        return samples[:1].tolist()
    part = problem.take(samples)
    C, *sides = part.sides
    lower, upper, *ends = (x.detach().double() for x in sides)
    found = reach(C.over(C.data.detach().double()), *at_ends(part, *ends))
    beyond = (lower > found.most).long() - (upper < found.least).long()
    alone = (beyond != 0).any(-1, keepdim=True)
    row = torch.where(alone, beyond.abs(), ν.abs()).argmax(-1, keepdim=True)
    side = torch.where(alone, beyond, ν.sign()).gather(-1, row)
    held = problem.inputs[0][samples].isinf().any(-1, keepdim=True)
    kinds, which = torch.cat([row, side, alone, held], -1).unique(dim=0, return_inverse=True)
    first = samples.new_full((len(kinds),), len(samples))
    first = first.scatter_reduce(0, which, torch.arange(len(samples), device=which.device), "amin")
    return samples[first.sort().values[:_CASES]].tolist()


def at_ends(problem: Problem, least: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """Between what z may be: an infinite v holds its output at the end that it points to."""
    v = problem.inputs[0].detach()
    return torch.where(v == torch.inf, most, least), torch.where(v == -torch.inf, least, most)


@final
class _Rows(NamedTuple):
    """One sample: what is asked of each row and each output, and by whom."""

    C: LinearMap
    lower: Float[Tensor, "M"]
    upper: Float[Tensor, "M"]
    least: Float[Tensor, "K"]  # of z: range, bounds, and ends that v holds it at
    most: Float[Tensor, "K"]
    floor: Float[Tensor, "K"]  # the range alone
    ceiling: Float[Tensor, "K"]
    equations: int
    activation: str
    held: Bool[Tensor, "K"]  # by v = ±inf

    @staticmethod
    def of(problem: Linear | Inequalities) -> "_Rows":
        C, *sides = problem.sides
        lower, upper, least, most = (x.detach().double().squeeze(0) for x in sides)
        data = C.data.detach().double()
        C = DenseMap(data[0]) if not C.shared else C.over(data)
        v, activation = problem.v[0].detach().double(), problem.prepared.activation
        floor, ceiling = (x.expand_as(v) for x in activation.range.bounds(v))
        least, most = (x.squeeze(0) for x in at_ends(problem, least, most))
        count = problem.equations if isinstance(problem, Inequalities) else C.shape[0]
        ends = floor, ceiling, count, activation.name, v.isinf()
        return _Rows(C, lower, upper, least, most, *ends)

    def only(self, index: Tensor) -> "_Rows":
        """Some of the rows, dense."""
        chosen = torch.zeros(len(index), self.C.shape[0], dtype=torch.float64, device=index.device)
        chosen[torch.arange(len(index)), index] = 1
        C = DenseMap(self.C.adjoint(chosen))
        return self._replace(C=C, lower=self.lower[index], upper=self.upper[index])

    def only_equations(self) -> "_Rows":
        """Without the rows of G."""
        if self.equations == self.C.shape[0]:
            return self
        return self.only(torch.arange(self.equations, device=self.least.device))

    def names(self, index: Sequence[int]) -> list[str]:
        """Equations and rows of G, as users count them."""
        own = sorted(i for i in index if i < self.equations)
        others = sorted(i - self.equations for i in index if i >= self.equations)
        named = [_counted("equation", own)] if own else []
        return named + ([f"{_counted('row', others)} of G"] if others else [])


def _counted(what: str, index: Sequence[int]) -> str:
    return f"{what}{'s' if len(index) > 1 else ''} {_joined([str(i) for i in index])}"


def _joined(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _held(problem: Linear | Inequalities) -> str:
    v, (*_, lower, upper) = problem.v[0], problem.sides
    which = (v.isneginf() & lower[0].isfinite()) | (v.isposinf() & upper[0].isfinite())
    outputs = which.nonzero().squeeze(-1).tolist()
    if not outputs:
        return ""
    are, more = "are" if len(outputs) > 1 else "is", outputs[_FEW:]
    named = [str(i) for i in outputs[:_FEW]] + ([f"{len(more)} more"] if more else [])
    what = f"output{'s' if len(outputs) > 1 else ''} {_joined(named)}"
    end = "a bound or an end" if getattr(problem, "bounds", ()) else "an end"
    return f" Proven beside {what}, which {are} held at {end} of the range: v is infinite there."


def _as_far_as(rows: _Rows, ν: Tensor) -> str:
    """Of a proof that does not hold for every z."""
    lower, upper, least, most = rows.lower, rows.upper, rows.least, rows.most
    radius = reach_of_proof(ν, rows.C, lower, upper, least, most).item()
    sides = torch.cat([lower, upper]).abs()
    if not 0 < radius < _FAR * (1 + sides[sides.isfinite()].sum().item()):
        return ""
    return f" The proof holds for |z| up to {radius:.1e} only, the radius of is_certificate."


def _clash(rows: _Rows, ν: Tensor) -> str:
    """Which rows and bounds leave no room, where few do."""
    here = " In sample {sample}"
    crossed = (rows.lower > rows.upper).nonzero().squeeze(-1).tolist()
    if crossed:
        i = crossed[0]
        (name,) = rows.names([i])
        low, high = _written(rows.lower[i], rows.upper[i])
        return f"{here} the lower side of {name}, {low}, is above its upper one, {high}."
    empty = (rows.least > rows.most).nonzero().squeeze(-1).tolist()
    if empty:
        low, high = _written(rows.least[empty[0]], rows.most[empty[0]])
        return f"{here} output {empty[0]} would have to be at least {low} and at most {high}."
    read = _with_bounds(rows)
    said = _alone(rows, _CLEAR) or _alone(read, _CLEAR)
    if said:
        return here + said
    found = _few(rows, ν)
    if found is not None:
        return here + _told(rows, *found)
    said = _alone(rows, _BARELY) or _alone(read, _BARELY)
    if said or rows.C.shape[0] == 1:
        return here + said if said else ""
    what = "equation" if rows.equations == rows.C.shape[0] else "row"
    return f"{here} no {what} alone rules a solution out; together they do."


def _alone(rows: _Rows, clear: float) -> str:
    """A row that asks for what no z between its bounds can give, if there is one."""
    found = reach(rows.C, rows.least.unsqueeze(0), rows.most.unsqueeze(0))
    empty = rows.C.largest() == 0
    least, most = ((x.squeeze(0) + 0.0).masked_fill(empty, 0) for x in found[:2])  # no −0
    over, under = rows.lower - most, least - rows.upper
    beyond = over > clear * (rows.lower.abs() + found.most_terms.squeeze(0))
    beyond |= under > clear * (rows.upper.abs() + found.least_terms.squeeze(0))
    which = beyond.nonzero().squeeze(-1).tolist()
    if not which:
        return ""
    i = which[0]
    asks, side = _asked(rows, i, 1 if rows.lower[i] > most[i] else -1)
    asked, low, high = _written(side, least[i], most[i])
    (name,), possible = rows.names([i]), _possible(low, high)
    where = "between its bounds" if _bounded(rows, i) else f"with {rows.activation!r}"
    return f" {name} {asks} {asked}; {where} it can be {possible}."


def _with_bounds(rows: _Rows) -> _Rows:
    """Rows of G with one entry, read as the bounds of outputs that they are."""
    if not isinstance(rows.C, DenseMap):
        return rows
    some = rows.C.data != 0
    single = (some.sum(-1) == 1) & (torch.arange(len(some), device=some.device) >= rows.equations)
    (index,) = single.nonzero(as_tuple=True)
    output = some[index].long().argmax(-1)
    entry = rows.C.data[index, output]
    ends = torch.stack([rows.lower[index] / entry, rows.upper[index] / entry]).sort(0).values
    least = rows.least.scatter_reduce(0, output, ends[0], "amax")
    most = rows.most.scatter_reduce(0, output, ends[1], "amin")
    return rows if bool((least > most).any()) else rows._replace(least=least, most=most)


def _bounded(rows: _Rows, i: int) -> bool:
    """Are there bounds on outputs of this row?"""
    own = rows.only(torch.tensor([i], device=rows.least.device)).C.data.squeeze(0) != 0
    within = (rows.least > rows.floor) | (rows.most < rows.ceiling)
    return bool((within & own & ~rows.held).any())


def _asked(rows: _Rows, i: int, sign: int) -> tuple[str, Tensor]:
    """What a row asks for, and the number."""
    if rows.lower[i] == rows.upper[i]:
        return "asks for", rows.lower[i]
    return ("asks for at least", rows.lower[i]) if sign > 0 else ("asks for at most", rows.upper[i])


def _few(rows: _Rows, ν: Tensor) -> tuple[list[int], Tensor] | None:
    """At most `_FEW` rows that have no solution by themselves, with their multipliers."""
    weight = ν.nan_to_num(0.0, 0.0, 0.0).abs() * rows.C.largest()
    order = weight.argsort(descending=True)[: int((weight > 0).sum())][:_FEW]
    proof = _proof(rows, order, ν) if len(order) else None
    if proof is None:
        return None
    kept = order.tolist()
    for i in order.flip(0).tolist():  # the faintest may not be needed
        fewer = [j for j in kept if j != i]
        again = _proof(rows, torch.tensor(fewer, device=ν.device), ν) if fewer else None
        kept, proof = (fewer, again) if again is not None else (kept, proof)
    return kept, proof


def _proof(rows: _Rows, index: Tensor, ν: Tensor) -> Tensor | None:
    """Multipliers with which these rows alone have no solution, like ν in their signs."""
    part = rows.only(index)
    ends = part.least.unsqueeze(0), part.most.unsqueeze(0)
    for ray in chain.from_iterable(rays(ν[index].unsqueeze(0), part.C, *ends)):
        place = int(ray[0].abs().argmax())
        if not bool(ray[0, place] != 0):
            continue
        found = _tightest(part, ray[0] / ray[0, place].abs(), place)
        asked = found[place] * (part.lower if found[place] > 0 else part.upper)[place]
        left = _left(part, found.unsqueeze(0), place)[0]
        if bool(asked - left > _CLEAR * (asked.abs() + left.abs())):
            return found
    return None


def _told(rows: _Rows, index: list[int], ν: Tensor) -> str:
    """One of the rows, and what the others leave it."""
    part = rows.only(torch.tensor(index, device=ν.device))
    size = (ν.abs() / ν.abs().amax()).tolist()
    order = [(i >= rows.equations, round(x, 6), i) for i, x in zip(index, size, strict=True)]
    place = order.index(max(order))
    positive = ν[place].item() > 0
    ν = _tightest(part, ν / ν[place].abs(), place)
    y, visible = _pull(part, ν)
    others = rows.names([i for j, i in enumerate(index) if j != place and ν[j] != 0])
    others += _ends(rows, visible, y > 0)
    (name,) = rows.names([index[place]])
    asks, side = _asked(rows, index[place], 1 if positive else -1)
    several = len(others) > 1 or " and " in others[0]
    leave = f"leave{'' if several else 's'} at {'most' if positive else 'least'}"
    if not bool(visible.any()) and bool((part.lower == part.upper).all()):
        leave = f"make{'' if several else 's'} it"
    left = _left(part, ν.unsqueeze(0), place)[0] * (1 if positive else -1)
    asked, left = _written(side, left)
    return f" {name} {asks} {asked}; {_joined(others)} {leave} {left}."


def _pull(part: _Rows, ν: Tensor) -> tuple[Tensor, Tensor]:
    """y = Cᵀν, and where it is more than rounding."""
    y = part.C.adjoint(ν)
    return y, y.abs() > _FAINT * part.C.abs().adjoint(ν.abs()).amax(-1, keepdim=True)


def _left(part: _Rows, ν: Float[Tensor, "n m"], place: int) -> Float[Tensor, "n"]:
    """What the others leave to the row at `place`, whose ν is ±1, by each of these proofs.

    With y = Cᵀν, ν_i (C z)_i = yᵀz − Σ_j ν_j (C z)_j is at most Σ sup{y_k z_k} − Σ_j ν_j side_j.
    """
    y, visible = _pull(part, ν)
    end = torch.where(y > 0, part.most, part.least)
    most = torch.where(visible, y * end, 0).sum(-1)
    side = torch.where(ν > 0, part.lower, torch.where(ν < 0, part.upper, 0)) * ν
    side[:, place] = 0
    return most - side.sum(-1)


def _tightest(part: _Rows, ν: Tensor, place: int) -> Tensor:
    """The least that the others leave, as far as changing one multiplier at a time finds it.

    It is a convex function of them with kinks where an entry of y is 0.
    """
    if part.C.shape[1] > _WIDE:
        return ν
    for _ in range(3):
        for j in range(len(ν)):
            if j == place:
                continue
            rest, own = part.C.adjoint(ν) - ν[j] * part.C.data[j], part.C.data[j]
            kinks = (-rest / own)[own != 0]
            equal = part.lower[j] == part.upper[j]
            kinks = kinks[equal | (kinks * ν[j] >= 0)]
            trial = ν.expand(len(kinks) + 1, -1).clone()
            trial[1:, j] = kinks
            left = _left(part, trial, place).nan_to_num(torch.inf)
            ν = trial[int(left.argmin())]
    return ν


def _ends(rows: _Rows, visible: Tensor, up: Tensor) -> list[str]:
    """The bounds of outputs, and the range, that a proof stands on."""
    words, bound = [], torch.zeros_like(visible)
    for what, which in (
        ("upper bound", visible & up & (rows.most < rows.ceiling) & ~rows.held),
        ("lower bound", visible & ~up & (rows.least > rows.floor) & ~rows.held),
        ("place", visible & rows.held),
    ):
        bound = bound | which
        outputs = which.nonzero().squeeze(-1).tolist()
        if 0 < len(outputs) <= _FEW:
            more = "s" if len(outputs) > 1 else ""
            words.append(f"the {what}{more} of {_counted('output', outputs)}")
        elif outputs:
            words.append(f"the {what}s of {len(outputs)} outputs")
    return words + ([f"the range of {rows.activation!r}"] if bool((visible & ~bound).any()) else [])


def _contradiction(rows: _Rows) -> str:
    """Equations that imply one another and ask for different things."""
    if rows.C.shape[0] * rows.C.shape[1] > _ROOM:
        return ""
    C, b = rows.C.dense(), rows.lower
    norm = C.norm(dim=-1)
    empty = ((norm == 0) & (b != 0)).nonzero().squeeze(-1).tolist()
    if empty:
        (asked,) = _written(b[empty[0]])
        return f" In sample {{sample}} equation {empty[0]} asks for {asked}; it has zeros only."
    norm = norm.where(norm > 0, 1)
    left, values, _ = torch.linalg.svd(C / norm.unsqueeze(-1), full_matrices=False)
    left = left[:, values > 1e-10 * values[:1]]
    goal = b / norm
    beyond = (goal - left @ (left.mT @ goal)) / norm
    endless = torch.full_like(rows.least, torch.inf)
    free = rows._replace(least=-endless, most=endless, floor=-endless, ceiling=endless)
    found = _few(free, beyond)
    return "" if found is None else " In sample {sample}" + _told(free, *found)


def _possible(low: str, high: str) -> str:
    if low == "-inf":
        return f"at most {high}"
    if high == "inf":
        return f"at least {low}"
    return f"{low} only" if low == high else f"between {low} and {high} only"


def _written(*numbers: Tensor) -> list[str]:
    """With six digits, or as many as tell them apart."""
    values, texts = [x.item() + 0.0 for x in numbers], []  # no −0
    for digits in range(6, 18):
        texts = [f"{x:.{digits}g}" for x in values]
        if len(set(texts)) == len(set(values)):
            break
    return texts
