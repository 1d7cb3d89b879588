"""A and σ laid out for the compiled kernel: rows reordered and filled up, σ as numbers."""

from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from taut.activation import Activation, Affine
from taut.activations import exp, linear, sigmoid, tanh
from taut.linear import DenseMap
from taut.pairs import Pairs
from taut.rows import Rows

TILE = 4  # as in csrc/calls.h
# By function, not by row: a row that comes out of a file is another object.
_KINDS = {exp.sigma: 0, sigmoid.sigma: 1, tanh.sigma: 2, linear.sigma: 3}
# Beyond these, the samples worked on no longer fit a cache, and the gain is gone.
_MAX_OUTPUTS = 2**17
# Finding so many products of two non-zeros takes half a second and 200 MB.
_MAX_PRODUCTS = 2**21


@final
@dataclass(frozen=True, eq=False)
class Plan:
    """What csrc/calls.h describes: sizes, and arrays by name."""

    outputs: int  # K, filled up
    given: int
    rows: int
    kept: int
    disjoint: int
    constraints: int
    positive: bool
    arrays: dict[str, Tensor]


def make_plan(rows: Rows, activation: Activation, max_rows: int) -> Plan | None:
    """The plan of `rows` and `activation`; None where the kernel cannot help.

    >>> from taut.rows import analyse
    >>> plan = make_plan(analyse(torch.ones(1, 3, dtype=torch.float64), 1e-16), sigmoid, 8)
    >>> plan.given, plan.outputs, plan.kept
    (3, 4, 4)
    """
    A = rows.basis
    if not isinstance(A, DenseMap) or rows.transform is not None or 0 in A.shape:
        return None
    if A.data.dtype != torch.float64 or A.data.device.type != "cpu":
        return None
    constraints, given = A.shape
    functions = _functions(activation, given)
    if functions is None or constraints > max_rows or given > _MAX_OUTPUTS:
        return None
    kept = (
        torch.ones(constraints, dtype=torch.bool, device="cpu")
        if rows.left_out is None
        else ~rows.left_out
    )
    sparse = _mostly_zeros(A.data)
    disjoint = _disjoint(A.data, kept) if sparse else torch.zeros_like(kept)
    parts = [x.nonzero().squeeze(-1) for x in (disjoint, kept & ~disjoint, ~kept)]
    first, worked = len(parts[0]), len(parts[0]) + len(_filled(parts[1]))
    order = _filled(torch.cat([parts[0], _filled(parts[1]), parts[2]]))
    a = A.data.new_zeros(len(order), len(functions["kind"]))
    a[order >= 0, :given] = A.data[order[order >= 0]]
    absolute = a.abs()
    arrays = functions | {"order": order, "a": a, "absolute": absolute, "sizes": absolute.sum(-1)}
    if sparse:
        arrays |= _lists(a, worked)
    w = functions["scale"] / functions["temperature"]
    inverses = {"flat": _inverse(a[:worked], torch.ones_like(w))}
    if activation.straight:
        inverses["inverse"] = _inverse(a[:worked], w)
    if not all(bool(inverse.isfinite().all()) for inverse in inverses.values()):
        return None
    arrays |= inverses
    positive = activation.range.positive and bool((A.data >= 0).all())
    arrays = {name: array.contiguous() for name, array in arrays.items()}
    return Plan(a.shape[1], given, len(order), worked, first, constraints, positive, arrays)


@lru_cache(maxsize=16)
def _functions(activation: Activation, given: int) -> dict[str, Tensor] | None:
    """Kind and parameters of σ, output by output."""
    outputs = given + -given % TILE
    kind = torch.full((outputs,), _KINDS[linear.sigma], dtype=torch.int8, device="cpu")
    start = {
        "shift": 0.0,
        "scale": 1.0,
        "temperature": 1.0,
        "lower": -torch.inf,
        "upper": torch.inf,
    }
    like = kind.double()
    numbers = {name: torch.full_like(like, value) for name, value in start.items()}
    for row, index in activation.parts or ((activation, slice(given)),):
        form = row.form or Affine(row)
        if form.row.sigma not in _KINDS:
            return None
        kind[index] = _KINDS[form.row.sigma]
        values = {name: getattr(form, name) for name in ("shift", "scale", "temperature")}
        if form.row.range.bounded:
            values |= {"lower": form.ends.lower, "upper": form.ends.upper}
        for name, value in values.items():
            numbers[name][index] = torch.as_tensor(value, dtype=torch.float64, device="cpu")
    plain = (numbers["shift"] == 0) & (numbers["scale"] == 1) & (numbers["temperature"] == 1)
    return numbers | {"kind": kind, "plain": plain.to(torch.int8)}


def _mostly_zeros(A: Float[Tensor, "I K"]) -> bool:
    products = int((A != 0).sum(0).square().sum())
    return 4 * products < A.shape[0] ** 2 * A.shape[1] and products <= _MAX_PRODUCTS


def _disjoint(A: Float[Tensor, "I K"], kept: Bool[Tensor, "I"]) -> Bool[Tensor, "I"]:
    """Rows that share no output with each other, taken as they come."""
    support, used = A != 0, A.new_zeros(A.shape[1], dtype=torch.bool)
    chosen = torch.zeros_like(kept)
    for i in kept.nonzero().squeeze(-1).tolist():
        if not bool((support[i] & used).any()):
            chosen[i], used = True, used | support[i]
    return chosen


def _filled(index: Int[Tensor, "n"]) -> Int[Tensor, "more"]:
    """With −1 up to a multiple of TILE."""
    return torch.cat([index, index.new_full((-len(index) % TILE,), -1)])


def _lists(a: Float[Tensor, "rows outputs"], kept: int) -> dict[str, Tensor]:
    """The non-zeros by row, by output, and their products by entry of A diag(w) Aᵀ."""
    row, output = a.nonzero(as_tuple=True)
    column, its_row = a[:kept].mT.nonzero(as_tuple=True)
    value = a[its_row, column]
    pairs = Pairs.of(its_row, column, (kept, a.shape[1]))
    i, j = its_row[pairs.left], its_row[pairs.right]
    entry, which = torch.where(i >= j, i * (i + 1) // 2 + j, -1).sort(stable=True)
    which = which[entry >= 0]
    return {
        "row_start": _starts(row, len(a)),
        "row_output": output,
        "row_value": a[row, output],
        "output_start": _starts(column, a.shape[1]),
        "output_row": its_row,
        "output_value": value,
        "entry_start": _starts(entry[entry >= 0], kept * (kept + 1) // 2),
        "entry_output": pairs.column[which],
        "entry_value": (value[pairs.left] * value[pairs.right])[which],
    }


def _starts(index: Int[Tensor, "n"], count: int) -> Int[Tensor, "more"]:
    """Where each of 0 … count begins in a sorted index."""
    return torch.searchsorted(index, torch.arange(count + 1, device=index.device))


def _inverse(a: Float[Tensor, "kept outputs"], w: Float[Tensor, "outputs"]) -> Tensor:
    gram = (a * w) @ a.mT
    gram.diagonal().masked_fill_((a == 0).all(-1), 1)
    factor, info = torch.linalg.cholesky_ex(gram)
    return torch.cholesky_inverse(factor) if int(info) == 0 else torch.full_like(gram, torch.nan)
