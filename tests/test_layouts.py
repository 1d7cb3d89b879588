"""Whatever dtype, layout, device and shape a tensor has: the answer of a plain one, or words.

`make sanitize` runs this too, with a kernel that stops at the first number that it reads or writes
beside its arrays.
"""

from inspect import signature

import numpy as np
import pytest
import torch
from torch.nn import Parameter
from torch.testing import assert_close

import taut
from taut import LagrangeMemory, Projection, project
from taut.backends import available, pull_stably
from taut.backends.arrays import Arrays
from taut.systems import solve_stably

pytestmark = [
    pytest.mark.usefixtures("as_user"),
    pytest.mark.filterwarnings("ignore::taut.FailureWarning"),  # of targets, as v is one of them
]
K, I, SAMPLES = 5, 2, 9
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
OTHERS = [torch.int64, torch.int8, torch.bool, torch.complex64, torch.complex128]


def spread(x):
    """Every second number of a wider tensor, whose others would be noticed."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def inside(x):
    """In the middle of a larger tensor."""
    around = torch.full([size + 2 for size in x.shape], torch.nan, dtype=x.dtype)
    return around[tuple(slice(1, -1) for _ in x.shape)].copy_(x)


def at_odd_bytes(x):
    """Where no number of its size should begin."""
    found = torch.frombuffer(bytearray(x.nbytes + 1), dtype=x.dtype, offset=1)
    return found.copy_(x.flatten()).view(x.shape)


def negative(x):
    """With torch's bit that says: take −x."""
    return torch.complex(torch.zeros_like(x), -x).conj().imag


#: How else the same numbers may lie; the last ones cannot be written to.
LAYOUTS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "spread": spread,
    "inside": inside,
    "at odd bytes": at_odd_bytes,
    "negative": negative,
    "one for all": lambda x: x[:1].expand(x.shape),
    "one number": lambda x: x.flatten()[0].expand(x.shape),
    "parameter": Parameter,
}
WRITTEN = list(LAYOUTS)[:5]


def plain(x):
    """The same numbers, as C takes them."""
    return x.detach().resolve_neg().clone(memory_format=torch.contiguous_format)


def drawn(n=4, dtype=torch.float64):
    """What the calls take, by name."""
    draws = torch.Generator().manual_seed(7)

    def uniform(*shape):
        return torch.rand(*shape, generator=draws, dtype=torch.float64)

    A = (4 * uniform(I, K)).round() - 1.75
    z = 0.3 + 0.4 * uniform(1, K).expand(n, K)  # of one b for all, as layouts may make it so
    given = {"v": 2 * uniform(n, K) - 1, "A": A, "b": z @ A.mT, "y": z, "g": uniform(n, K)}
    given |= {"start": uniform(n, I), "table": uniform(SAMPLES, I), "G": uniform(I, K)}
    given |= {"lower": 0 * z, "upper": 0 * z + 1}
    return {name: x.to(dtype) for name, x in given.items()}


def of_v(v, f, g=None):
    """f(v).z, and the gradient in v, of whatever dtype."""
    v = v.detach().requires_grad_()
    z = f(v)
    dv = torch.autograd.grad(z, v, None if z.ndim == 0 else g.detach().clone().to(z.dtype))
    return z.detach(), dv[0]


def layer_of(A):
    """A layer whose own A has that dtype, as after `.half()`."""
    layer = Projection(plain(A), activation="sigmoid")
    return layer.to(A.dtype) if A.dtype in FLOATS else layer


def loss(v, A, b, y, table):
    layer, memory = layer_of(A), LagrangeMemory(SAMPLES, I)
    memory.multipliers = table.detach()
    index = torch.arange(len(v)).flip(0)
    found = [of_v(v, lambda v: layer.loss(v, y, b, memory=memory, index=index)) for _ in range(2)]
    return *found[0], *found[1], plain(memory.multipliers)


def bare_loss(v, A, b, y):
    layer = layer_of(A)
    return of_v(v, lambda v: layer.loss(v, y, b))


def saturated(v, A, b, g):
    """Slopes lie far apart, and the gradient is found in another basis."""
    far = torch.tensor([60.0, 1.0, 40.0, 1.0, 1.0], dtype=v.dtype)
    return of_v(v, lambda v: project(v * far, A, b, activation="sigmoid").z, g)


def of_each(v, A, b, g):
    return of_v(v, lambda v: project(v, A.expand(len(v), I, K), b, activation="sigmoid").z, g)


def redundant(v, A, b, start, g):
    A, b, start = torch.cat([A, A]), torch.cat([b, b], -1), torch.cat([start, start], -1)
    return of_v(v, lambda v: project(v, A, b, activation="sigmoid", init=start).z, g)


def within(v, G, lower, upper, g):
    sides = {"G": G, "lower": lower[:, :I], "upper": upper[:, :I]}
    return of_v(v, lambda v: project(v, activation="exp", **sides).z, g)


#: Each way to C, and the other public calls on tensors, as functions of what they take.
CALLS = {
    "project": lambda v, A, b, start, g: of_v(
        v, lambda v: project(v, A, b, activation="sigmoid", init=start).z, g
    ),
    "project, redundant": redundant,
    "project, A of each": of_each,
    "project, saturated": saturated,
    "project, bounds": lambda v, A, b, lower, upper, g: of_v(
        v, lambda v: project(v, A, b, lower=lower, upper=upper).z, g
    ),
    "project, rows": within,
    "layer.loss": bare_loss,
    "layer.loss, memory": loss,
    "matched_loss": lambda v, A, b, y: of_v(
        v, lambda v: taut.matched_loss(project(v, A, b, activation="sigmoid"), y)
    ),
    "bregman_loss": lambda v, y: of_v(v, lambda v: taut.bregman_loss(v, y, "sigmoid")),
    "reconcile": lambda g, A, b: (taut.reconcile(g, A, b, activation="sigmoid").z.detach(),),
    "is_certificate": lambda start, A, b: (taut.is_certificate(start, A, 99 * b, "sigmoid"),),
}
CASES = [(call, name) for call in CALLS for name in signature(CALLS[call]).parameters]
each_call = pytest.mark.parametrize("call", CALLS)
each_argument = pytest.mark.parametrize(("call", "name"), CASES)


def answered(call, given):
    return CALLS[call](*(given[name] for name in signature(CALLS[call]).parameters))


def assert_same(found, expected, dtype):
    """To the rounding of what was given, whichever body of the library answers."""
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    eps = torch.finfo(dtype).eps
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y, rtol=1e3 * eps, atol=1e3 * eps)


@pytest.mark.parametrize(("n", "dtype"), [(1, torch.float32), (4, torch.float64)])
@pytest.mark.parametrize("layout", LAYOUTS)
@each_argument
def test_a_layout_changes_nothing(call, name, layout, n, dtype):
    if name == "table" and layout not in WRITTEN:
        pytest.skip("nobody can write to it")
    given = drawn(n, dtype)
    laid = LAYOUTS[layout](given[name])
    if name == "A":  # it may have other numbers now
        given["b"] = given["y"] @ plain(laid).mT
    expected = answered(call, given | {name: plain(laid)})
    assert_same(answered(call, given | {name: laid}), expected, dtype)


@pytest.mark.parametrize("dtype", FLOATS[2:], ids=str)
@pytest.mark.parametrize("layout", [None, "transposed", "one for all"])
@each_call
def test_half_precision_is_those_numbers_in_float32(call, layout, dtype):
    given = drawn(dtype=dtype)
    if layout is not None:
        laid = {name: LAYOUTS[layout](x) for name, x in given.items() if name not in ("A", "table")}
        given |= laid
    found = answered(call, given)
    expected = answered(call, {name: plain(x).float() for name, x in given.items()})
    for x, y in zip(found, expected, strict=True):
        eps = torch.finfo(x.dtype).eps if x.dtype.is_floating_point else 0
        assert_close(x, y.to(x.dtype), rtol=8 * eps, atol=1e-4 + 8 * eps)
    assert found[0].dtype in (torch.float32, torch.bool)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize("other", FLOATS + OTHERS[::2], ids=str)
@each_argument
def test_another_dtype_is_converted_or_refused(call, name, other, dtype):
    """It has the answer of the same numbers in the dtype of the others, or none."""
    given = drawn(dtype=dtype)
    strange = given[name].to(other)
    if name == "table" or (name == "g" and call != "reconcile"):
        pytest.skip("a memory keeps its dtype, and a gradient has that of its z")
    if name == "A" and not other.is_complex:
        given["b"] = given["y"] @ strange.to(dtype).mT
    try:
        found = answered(call, given | {name: strange})
    except (TypeError, ValueError, RuntimeError) as error:  # SolveError: numbers are others now
        assert str(error)
        return
    assert not other.is_complex, "its imaginary part was dropped"
    expected = answered(call, given | {name: strange.to(dtype)})
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y, rtol=1e-2, atol=1e-2, check_dtype=False)


@pytest.mark.parametrize("shape", [(), (0,), (K,), (0, K), (1, K), (2, 0), (2, 3, K), (K, 4)])
@each_argument
def test_a_shape_is_answered_or_refused(call, name, shape):
    """Also one that does not belong to the others: nothing is read beside its end."""
    given = drawn()
    if name in ("b", "start"):
        shape = tuple(I if size == K else size for size in shape)
    odd = torch.full(shape, 0.5)
    try:
        found = answered(call, given | {name: odd})
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        assert str(error)
        return
    assert all(x.isfinite().all() for x in found)


@pytest.mark.filterwarnings("ignore")  # of torch: sparse tensors are beta
@each_argument
def test_a_sparse_tensor_or_one_without_numbers_is_answered_or_refused(call, name):
    given = drawn()
    x = given[name]
    for strange in (x.to("meta"), x.to_sparse(), x.to_sparse_csr()):
        try:
            found = answered(call, given | {name: strange})
        except (TypeError, ValueError, RuntimeError) as error:
            assert str(error)
            continue
        assert not strange.is_meta
        for one, other in zip(found, answered(call, given), strict=True):
            assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_arrays_of_numpy_may_lie_backwards():
    given = {name: x.numpy() for name, x in drawn().items()}
    A, b = (np.ascontiguousarray(given[x][:, ::-1])[:, ::-1] for x in "Ab")
    v = np.ascontiguousarray(given["v"][::-1])[::-1]
    assert min(*v.strides, *A.strides, *b.strides) < 0
    expected = project(given["v"], given["A"], given["b"], activation="sigmoid").z
    assert torch.equal(project(v, A, b, activation="sigmoid").z, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", range(5))
def test_layouts_of_a_weighted_elimination(place, layout):
    """It is called with whatever derivatives of any order are made of."""
    A, w, g_z, g_u, g_ν = (torch.rand(3, *size) for size in ((I, K), (K,), (K,), (K,), (I,)))
    given = [A, w, g_z, g_u, g_ν]
    given[place] = LAYOUTS[layout](given[place])
    with torch.no_grad():
        for matrix in (given[0], given[0][:1]):
            found = pull_stably(matrix, given[1], None, *given[2:])
            expected = solve_stably(plain(matrix), plain(given[1]), None, *map(plain, given[2:]))
            assert_close(list(found), list(expected), rtol=1e-9, atol=1e-9)


# The one place where addresses are made

SIZES = {"given": 3, "constraints": 2, "outputs": 4, "rows": 4, "equations": 2}
STRUCTURES = ["solve", "backward", "stable", "within", "pull", "loss", "train"]


def fitting(dtype):
    """Each array of each call, for 5 samples: by structure and field, a tensor that fits it."""
    for name in STRUCTURES:
        for field, (kinds, width, per, *_) in Arrays(name, SIZES, dtype).fields.items():
            count = width // kinds[0].itemsize
            rows = {"samples": 5, "entries": 7}.get(per, 1)
            yield name, field, torch.zeros(rows, count, dtype=kinds[0])


@pytest.mark.skipif(available() == "torch", reason="no kernel")
@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
def test_no_address_of_what_does_not_fit(dtype):
    """Of another dtype, size or device, or written to and not in one piece."""
    for name, field, x in fitting(dtype):
        call = Arrays(name, SIZES, dtype)

        def refused(x, call=call, field=field):
            return call.addresses(5, {field: x}) is None

        assert not refused(x), (name, field)
        wrong = [x.to(kind) for kind in FLOATS + OTHERS if kind.itemsize != x.dtype.itemsize]
        wrong += [x.to("meta"), x.to_sparse(), x[:, :-1], torch.cat([x, x], -1)]
        wrong += [at_odd_bytes(x)] if x.itemsize > 1 else []
        wrong += [] if field == "table" else [x[1:], torch.cat([x, x])]
        wrong += [negative(x)] if x.dtype == dtype else []
        for y in wrong:
            assert refused(y), (name, field, y.dtype, y.shape)
        for half in FLOATS[2:]:
            assert Arrays(name, SIZES, half).addresses(5, {field: x.to(half)}) is None
