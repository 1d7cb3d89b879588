"""The addresses of tensors: C gets none that is not made here.

C reads and writes as far as it is told. So the size of each array in csrc/calls.h is listed below,
its dtype is that of its field there, and a tensor that does not fit gets no address.
"""

from collections.abc import Mapping
from ctypes import addressof
from math import prod
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter

from taut.backends.library import _pointers, _structures, differing
from taut.backends.plan import Plan

#: By structure: the size of each array. What begins with `samples` has so much for each of them.
_SIZES = {
    "plan": {
        "rows": "order sizes largest least most least_terms most_terms",
        "rows outputs": "a absolute",
        "outputs": "bends first second kind plain shift scale temperature lower upper",
        "kept kept": "flat inverse",
        "row_ends": "row_start",
        "row_entries": "row_output row_value",
        "output_ends": "output_start",
        "output_entries": "output_row output_value",
        "entry_ends": "entry_start",
        "entry_entries": "entry_output entry_value",
        "worked given_filled": "lines straight",
        "given worked_filled": "columns",
        "worked worked_filled": "inverse_single",
        "given pairs_filled": "pairs",
        "worked": "shares",
    },
    "line": {
        "equations equations": "inverse",
        "equations rows": "through",
        "rows rows": "q",
        "rows": "root norm made_of",
    },
    "solve": {
        "samples given": "v u z",
        "samples constraints": "b start multipliers left_out",
        "samples": "index residual iterations status",
    },
    "backward": {
        "samples given": "u g_u g_z dv",
        "samples constraints": "g_multipliers db",
        "samples": "status",
    },
    "stable": {
        "samples equations outputs": "a",
        "samples equations equations": "metric",
        "samples equations": "left_out g_v s",
        "samples outputs": "w g_z g_u x t",
    },
    "within": {
        "outputs": "lowest highest",
        "rows": "norm only",
        "samples given": "v floor ceiling u z",
        "samples constraints": "lower upper start multipliers",
        "samples": "residual iterations status",
    },
    "pull": {
        "samples given": "u floor ceiling g_u g_z dv dfloor dceiling",
        "samples constraints": "multipliers lower upper g_multipliers dlower dupper",
        "samples": "status left",
    },
    "one": {
        "samples rows outputs": "matrix",
        "samples outputs": "v floor ceiling lowest highest u z w",
        "samples rows": "lower upper multipliers r",
        "samples": "unit level iterations status",
    },
    "trail": {
        "samples rows outputs": "matrix",
        "samples outputs": "v u z",
        "samples all": "lower upper equal low high nu below above up down r",
        "samples": "unit_z unit_u t stopped iterations",
        "samples kept rows": "seen",
    },
    "loss": {
        "samples given": "v y u",
        "samples constraints": "b multipliers",
        "samples": "loss",
    },
    "train": {"samples given": "y dv", "samples": "loss", "entries constraints": "table"},
}
#: Arrays of which C is told how far apart the samples lie, so that these may share one.
_STRIDES = {
    ("solve", "b"): "b_stride",
    ("loss", "b"): "b_stride",
    ("stable", "a"): "stride",
    ("stable", "metric"): "metric_stride",
    ("one", "matrix"): "stride",
    ("trail", "matrix"): "stride",
}
_DTYPES = {
    "int64_t": (torch.int64,),
    "int8_t": (torch.int8, torch.bool),
    "double": (torch.float64,),
    "float": (torch.float32,),
}
#: What is new and holds no numbers of the call.
_OTHERS = {"iterations": torch.int64, "status": torch.int64, "left": torch.bool}
_FLOATS = (torch.float32, torch.float64)
_PLAIN = (Tensor, Parameter)
_NOTHING: tuple[Any, Any, Any] = (None, None, None)
_SPAN = 8  # what rows are filled up to in float32: see csrc/single.h


@final
class Arrays:
    """What C expects of the arrays of one structure, for numbers of one dtype."""

    def __init__(
        self, name: str, sizes: Mapping[str, int], dtype: torch.dtype | None, **fixed: int
    ) -> None:
        parts, kinds = ("solve", "train") if name == "train" else (name,), {}
        #: A call before anything is known of it: what is not `fixed` is 0.
        self._blank: dict[str, Any] = dict.fromkeys(_structures[name][1], 0)
        fixed["single"] = dtype is torch.float32
        self._blank |= {field: x for field, x in fixed.items() if field in self._blank}
        own = (dtype,) if dtype in _FLOATS else ()  # C knows no other: nothing fits
        #: What a tensor must be: its dtypes; how many bytes it has for each of what; whether C
        #: writes to it; the bits of its address that are 0; and, where samples may lie apart, which
        #: field says how far, and shape and strides of one.
        self.fields: dict[str, tuple[Any, int, str, bool, int, tuple[Any, ...]]] = {}
        #: The columns of a new one, or None; and its dtype, where that is not the call's.
        self._new: dict[str, tuple[int | None, torch.dtype | None]] = {}
        for part in parts:
            listed = {x: size for size, many in _SIZES[part].items() for x in many.split()}
            if listed.keys() != _pointers[part].keys():
                raise differing(part, listed.keys() ^ _pointers[part].keys())
            for field, (kind, written) in _pointers[part].items():
                per, *factors = listed[field].split()
                if per not in ("samples", "entries"):
                    per, factors = "", [per, *factors]
                shape = tuple(sizes.get(x, 0) for x in factors)
                dtypes = _DTYPES.get(kind, own)
                unit, size, apart = sum(x.itemsize for x in dtypes[:1]), prod(shape), ()
                if (part, field) in _STRIDES:
                    strides = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
                    apart = _STRIDES[part, field], shape, strides
                    self._blank[apart[0]] = size  # how far where nothing lies between
                self.fields[field] = dtypes, size * unit, per, written, unit - 1, apart
                new = size if shape else None, _OTHERS.get(field)
                self._new[field] = kinds.setdefault(new, new)

    def addresses(
        self, n: int, given: dict[str, Tensor | None], made: tuple[str, ...] = ()
    ) -> tuple[dict[str, Any], list[Tensor]] | None:
        """A call for n samples with what is given, and with new tensors for what C is to make.

        None where C cannot read one that is given. The caller keeps `given` until C returns: a copy
        of what does not lie in one piece takes its place there. The first one given has the dtype
        of the call.
        """
        call, fields, new = self._blank.copy(), self.fields, []
        call["samples"] = call["unsolved"] = n
        like, kind, x = _NOTHING
        try:
            for name, x in given.items():
                if x is None:
                    continue
                dtypes, width, per, written, low, apart = fields[name]
                count = n if per == "samples" else x.shape[0] if per else 1
                if (
                    type(x) not in _PLAIN
                    or not x.is_cpu
                    or x.dtype not in dtypes
                    or x.nbytes != count * width
                    or x.is_neg()
                ):
                    return None
                if not x.is_contiguous() and not (apart and _lies_apart(x, n, apart, call)):
                    if written:  # a copy of it would be
                        return None
                    x = given[name] = x.contiguous()
                call[name] = place = x.data_ptr()
                # Zeros that torch never wrote have none; numbers from elsewhere may lie anywhere.
                if place & low or (not place and width):
                    return None
                like = x if like is None else like
            for name in made:
                before, (columns, dtype) = kind, (kind := self._new[name])
                if kind is before:  # once more, which is faster
                    x = torch.empty_like(new[-1])
                elif dtype is not None:
                    x = like.new_empty(n, dtype=dtype)
                elif columns is None:
                    x = like.new_empty(n)
                else:
                    x = like.new_empty(n, columns)
                call[name] = x.data_ptr()
                new.append(x)
            if type(x) is not Tensor and made:
                return None
        except RuntimeError:  # seen through torch.func, or sparse: its numbers are elsewhere
            return None
        return call, new


def _lies_apart(x: Tensor, n: int, apart: tuple[Any, ...], call: dict[str, Any]) -> bool:
    """Can C find each sample of x where the call says how far it is to the next? It says so now."""
    told, shape, strides = apart
    if x.shape != (n, *shape) or x.stride()[1:] != strides:
        return False
    call[told] = x.stride(0)
    return True


@final
class Calls(dict[tuple[str, torch.dtype], Arrays]):
    """The `Arrays` of each structure and dtype, for one plan."""

    def __init__(self, sizes: Mapping[str, int], **fixed: int) -> None:
        super().__init__()
        self._sizes, self._fixed = sizes, fixed

    def __missing__(self, key: tuple[str, torch.dtype]) -> Arrays:
        found = self[key] = Arrays(key[0], self._sizes, key[1], **self._fixed)
        return found


@final
class Laid:
    """A plan as C takes it, at `address`; and what it was made of, which C reads by address."""

    def __init__(self, name: str, plan: Plan) -> None:
        kind, fields = _structures[name]
        arrays: dict[str, Tensor | None] = dict(plan.arrays)
        found = Arrays(name, _sizes_of(plan), None).addresses(0, arrays)
        if found is None:
            raise ValueError(f"an array of this {name} has not the size or dtype that C expects.")
        values = {x: found[0][x] for x in arrays} | plan.sizes
        if not values.keys() <= fields:
            raise differing(name, values.keys() - fields)
        self.plan: Plan = plan
        self._structure = kind(**values)
        self.address: int = addressof(self._structure)


def _sizes_of(plan: Plan) -> dict[str, int]:
    """The sizes of a plan, and those that follow from them."""
    sizes = dict(plan.sizes)
    if "row_start" in plan.arrays:
        triangle = sizes["kept"] * (sizes["kept"] + 1) // 2
        for name, count in (
            ("row", sizes["rows"]),
            ("output", sizes["outputs"]),
            ("entry", triangle),
        ):
            sizes[f"{name}_ends"] = count + 1
            sizes[f"{name}_entries"] = int(plan.arrays[f"{name}_start"][-1])
    if sizes.get("worked"):
        tiled = -(-sizes["worked"] // 3) * 3
        counts = {"given": sizes["given"], "worked": sizes["worked"]}
        counts["pairs"] = tiled * (tiled + 1) // 2
        sizes |= {f"{name}_filled": -(-count // _SPAN) * _SPAN for name, count in counts.items()}
    return sizes
