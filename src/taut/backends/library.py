"""The compiled library: which variant this processor can run, its structures, and calls of it."""

import ctypes
import os
from collections.abc import Callable, Iterable
from ctypes import Structure, byref, c_char_p, c_double, c_int64, c_uint, c_void_p
from importlib.util import find_spec
from operator import itemgetter
from struct import Struct
from typing import Any

import torch

_GRAIN = 2**13  # products of two numbers that are worth a thread

# The variants, and up to how many equations each is faster than torch: see benchmarks/variants.py.
# The rule is on A alone, as a sample's bits must not depend on how many others there are.
_MOST = {"v2": 256, "v3": 512, "v4": 512}


def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library and the variant to call; None where it is off or missing."""
    wanted = os.environ.get("TAUT_KERNEL", "")
    if wanted not in ("", "0", *_MOST):
        raise ImportError(f"TAUT_KERNEL must be 0, v2, v3 or v4, or not set; got {wanted!r}.")
    library = None if wanted == "0" else _open()
    if library is None:
        if wanted in _MOST:
            raise ImportError(
                f"TAUT_KERNEL={wanted}, but the kernel was not compiled when taut was installed. "
                "Install it again where there is a C compiler, or unset TAUT_KERNEL."
            )
        return None, ""
    newest = f"v{library.taut_newest()}"
    if wanted > newest:
        raise ImportError(
            f"TAUT_KERNEL={wanted}, but this processor can run variants up to {newest} only. "
            "Unset TAUT_KERNEL, or choose one of those."
        )
    return library, wanted or newest


def _open() -> ctypes.CDLL | None:
    found = find_spec("taut._kernel")
    if found is None or found.origin is None:
        return None
    try:
        library = ctypes.CDLL(found.origin)
        library.taut_newest.restype = c_int64
        library.taut_layout.restype = c_char_p
    except (OSError, AttributeError):  # built for another machine, or from other sources
        return None
    return library


def structures(layout: str) -> dict[str, type[Structure]]:
    """ctypes structures from the library's own text: "Name:type field;type field;", a line each.

    >>> [name for name, _ in structures("Point:double x;const double * y;")["Point"]._fields_]
    ['x', 'y']
    """
    kinds = {"int64_t": c_int64, "double": c_double}
    found = {}
    for line in layout.splitlines():
        name, fields = line.split(":")
        pairs = [field.strip().rsplit(" ", 1) for field in fields.split(";") if field.strip()]
        types = [(field, c_void_p if "*" in kind else kinds[kind]) for kind, field in pairs]
        found[name] = type(name, (Structure,), {"_fields_": types})
    return found


def pointers(layout: str) -> dict[str, dict[str, tuple[str, bool]]]:
    """The arrays of each structure in such a text: of what they are, and whether C writes to them.

    >>> pointers("Point:double x;const double * y;void * z;const Plan * plan;")
    {'point': {'y': ('double', False), 'z': ('void', True)}}
    """
    found: dict[str, dict[str, tuple[str, bool]]] = {}
    for line in layout.splitlines():
        name, fields = line.split(":")
        arrays = found[name.lower()] = {}
        for kind, field in (x.strip().rsplit(" ", 1) for x in fields.split(";") if x.strip()):
            numbers = kind.removeprefix("const ").removesuffix(" *")
            if kind.endswith("*") and not numbers[0].isupper():  # else it is of a structure
                arrays[field] = numbers, not kind.startswith("const ")
    return found


def differing(name: str, fields: Iterable[str]) -> TypeError:
    """The error for fields that only one side knows."""
    return TypeError(f"{name}: library and package differ in {sorted(fields)}.")


def _pool() -> Callable[..., None] | None:
    """OpenMP's way to run a function on several threads: on those that torch itself uses."""
    try:
        pool = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    pool.argtypes, pool.restype = [c_void_p, c_void_p, c_uint, c_uint], None
    return pool


_library, _variant = _load()
_layout = "" if _library is None else _library.taut_layout().decode()
_structures = {
    name.lower(): (kind, {field for field, *_ in kind._fields_})
    for name, kind in structures(_layout).items()
}
_pointers = pointers(_layout)
#: What puts values in the order of a structure's fields, and these into bytes: three times as fast
#: as the structure itself does.
_bytes = {
    name: (
        itemgetter(*(field[0] for field in kind._fields_)),
        Struct("".join("d" if field[1] is c_double else "q" for field in kind._fields_)).pack,
    )
    for name, (kind, _) in _structures.items()
}
_parallel = _pool()


def _function(name: str) -> tuple[Callable[[Any], None], c_void_p]:
    function = getattr(_library, f"taut_{name}_{_variant}", None)
    if function is None:
        raise ImportError(
            f"the compiled kernel knows no {name!r}: it is of other sources than this package. "
            "Install taut again, or set TAUT_KERNEL=0."
        )
    function.argtypes, function.restype = [c_void_p], None
    return function, ctypes.cast(function, c_void_p)


_NAMES = ("solve", "backward", "stable", "loss", "train", "within", "pull", "one", "trail")
_functions = {} if _library is None else {name: _function(name) for name in _NAMES}


def _alone() -> None:
    global _parallel
    _parallel = None


if hasattr(os, "register_at_fork"):  # OpenMP's threads do not survive a fork
    os.register_at_fork(after_in_child=_alone)


def variant() -> str | None:
    """The variant in use: v2 for any processor, v3 with AVX2, v4 with AVX-512; None without.

    >>> variant() in (None, "v2", "v3", "v4")
    True
    """
    return _variant or None


def run(name: str, values: dict[str, Any] | Structure, work: int) -> Any:
    """Call C, on as many threads as torch uses; what it was given, as C leaves it.

    Its `unsolved` is the number of samples that are open. Each thread takes the next samples that
    nobody works on. `work` is in products of two numbers.
    """
    function, address = _functions[name]
    call: Any = values
    if isinstance(values, dict):
        kind, fields = _structures[name]
        ordered, pack = _bytes[name]
        try:
            call = kind.from_buffer_copy(pack(*ordered(values)))
        except KeyError:
            raise differing(name, values.keys() ^ fields) from None
        if len(values) != len(fields):
            raise differing(name, values.keys() ^ fields)
    threads = work // _GRAIN
    if threads > 1:
        threads = min(torch.get_num_threads(), threads)
    if threads < 2 or _parallel is None:
        function(byref(call))
    else:
        _parallel(address, byref(call), threads, 0)
    return call
