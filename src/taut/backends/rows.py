"""C = [A; G] and σ laid out for the compiled kernel: see csrc/within.h."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from taut.activations import Activation
from taut.activations.codes import is_line
from taut.analysis import Basis
from taut.backends.plan import Plan, bending, filled, functions, lists, matrix, mostly_zeros
from taut.held import reach
from taut.maps import as_map
from taut.systems import CONDITION, EVEN, FAINT, SAFE


@final
@dataclass(frozen=True, eq=False)
class Rows:
    """A plan of all rows, those of A first; what is left of G where σ is a line; ends of z."""

    plan: Plan
    equations: int  # rows of A, as filled up
    line: Plan | None
    ends: dict[str, Tensor]  # of z; and which output a row of G with one entry is about


def make_rows(C: Basis, A: Basis, activation: Activation) -> Rows | None:
    """The layout of dense, shared rows; None where the kernel cannot help.

    >>> from taut.activations import linear
    >>> from taut.analysis import analyse
    >>> whole, one = torch.tensor([[1.0, 1.0], [1.0, 0.0]]).double(), torch.ones(1, 2).double()
    >>> rows = make_rows(analyse(whole, 1e-16), analyse(one, 1e-16), linear)
    >>> rows.plan.sizes["rows"], rows.equations, round(rows.line.arrays["q"][0, 0].item(), 9)
    (8, 4, 0.5)
    """
    data, count = C.map.data, A.map.shape[0]
    known, given = functions(activation, data.shape[1]), data.shape[1]
    if known is None:
        return None
    place = torch.arange(len(data), device="cpu")
    order = torch.cat([filled(place[:count]), filled(place[count:])])
    first = len(filled(place[:count]))
    a = matrix(data, order, len(known["kind"]))
    absolute = a.abs()
    arrays = known | {"order": order, "a": a, "absolute": absolute}
    arrays |= {"sizes": absolute.sum(-1), "largest": absolute.amax(-1)}
    bounds = [x.expand(given) for x in activation.range.bounds(data)]
    lowest, highest = (pad(x, (0, a.shape[1] - given)) for x in bounds)
    arrays |= reach(as_map(a), lowest, highest)._asdict()
    if mostly_zeros(data):
        arrays |= lists(a, len(order))
    c = C.condition.item()
    sizes = {
        "worked": 0,
        "outputs": a.shape[1],
        "given": given,
        "rows": len(order),
        "kept": len(order),
        "disjoint": 0,
        "constraints": len(data),
        "even": EVEN * c**2 if c < CONDITION else torch.inf,
        "faint": FAINT,
        "safe": SAFE,
        "positive": False,
        **bending(known, given),
        "uniform": -1,
    }
    plan = Plan(sizes, {name: x.contiguous() for name, x in arrays.items()})
    line = None
    if is_line(activation):
        kept = torch.zeros(first, dtype=torch.bool, device="cpu")
        kept[:count] = True if A.left_out is None else ~A.left_out
        line = _eliminated(a, first, kept, known["scale"] / known["temperature"])
    norm = a.norm(dim=-1)
    ends = {"lowest": lowest, "highest": highest, "norm": norm.where(norm > 0, 1.0)}
    single = ((a != 0).sum(-1) == 1) & (torch.arange(len(order), device="cpu") >= first)
    if bool(single.any()):
        ends["only"] = torch.where(single, absolute.argmax(-1), -1)
    return Rows(plan, first, line, ends)


def _eliminated(
    a: Float[Tensor, "rows outputs"], first: int, kept: Tensor, w: Float[Tensor, "outputs"]
) -> Plan | None:
    """Ĝ = G − G W Aᵀ(A W Aᵀ)⁻¹A and Q = Ĝ W Ĝᵀ, with the equations in `kept` alone."""
    A, G, inside = a[:first] * kept.unsqueeze(-1), a[first:], kept & (a[:first] != 0).any(-1)
    gram = (A * w) @ A.mT
    gram.diagonal().masked_fill_(~inside, 1)
    factor, failed = torch.linalg.cholesky_ex(gram)
    if int(failed) > 0:
        return None
    inverse = torch.cholesky_inverse(factor) * (inside.unsqueeze(-1) & inside)
    through = torch.cholesky_solve((A * w) @ G.mT, factor) * inside.unsqueeze(-1)
    reduced = G - through.mT @ A
    q = (reduced * w) @ reduced.mT
    arrays = {"inverse": inverse, "through": through, "q": (q + q.mT) / 2}
    arrays["root"] = q.diagonal().clamp_min(0).sqrt()
    arrays["norm"] = arrays["root"].where(arrays["root"] > 0, 1.0)
    # Running errors as in systems/pull.py, where pivots of G come after those of A.
    error = _running(factor, gram)
    below = torch.linalg.solve_triangular(factor, (A * w) @ G.mT, upper=False)
    arrays["made_of"] = (G * G) @ w + error @ below.square()
    if not all(bool(x.isfinite().all()) for x in arrays.values()):
        return None
    worst = error.amax().item() if first else 0.0
    sizes = {"equations": first, "rows": len(G), "error": worst}
    return Plan(sizes, {name: x.contiguous() for name, x in arrays.items()})


def _running(factor: Float[Tensor, "I I"], gram: Float[Tensor, "I I"]) -> Float[Tensor, "I"]:
    squares = factor.square()
    system = 2 * torch.diag(squares.diagonal()) - squares
    return torch.linalg.solve_triangular(system, gram.diagonal()[:, None], upper=False)[:, 0]
