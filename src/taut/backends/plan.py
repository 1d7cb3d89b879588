"""A and σ laid out for the compiled kernel: equations reordered and filled up, σ as numbers."""

from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize, pad

from taut.activations import Activation, linear
from taut.activations.codes import KINDS, bends, codes, is_line
from taut.analysis import Basis
from taut.held import reach
from taut.maps import as_map
from taut.maps.pairs import Pairs
from taut.systems import CONDITION, EVEN, FAINT, SAFE, independent

TILE = 4  # as in csrc/calls.h
# Beyond this, the samples worked on no longer fit a cache, and the gain is gone.
_MAX_OUTPUTS = 2**17
# Finding so many products of two non-zeros takes half a second and 200 MB.
_MAX_PRODUCTS = 2**21
# By an inverse ∂v has its digits down to this part of its terms, times the condition squared.
_FAINT_BY_INVERSE = 3e-9
# Of float32, see csrc/single.h: sums at a time; the part of |A||z| in the size of a residual;
# entries of A from which it gains; bytes of products that a cache holds; the largest condition.
_SPAN, _SHARE, _SMALL, _MAX_PAIRS, _ILL = 8, 0.05, 256, 2**22, 300.0


@final
@dataclass(frozen=True, eq=False)
class Plan:
    """What csrc/calls.h describes: sizes, and arrays by name."""

    sizes: dict[str, Any]
    arrays: dict[str, Tensor]

    @property
    def work(self) -> int:
        """About how many products of two numbers one evaluation of a sample takes."""
        return self.sizes["outputs"] * (self.sizes["kept"] + 8)


def make_plan(basis: Basis, activation: Activation, every: bool = False) -> Plan | None:
    """The plan of a dense, shared A; None where the kernel cannot help.

    With `every`, of all equations, redundant ones too: each sample says which it leaves out.

    >>> from taut.activations import sigmoid
    >>> from taut.analysis import analyse
    >>> plan = make_plan(analyse(torch.ones(1, 3, dtype=torch.float64), 1e-16), sigmoid)
    >>> plan.sizes["given"], plan.sizes["outputs"], plan.sizes["kept"]
    (3, 4, 4)
    """
    A = basis.map.data
    constraints, given = A.shape
    found = functions(activation, given)
    if found is None:
        return None
    out = None if every else basis.left_out
    kept = torch.ones_like(A[:, 0], dtype=torch.bool) if out is None else ~out
    sparse = mostly_zeros(A)
    order, first, worked = _ordered(A, kept, sparse)
    a = matrix(A, order, len(found["kind"]))
    absolute = a.abs()
    arrays = found | {"order": order, "a": a, "absolute": absolute}
    arrays |= {"sizes": absolute.sum(-1), "largest": absolute.amax(-1)}
    ends = (pad(x.expand(given), (0, a.shape[1] - given)) for x in activation.range.bounds(A))
    arrays |= reach(as_map(a), *ends)._asdict()
    if sparse:
        arrays |= lists(a, worked)
    w = found["scale"] / found["temperature"]
    c = basis.condition.item()
    even = EVEN * c**2 if c < CONDITION else torch.inf
    invert = _pseudoinverse if every else _inverse
    inverses = {"flat": invert(a[:worked], torch.ones_like(w))}
    faint = FAINT
    if not every and is_line(activation) and bool(w[:given].amin() >= even * w[:given].amax()):
        inverses["inverse"] = _inverse(a[:worked], w)
        faint = max(faint, _FAINT_BY_INVERSE * _squared_condition(a[:worked], w))
    if not all(bool(inverse.isfinite().all()) for inverse in inverses.values()):
        return None
    plain = not sparse and not every and "inverse" not in inverses
    single = _single(a[:, :given], order[:worked], inverses["flat"], c) if plain else {}
    sizes = {
        "worked": len(single["lines"]) if single else 0,
        "outputs": a.shape[1],
        "given": given,
        "rows": len(order),
        "kept": worked,
        "disjoint": first,
        "constraints": constraints,
        "even": even,
        "faint": faint,
        "safe": SAFE,
        **bending(found, given, a[:worked]),
        "uniform": _uniform(found, given),
        "positive": activation.range.positive and bool((A >= 0).all()),
    }
    return Plan(sizes, {name: x.contiguous() for name, x in (arrays | inverses | single).items()})


def _single(
    a: Float[Tensor, "rows given"], order: Int[Tensor, "kept"], flat: Tensor, condition: float
) -> dict[str, Tensor]:
    """What csrc/single.h needs; nothing where float32 gains nothing, or would not do."""
    n, outputs = int((order >= 0).sum()), a.shape[1]
    tiled = -(-n // 3) * 3
    entries = tiled * (tiled + 1) // 2
    a, size = a[:n], a[:n].abs().amax(-1)
    if n * outputs < _SMALL or 4 * entries * outputs > _MAX_PAIRS or condition > _ILL:
        return {}
    if not bool((size > 1e-8).all() and (size < 1e8).all()):
        return {}
    i, j = torch.tril_indices(tiled, tiled, device="cpu").unbind()
    rows = pad(a, (0, 0, 0, tiled - n))
    pairs = pad((rows[i] * rows[j]).mT, (0, -entries % _SPAN)).unflatten(-1, (-1, _SPAN))
    flat = flat[:n, :n]
    found = {"lines": a, "columns": a.mT, "inverse_single": flat, "straight": flat @ a}
    found = {name: pad(x, (0, -x.shape[-1] % _SPAN)) for name, x in found.items()}
    found |= {"pairs": pairs.movedim(-2, 0), "shares": _SHARE * a.abs().sum(-1)}
    return {name: x.to(torch.float32) for name, x in found.items()}


def functions(
    activation: Activation, given: int, two: Tensor | None = None
) -> dict[str, Tensor] | None:
    """The codes of σ, filled up with lines to a multiple of TILE. For `two` see `codes`."""
    found, more = codes(activation, given, two), -given % TILE
    if found is None or given > _MAX_OUTPUTS:
        return None
    fill = {"kind": KINDS.index(linear), "shift": 0.0, "scale": 1.0, "temperature": 1.0}
    fill |= {"lower": -torch.inf, "upper": torch.inf}
    arrays = {name: pad(x, (0, more), value=fill[name]) for name, x in found._asdict().items()}
    which = bends(activation, given)
    if which is not None:
        arrays["bends"] = pad(which.to(torch.int8), (0, more))
    plain = (arrays["shift"] == 0) & (arrays["scale"] == 1) & (arrays["temperature"] == 1)
    return arrays | {"plain": plain.to(torch.int8)}


def bending(found: dict[str, Tensor], given: int, a: Tensor | None = None) -> dict[str, Any]:
    """How many outputs bend, and whether the rows `a` are independent in the others alone."""
    if "bends" not in found:
        return {"bending": given, "anchored": False}
    sizes = {"bending": int(found["bends"].sum()), "anchored": False}
    if a is not None:
        even = (1 - found["bends"]).to(a.dtype).unsqueeze(0)
        sizes["anchored"] = bool(independent(as_map(a), even, (a == 0).all(-1)))
    return sizes


def _uniform(found: dict[str, Tensor], given: int) -> int:
    """The one kind of all outputs, without parameters; −1 where there is none."""
    kind, plain = found["kind"][:given], found["plain"][:given]
    return int(kind[0]) if bool(plain.all() and (kind == kind[0]).all()) else -1


def matrix(A: Float[Tensor, "I K"], order: Int[Tensor, "rows"], outputs: int) -> Tensor:
    """The rows of A in this order, 0 for filling."""
    a = A.new_zeros(len(order), outputs)
    a[order >= 0, : A.shape[1]] = A[order[order >= 0]]
    return a


def mostly_zeros(A: Float[Tensor, "I K"]) -> bool:
    """Is it worth to hold A as lists?"""
    products = int((A != 0).sum(0).square().sum())
    return 4 * products < A.shape[0] ** 2 * A.shape[1] and products <= _MAX_PRODUCTS


def _ordered(A: Tensor, kept: Bool[Tensor, "I"], sparse: bool) -> tuple[Tensor, int, int]:
    """The rows that share no output, the other ones kept, the rest; how many are of the first, and
    of the first two."""
    disjoint = _disjoint(A, kept) if sparse else torch.zeros_like(kept)
    parts = [x.nonzero().squeeze(-1) for x in (disjoint, kept & ~disjoint, ~kept)]
    first, worked = len(parts[0]), len(parts[0]) + len(filled(parts[1]))
    return filled(torch.cat([parts[0], filled(parts[1]), parts[2]])), first, worked


def _disjoint(A: Float[Tensor, "I K"], kept: Bool[Tensor, "I"]) -> Bool[Tensor, "I"]:
    """Equations that share no output with each other, taken as they come."""
    support, used = A != 0, A.new_zeros(A.shape[1], dtype=torch.bool)
    chosen = torch.zeros_like(kept)
    for i in kept.nonzero().squeeze(-1).tolist():
        if not bool((support[i] & used).any()):
            chosen[i], used = True, used | support[i]
    return chosen


def filled(index: Int[Tensor, "n"]) -> Int[Tensor, "more"]:
    """With −1 up to a multiple of TILE."""
    return torch.cat([index, index.new_full((-len(index) % TILE,), -1)])


def lists(a: Float[Tensor, "rows outputs"], kept: int) -> dict[str, Tensor]:
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


def _pseudoinverse(a: Float[Tensor, "kept outputs"], w: Float[Tensor, "outputs"]) -> Tensor:
    return torch.linalg.pinv((a * w) @ a.mT)


def _squared_condition(a: Float[Tensor, "kept outputs"], w: Float[Tensor, "outputs"]) -> float:
    """That of A W^½ with rows of length 1; the one that is estimated can be 30 times too small."""
    scaled = a * w.sqrt()
    values = torch.linalg.svdvals(normalize(scaled[(a != 0).any(-1)], dim=-1))
    return float((values[0] / values[-1]).square()) if len(values) else 1.0
