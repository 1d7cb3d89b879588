"""From what a user gives to a Problem: validate, broadcast, flatten. Batch dimensions end here."""

from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from taut.accept import FLOATS, as_floating, one_side
from taut.activations import Activation
from taut.maps import as_map, stacked
from taut.outcome import places
from taut.prepare import Prepared, Unprepared
from taut.problems import Inequalities, Linear, Nonlinear


def fitted(v: Any, A: Any, b: Any, init: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What was given as tensors that make a problem; else an error that says what was received."""
    if isinstance(v, Tensor) and isinstance(A, Tensor) and isinstance(b, Tensor):
        dtype, device = v.dtype, v.device
        if (
            v.ndim == A.ndim == 2
            and v.shape[1] == A.shape[1] > 0
            and b.ndim == 2
            and b.shape == (shape := (v.shape[0], A.shape[0]))
            and dtype is A.dtype is b.dtype
            and dtype in FLOATS
            and device == A.device == b.device
            and (
                init is None
                or (
                    init.ndim == 2
                    and init.shape == shape
                    and init.dtype is dtype
                    and init.device == device
                )
            )
        ):
            return v, A, b, init  # plainly a batch with one A; asked first, as training asks often
    v = _outputs(v)
    A, b = (as_floating(name, x, v.dtype, v.device) for name, x in (("A", A), ("b", b)))
    if init is not None:
        init = as_floating("init", init, v.dtype, v.device)
    _validate(v, A, b, init)
    return v, A, b, init


def pose(
    prepared: Prepared | Unprepared, v: Tensor, A: Tensor | None, b: Tensor, init: Tensor | None
) -> tuple[Linear, torch.Size]:
    """The samples, flat, and their batch dimensions; all tensors are `fitted`.

    A is the live tensor that gets gradients; None for the detached one in `prepared`.
    """
    plain = A is not None and A.ndim == 2 and A.layout is torch.strided and not A.is_inference()
    data, start = A if plain else _data(prepared, A), None if init is None else init.detach()
    if v.ndim == 2 and b.ndim == 2 and (start is None or start.ndim == 2):
        return Linear(prepared, v, data, b, start, v.shape[0]), v.shape[:-1]  # pyright: ignore
    batch, n = v.shape[:-1], v.shape[:-1].numel()
    equations = b.shape[-1]
    b = b.expand(*batch, equations).reshape(n, equations)
    if start is not None:
        start = start.expand(*batch, equations).reshape(n, equations)
    group = v.shape[-2] if v.ndim > 1 else 1
    flat = v.reshape(n, v.shape[-1])
    return Linear(prepared, flat, data, b, start, group), batch  # pyright: ignore


def _fits(x: Tensor, batch: Any, rows: int) -> bool:
    """Is x (rows,) or (*batch, rows)?

    The number of dimensions goes first: a compiler would compare (rows,) with (N, rows) by its
    first entry, and keep that N is not `rows`.
    """
    if x.ndim == 1 and x.shape[0] == rows:
        return True
    return x.ndim == len(batch) + 1 and x.shape == (*batch, rows)


def _outputs(v: Any) -> Tensor:
    if isinstance(v, Tensor) and not v.is_floating_point():
        raise TypeError(f"v must hold floating numbers; got {v.dtype}. Try v.float().")
    return as_floating("v", v, None)


def _with_or_without(v: Any, A: Any, b: Any) -> tuple[Tensor, Tensor, Tensor]:
    """v, and A z = b; without A and b it has no rows."""
    v = _outputs(v)
    if v.ndim < 1:
        raise ValueError(f"v must be (*batch, K); got {tuple(v.shape)}.")
    if (A is None) != (b is None):
        raise ValueError(
            "A and b belong together: A z = b needs b as well, an entry for each row of A, as in "
            "project(v, A, b)."
            if b is None
            else "A and b belong together: b is that of A z = b, and there is no A."
        )
    A = v.new_zeros(0, v.shape[-1]) if A is None else as_floating("A", A, v.dtype, v.device)
    b = v.new_zeros(0) if b is None else as_floating("b", b, v.dtype, v.device)
    return v, A, b


def check_range(name: str, y: Tensor, activation: Activation) -> None:
    """Refuse a y that is not in the closed range of σ."""
    outside = ~activation.range.contains(y)
    if bool(outside.any()):
        if bool(y.isnan().any()):
            samples = places(y.isnan().any(-1))
            where = f" in sample {samples}" if samples else ""
            raise ValueError(f"{name} must be numbers; got nan{where}. Leave these samples out.")
        ends = [x.expand_as(y)[outside][0].item() for x in activation.range.bounds(y)]
        output, samples = int(outside.nonzero()[0, -1]), places(outside.any(-1))
        own = any(isinstance(x, Tensor) for x in (activation.range.lower, activation.range.upper))
        where = f" in output {output}" if own else ""
        found = y.detach()[outside]
        numbers = ", ".join(f"{x:.9g}" for x in found[:3].tolist())
        raise ValueError(
            f"{name} must lie in [{ends[0]:.6g}, {ends[1]:.6g}]{where}, the closed range of "
            f"{activation.name!r}; got {numbers}{', …' if len(found) > 3 else ''}"
            f"{f' in sample {samples}' if samples else ''}. Clip them, leave these samples out, or "
            "use an activation with a wider range."
        )


def _data(prepared: Prepared | Unprepared, A: Tensor | None) -> Tensor:
    """The numbers of A, flat, as the map in `prepared` has them."""
    if A is None:
        return prepared.map.data
    if A.is_inference() and not torch.is_inference_mode_enabled():
        A = A.clone()  # else it could not be kept for a backward pass
    if A.layout is torch.strided:
        return A if A.ndim < 4 else A.flatten(0, -3)
    return as_map(A).data


def _validate(v: Tensor, A: Tensor, b: Tensor, init: Tensor | None, matrix: str = "A") -> None:
    given = {"v": v, matrix: A, "b": b, **({} if init is None else {"init": init})}
    if A.layout != torch.strided and (A.ndim != 2 or A.shape[-1] != v.shape[-1]):
        raise ValueError(
            f"a sparse {matrix} must be one (I, K) matrix for all samples; got "
            f"{matrix} {tuple(A.shape)} for v {tuple(v.shape)}."
        )
    for name, x in ((matrix, A), ("b", b)):
        if x.dtype != v.dtype:
            wider = torch.promote_types(v.dtype, x.dtype) == x.dtype
            raise TypeError(
                f"v is {v.dtype} and {name} is {x.dtype}. z has the dtype of v: convert {name} "
                f"with {name}.to(v.dtype), or v, for {'more' if wider else 'fewer'} digits, with "
                f"v.to({name}.dtype)."
            )
    if len({x.device for x in given.values()}) > 1:
        where = ", ".join(f"{name} on {x.device}" for name, x in given.items())
        raise ValueError(f"all tensors must be on one device; got {where}.")
    _validate_shapes(v, A, b, init, matrix)


def _validate_shapes(v: Tensor, A: Tensor, b: Tensor, init: Tensor | None, matrix: str) -> None:
    def shapes() -> str:
        found = f"got v {tuple(v.shape)}, {matrix} {tuple(A.shape)}"
        return f"{found}, b {tuple(b.shape)}" if matrix == "A" else found

    if v.ndim < 1 or b.ndim < 1 or A.ndim < 2:
        raise ValueError(
            f"v must be (*batch, K), {matrix} (I, K) or (*batch, I, K), b (*batch, I); {shapes()}."
            f"{one_side(b, (), A)}"
        )
    batch, columns, rows = v.shape[:-1], v.shape[-1], A.shape[-2]
    if columns == 0:
        raise ValueError(f"v has no outputs (K = 0); {shapes()}.")
    if A.shape[-1] != columns:
        hint = f" Is {matrix} transposed?" if A.ndim == 2 and A.shape[0] == columns else ""
        hint = _outputs_last(v, A.shape[-1]) or hint
        raise ValueError(
            f"{matrix} must have one column for each of the K = {columns} outputs in v; "
            f"{shapes()}.{hint}"
        )
    if A.ndim > 2 and A.shape[:-2] != batch:
        raise ValueError(
            f"{matrix} for each sample must have the batch dimensions of v, {tuple(batch)}; "
            f"{shapes()}."
        )
    if not _fits(b, batch, rows):
        raise ValueError(
            f"b must be (I,) or (*batch, I) = {(*batch, rows)}, an entry per row of A; {shapes()}."
            f"{one_side(b, batch, A)}"
        )
    if init is not None and not _fits(init, batch, rows):
        raise ValueError(
            f"init must be (I,) or (*batch, I) = {(*batch, rows)}; got {tuple(init.shape)}."
        )


def _outputs_last(v: Tensor, columns: int) -> str:
    """What to do where another dimension of v than the last is as long as there are outputs."""
    found = [i for i, size in enumerate(v.shape[:-1]) if size == columns]
    if v.ndim < 3 or not found:
        return ""
    place = found[-1]
    return (
        f" Outputs are the last dimension: pass v.movedim({place}, -1), and bring z back with "
        f"z.movedim(-1, {place})."
    )


@final
class Given(NamedTuple):
    """Inequalities or bounds as tensors that make a problem."""

    v: Tensor
    A: Tensor
    b: Tensor
    G: Tensor | None  # None: the sides bound z itself
    lower: Tensor
    upper: Tensor
    init: Tensor | None


def fitted_sides(v: Any, A: Any, b: Any, G: Any, lower: Any, upper: Any, init: Any) -> Given:
    """`fitted` for A z = b with lower ≤ G z ≤ upper, or with lower ≤ z ≤ upper without G."""
    if lower is None and upper is None and (A is None) == (b is None):
        raise ValueError(
            "G without a side constrains nothing: pass lower, upper, or both."
            if G is not None
            else "there are no constraints: pass A and b, G with lower or upper, or bounds on z."
        )
    v, A, b = _with_or_without(v, A, b)
    rows = v.shape[-1]
    if G is not None:
        G = as_floating("G", G, v.dtype, v.device)
        _validate(v, G, v.new_zeros(G.shape[-2] if G.ndim > 1 else 0), None, "G")
        rows = G.shape[-2]
        if max(A.ndim, G.ndim) > 2 and not (A.layout is G.layout is torch.strided):
            raise ValueError(
                "a sparse matrix is one for all samples, and so must be the other; got "
                f"A {tuple(A.shape)}, G {tuple(G.shape)}."
            )
    lower, upper = (
        _side(name, x, none, rows, v, G is not None)
        for name, x, none in (("lower", lower, -torch.inf), ("upper", upper, torch.inf))
    )
    _validate(v, A, b, None)
    if init is not None:
        init = as_floating("init", init, v.dtype, v.device)
        count = A.shape[-2] + (0 if G is None else rows)
        if not _fits(init, v.shape[:-1], count):
            raise ValueError(
                f"init must have {count} multipliers, those of A and then those of G, for each "
                f"sample or once for all; got {tuple(init.shape)} for v {tuple(v.shape)}."
            )
    return Given(v, A, b, G, lower, upper, init)


def _side(name: str, x: Any, none: float, rows: int, v: Tensor, of_rows: bool) -> Tensor:
    """A side as a tensor of (rows,) or (*batch, rows)."""
    if x is None:
        return v.new_full((rows,), none)
    given, x = x, as_floating(name, x, v.dtype, v.device)
    if x.dtype != v.dtype:
        raise TypeError(
            f"v is {v.dtype} and {name} is {x.dtype}: convert {name} with {name}.to(v.dtype)."
        )
    if not (of_rows or isinstance(given, (int, float))):
        x = x.clone()  # `active` reads bounds later; sides of rows are copied when joined to b
    if x.ndim == 0:
        return x.expand(rows)
    batch = v.shape[:-1]
    if not _fits(x, batch, rows):
        what = "row of G" if of_rows else "output, as there is no G"
        raise ValueError(
            f"{name} must be a number, ({rows},) or (*batch, {rows}) = {(*batch, rows)}, an entry "
            f"per {what}; got {tuple(x.shape)} for v {tuple(v.shape)}."
            f"{'' if of_rows or x.ndim != 1 else _outputs_last(v, x.shape[0])}"
        )
    return x


def pose_sides(
    prepared: Prepared | Unprepared, given: Given, live: bool
) -> tuple[Inequalities, torch.Size]:
    """The samples, flat, and their batch dimensions; `live` says that A and G get gradients."""
    v, A, b, G, lower, upper, init = given
    batch, n = v.shape[:-1], v.shape[:-1].numel()

    def flat(x: Tensor) -> Tensor:
        return x.expand(*batch, x.shape[-1]).reshape(n, x.shape[-1])

    b, lower, upper = flat(b), flat(lower), flat(upper)
    data = stacked(A, G).data if live else prepared.map.data
    if data.is_inference() and not torch.is_inference_mode_enabled():
        data = data.clone()
    # All that an equation gives to its sides goes to the lower one, which is b.
    sides, bounds = (b, b.detach()), (lower, upper)
    if G is not None:
        sides = torch.cat([b, lower], -1), torch.cat([b.detach(), upper], -1)
        bounds = ()
    start = None if init is None else flat(init.detach())
    group = v.shape[-2] if v.ndim > 1 else 1
    own = (v.reshape(n, v.shape[-1]), data, *sides, bounds, A.shape[-2], start, group)
    return Inequalities(prepared, *own), batch  # pyright: ignore


#: Outputs up to which a sparse A is made dense beside h: the solver factorises K×K matrices.
DENSE = 500


@final
class Curved(NamedTuple):
    """Nonlinear equations, and A z = b beside them, as tensors that make a problem."""

    v: Tensor
    A: Tensor
    b: Tensor
    params: tuple[Tensor, ...]
    init: Tensor | None  # multipliers, or u and then these


def fitted_curved(v: Any, A: Any, b: Any, params: Any, init: Any) -> Curved:
    """`fitted` for h(z, *params) = 0, with A z = b or without."""
    v, A, b = _with_or_without(v, A, b)
    _validate(v, A, b, None)
    if A.layout is not torch.strided and A.shape[-1] > DENSE:
        raise NotImplementedError(
            f"beside h a sparse A is made dense, up to K = {DENSE} outputs; got A "
            f"{tuple(A.shape)}. Solve blocks of outputs apart, or pass A.to_dense() if there is "
            "room for K×K numbers a sample."
        )
    return Curved(v, A, b, _parameters(params, v), _begin(init, v))


def _parameters(params: Any, v: Tensor) -> tuple[Tensor, ...]:
    """Of each sample, in the dtype of v."""
    if isinstance(params, Tensor) or not isinstance(params, (tuple, list)):
        raise TypeError(
            f"params must be a tuple, what h takes after z; got {type(params).__name__}. One "
            "alone is params=(p,)."
        )
    batch, found = v.shape[:-1], []
    for i, p in enumerate(params):
        p = as_floating(f"params[{i}]", p, v.dtype, v.device)
        if p.dtype != v.dtype:
            raise TypeError(
                f"v is {v.dtype} and params[{i}] is {p.dtype}: convert it with .to(v.dtype)."
            )
        if p.device != v.device:
            raise ValueError(f"v is on {v.device} and params[{i}] on {p.device}: move one of them.")
        if p.shape[: len(batch)] != batch:
            raise ValueError(
                f"params[{i}] must begin with the batch dimensions of v, {tuple(batch)}, as each "
                f"sample has its own; got {tuple(p.shape)}. What all samples share is a constant "
                f"of h, or, where it is learned, p.expand{(*batch, '…')}."
            )
        found.append(p)
    return tuple(found)


def _begin(init: Any, v: Tensor) -> Tensor | None:
    """Multipliers, or u and then multipliers, for each sample."""
    if init is None:
        return None
    pair = isinstance(init, (tuple, list)) and len(init) == 2 and isinstance(init[0], Tensor)
    parts = [as_floating("init", x, v.dtype, v.device) for x in (init if pair else (init,))]
    batch = v.shape[:-1]
    for part, columns in zip(parts, ((v.shape[-1], None) if pair else (None,)), strict=True):
        wrong = part.ndim < 1 or part.shape[:-1] not in ((), batch)
        if wrong or (columns is not None and part.shape[-1] != columns):
            raise ValueError(
                "init must be multipliers, or a pair (u, multipliers), for each sample or once for "
                f"all; got {', '.join(str(tuple(x.shape)) for x in parts)} for v {tuple(v.shape)}."
            )
    return torch.cat([x.detach().expand(*batch, x.shape[-1]) for x in parts], -1)


def pose_curved(
    prepared: Prepared | Unprepared, given: Curved, live: bool
) -> tuple[Nonlinear, torch.Size]:
    """The samples, flat, and their batch dimensions; `live` says that A gets a gradient."""
    v, A, b, params, init = given
    batch, n = v.shape[:-1], v.shape[:-1].numel()
    data = _data(prepared, A if live else None)
    b = b.expand(*batch, b.shape[-1]).reshape(n, b.shape[-1])
    params = tuple(p.reshape(n, *p.shape[len(batch) :]) for p in params)
    start = None if init is None else init.reshape(n, init.shape[-1])
    group = v.shape[-2] if v.ndim > 1 else 1
    flat = v.reshape(n, v.shape[-1])
    return Nonlinear(prepared, flat, data, b, params, start, group), batch  # pyright: ignore
