"""The compiled fast path of Newton's method: CPU, one dense A for all samples.

The C files in csrc/ are compiled when the package is installed, if there is a C compiler. They
take the plain steps of Newton's method, as many samples at a time as the processor's vectors hold,
and decide only that a sample is solved; all other samples, and all where the kernel is missing, are
for the torch code. It is compiled three times: v2 for any processor, v3 for AVX2, v4 for AVX-512;
`TAUT_KERNEL=v2`, `v3` or `v4` in the environment forces one, `TAUT_KERNEL=0` turns it off.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from ctypes import Structure, byref, c_double, c_int64, c_uint, c_void_p
from importlib.util import find_spec
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import Parameter

from taut.activation import Activation
from taut.autograd import is_transformed
from taut.plan import Plan, make_plan
from taut.rows import Rows

_LIMIT = 30  # iterations; what takes longer is not easy
_GRAIN = 2**13  # products of two numbers that are worth a thread

# The variants, and up to how many rows each is faster than torch: see benchmarks/variants.py. The
# rule is on A alone, as a sample's bits must not depend on how many others there are.
_MAX_ROWS = {"v2": 256, "v3": 512, "v4": 512}
_VARIANTS = tuple(_MAX_ROWS)
_SIZES = "outputs given rows kept disjoint constraints positive"


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Plan(Structure):
    _fields_ = [
        *_fields(c_int64, _SIZES),
        *_fields(c_void_p, "order a absolute sizes row_start row_output row_value output_start"),
        *_fields(
            c_void_p, "output_row output_value entry_start entry_output entry_value flat inverse"
        ),
        *_fields(c_void_p, "kind plain shift scale temperature lower upper"),
    ]


class _Solve(Structure):
    _fields_ = [
        *_fields(c_void_p, "plan v b start multipliers u z residual iterations solved"),
        *_fields(c_int64, "samples single b_stride limit next unsolved"),
        *_fields(c_double, "target share huge"),
    ]


class _Loss(Structure):
    _fields_ = [
        *_fields(c_void_p, "plan v b y u multipliers loss"),
        *_fields(c_int64, "samples single b_stride next unsolved"),
    ]


class _Backward(Structure):
    _fields_ = [
        *_fields(c_void_p, "plan u g_multipliers g_u g_z status dv db solved"),
        *_fields(c_int64, "samples single next unsolved"),
    ]


def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library and the variant to call; None where it is off, missing or cannot be read."""
    wanted = os.environ.get("TAUT_KERNEL", "")
    if wanted not in ("", "0", *_VARIANTS):
        raise ImportError(f"TAUT_KERNEL must be 0, v2, v3 or v4, or not set; got {wanted!r}.")
    library = None if wanted == "0" else _open()
    if library is None:
        if wanted in _VARIANTS:
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
        library.taut_layout.restype = library.taut_newest.restype = c_int64
    except (OSError, AttributeError):  # built for another machine, or from other sources
        return None
    sizes = (ctypes.sizeof(structure) for structure in (_Plan, _Solve, _Backward, _Loss))
    layout = sum(1000**i * size for i, size in enumerate(sizes))
    return library if library.taut_layout() == layout else None


def _pool() -> Callable[..., None] | None:
    """OpenMP's way to run a function on several threads: on those that torch itself uses."""
    try:
        pool = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    pool.argtypes, pool.restype = [c_void_p, c_void_p, c_uint, c_uint], None
    return pool


_library, _variant = _load()
_parallel = _pool()


def _alone() -> None:
    global _parallel
    _parallel = None


if hasattr(os, "register_at_fork"):  # OpenMP's threads do not survive a fork
    os.register_at_fork(after_in_child=_alone)
_functions = {}
for _name in () if _library is None else ("taut_solve", "taut_backward", "taut_loss"):
    _function = getattr(_library, f"{_name}_{_variant}")
    _function.argtypes, _function.restype = [c_void_p], None
    _functions[_name] = _function, ctypes.cast(_function, c_void_p)


def available() -> bool:
    """Has the kernel been compiled, and is it on?

    >>> isinstance(available(), bool)
    True
    """
    return _library is not None


def variant() -> str | None:
    """The variant in use: v2 for any processor, v3 with AVX2, v4 with AVX-512; None without kernel.

    >>> variant() in (None, "v2", "v3", "v4")
    True
    """
    return _variant or None


def readable(*tensors: Tensor | None) -> bool:
    """Can C read these by their address?

    >>> readable(torch.zeros(2)), readable(torch.zeros(2, device="meta"))
    (True, False)
    """
    return all(
        x is None
        or (
            type(x) in (Tensor, Parameter)
            and x.device.type == "cpu"
            and x.layout == torch.strided
            and not x.is_neg()
            and not is_transformed(x)
        )
        for x in tensors
    )


@final
class Attempt(NamedTuple):
    """What the kernel found, in the dtype of v."""

    multipliers: Float[Tensor, "N I"]
    u: Float[Tensor, "N K"]
    z: Float[Tensor, "N K"]
    residual: Float[Tensor, "N"]
    iterations: Int[Tensor, "N"]
    solved: Bool[Tensor, "N"] | None  # None says that all are


@final
class Kernel:
    """The kernel for one A and one σ."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan  # the structure points into its arrays
        sizes = {name: getattr(plan, name) for name in _SIZES.split()}
        pointers = {name: array.data_ptr() for name, array in plan.arrays.items()}
        self._structure = _Plan(**sizes, **pointers)
        self._address = ctypes.addressof(self._structure)

    def __reduce__(self) -> tuple:
        return type(None), ()  # pointers do not travel, and there may be no kernel elsewhere

    @staticmethod
    def of(rows: Rows, activation: Activation) -> "Kernel | None":
        """Made once for each A and σ; None where it cannot help."""
        if _library is None or rows.kernels is None or torch.compiler.is_compiling():
            return None
        if activation not in rows.kernels:
            plan = make_plan(rows, activation, _MAX_ROWS[_variant])
            rows.kernels[activation] = None if plan is None else Kernel(plan)
        return rows.kernels[activation]

    def solve(
        self,
        v: Float[Tensor, "N K"],
        b: Float[Tensor, "N I"],
        start: Float[Tensor, "N I"] | None,
        target: float,
        limit: int,
    ) -> Attempt:
        """Newton's method from `start`, or 0, in float64; the numbers as in `Newton.solve`."""
        v, b = v.contiguous(), b if b.stride(-1) == 1 else b.contiguous()
        if start is not None:
            start = start.to(v.dtype).contiguous()
        n, dtype = len(v), v.dtype
        u, z = torch.empty_like(v), torch.empty_like(v)
        multipliers = v.new_empty(n, b.shape[-1])
        residual, iterations = v.new_empty(n), v.new_empty(n, dtype=torch.long)
        solved = v.new_zeros(n, dtype=torch.bool)
        tensors = (multipliers, u, z, residual, iterations, solved)
        given = v.data_ptr(), b.data_ptr(), None if start is None else start.data_ptr()
        sizes = (n, dtype == torch.float32, b.stride(0), min(limit, _LIMIT), 0, n)
        reals = (target, 1.0 if target < 1e-12 else 0.01, torch.finfo(dtype).max)
        call = _Solve(self._address, *given, *(x.data_ptr() for x in tensors), *sizes, *reals)
        self._run("taut_solve", call)
        solved = solved if call.unsolved else None
        return Attempt(multipliers, u, z, residual, iterations, solved)

    def backward(
        self,
        u: Float[Tensor, "N K"],
        grads: Sequence[Tensor | None],  # of λ, u and z
        status: Int[Tensor, "N"],
    ) -> tuple[Float[Tensor, "N K"], Float[Tensor, "N I"], Int[Tensor, "bad"] | None]:
        """∂v, ∂b, and where they could not be found; None says nowhere."""
        given = [None if x is None else x.contiguous() for x in (u, *grads, status)]
        dv = torch.empty_like(u)
        db = u.new_empty(len(u), self._plan.constraints)
        solved = u.new_zeros(len(u), dtype=torch.bool)
        pointers = (None if x is None else x.data_ptr() for x in (*given, dv, db, solved))
        call = _Backward(self._address, *pointers, len(u), u.dtype == torch.float32, 0, len(u))
        self._run("taut_backward", call)
        return dv, db, (~solved).nonzero().squeeze(-1) if call.unsolved else None

    def loss(
        self,
        v: Float[Tensor, "N K"],
        b: Float[Tensor, "N I"],
        y: Float[Tensor, "N K"],
        u: Float[Tensor, "N K"],
        multipliers: Float[Tensor, "N I"],
    ) -> Float[Tensor, "N"]:
        """Σψ(y) − yᵀv − bᵀλ + Σφ(u) of each sample."""
        v, y, u, multipliers = (x.contiguous() for x in (v, y, u, multipliers))
        b = b if b.stride(-1) == 1 else b.contiguous()
        n, loss = len(v), v.new_empty(len(v))
        pointers = (x.data_ptr() for x in (v, b, y, u, multipliers, loss))
        call = _Loss(self._address, *pointers, n, v.dtype == torch.float32, b.stride(0), 0, n)
        self._run("taut_loss", call)
        if call.unsolved > 0:
            raise MemoryError("no memory left for the matched loss.")
        return loss

    def _run(self, name: str, call: Structure) -> None:
        """On as many threads as torch uses; each takes the next samples that nobody works on."""
        function, address = _functions[name]
        work = call.samples * self._plan.outputs * (self._plan.kept + 8)
        threads = min(torch.get_num_threads(), work // _GRAIN)
        if threads < 2 or _parallel is None:
            function(byref(call))
        else:
            _parallel(address, byref(call), threads, 0)
