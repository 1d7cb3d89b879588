"""taut.project refuses what cannot be a problem; every message quotes what it received."""

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from torch.testing import assert_close

import taut

pytestmark = pytest.mark.usefixtures("as_user")


def raises(match, v, A, b, error=ValueError, **options):
    with pytest.raises(error, match=match):
        taut.project(v, A, b, **options)


T = torch.ones


SHAPES = {
    "A has other columns": ((4, 5), (2, 3), (2,), r"one column for each of the K = 5.*A \(2, 3\)"),
    "A is transposed": ((4, 5), (5, 2), (2,), r"A \(5, 2\).*Is A transposed\?"),
    "A of another batch": ((4, 5), (3, 2, 5), (4, 2), r"batch dimensions of v, \(4,\).*A \(3, 2"),
    "A batched, v not": ((5,), (3, 2, 5), (2,), r"batch dimensions of v, \(\).*A \(3, 2, 5\)"),
    "b of other rows": ((4, 5), (2, 5), (4, 3), r"\(4, 2\), an entry per row.*b \(4, 3\)"),
    "b of another batch": ((4, 5), (2, 5), (3, 2), r"b must be.*b \(3, 2\)"),
    "b batched, v not": ((5,), (2, 5), (3, 2), r"b must be.*b \(3, 2\)"),
    "v is a number": ((), (2, 5), (2,), r"v must be \(\*batch, K\).*v \(\)"),
    "A is a vector": ((5,), (5,), (1,), r"A \(I, K\) or.*A \(5,\)"),
    "b is a number": ((5,), (1, 5), (), r"b \(\*batch, I\).*b \(\)"),
    "A without columns": ((4, 0), (2, 0), (2,), r"no outputs \(K = 0\).*A \(2, 0\)"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_wrong_shapes_are_quoted(name):
    v, A, b, match = SHAPES[name]
    raises(match, T(v), T(A), T(b))


@pytest.mark.parametrize("shape", [(3,), (3, 2), (4, 3)])
def test_wrong_init_is_quoted(shape):
    match = rf"init must be.*= \(4, 2\); got \({shape[0]}"
    raises(match, T(4, 5), T(2, 5), T(2), init=T(shape))


@pytest.mark.parametrize("dtype", [torch.complex128, torch.bool], ids=str)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_wrong_dtypes_are_named(which, dtype):
    tensors = [T(4, 5), T(2, 5), T(4, 2)]
    tensors[which] = tensors[which].to(dtype)
    match = rf"{'vAb'[which]} must hold (real|floating) numbers; got {dtype}"
    raises(match, *tensors, error=TypeError)


def test_a_v_of_integers_is_not_a_prediction():
    raises("v must hold floating numbers", T(4, 5).long(), T(2, 5), T(2), error=TypeError)


@pytest.mark.parametrize("which", [1, 2])
def test_dtypes_must_agree(which):
    tensors = [T(4, 5).float(), T(2, 5).float(), T(2).float()]
    tensors[which] = tensors[which].double()
    name = "vAb"[which]
    match = rf"v is torch.float32 and {name} is torch.float64.*convert {name} with {name}.to\(v"
    raises(match, *tensors, error=TypeError)


def test_devices_must_agree():
    raises("on one device; got v on cpu, A on meta", T(4, 5), T(2, 5, device="meta"), T(2))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_holds_no_numbers_is_refused(which):
    tensors = [T(5), T(2, 5), T(2)]
    tensors[which] = {"a": 1}
    match = rf"{'vAb'[which]} must be a tensor, or a list or array of numbers; got dict"
    raises(match, *tensors, error=TypeError)


def test_an_activation_in_the_place_of_b_is_told():
    match = r"numbers; got 'exp'\. An activation goes by its name: activation=…\."
    raises(match, T(5), T(2, 5), "exp", error=TypeError)


def test_a_memory_is_no_init():
    memory, layer = taut.LagrangeMemory(2, 2), taut.Projection(T(2, 5))
    match = r"init must hold the multipliers of these samples: init=memory\[index\]"
    raises(match, T(2, 5), T(2, 5), T(2), error=TypeError, init=memory)
    with pytest.raises(TypeError, match=match):
        layer.solve(T(2, 5), T(2), memory)
    raises(match, T(2, 5), T(2, 5), T(2), error=TypeError, init=memory, h=lambda z: z[:, :1])


def test_arrays_of_any_kind_are_numbers():
    """Of pandas; read-only and reversed ones, whose memory torch does not take."""
    asked, A = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[1.0, 2.0, 3.0], [1.0, 0.0, 0.0]])
    v = torch.zeros(2, 3, dtype=torch.float64)
    fixed = asked.copy()
    fixed.flags.writeable = False
    reversed_ = asked[::-1, ::-1].copy()[::-1, ::-1]
    expected = taut.project(v, torch.tensor(A), torch.tensor(asked)).z
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for b in (fixed, reversed_, pd.DataFrame(asked), np.asfortranarray(asked)):
            assert torch.equal(taut.project(v, pd.DataFrame(A), b).z, expected)
            turned = pd.DataFrame(b).iloc[:, ::-1]
            assert_close(taut.Projection(A[::-1])(v, turned), expected)


class Strange:
    """An array interface with no more than it must have."""

    @property
    def __array_interface__(self):
        return {"shape": (1, 3), "typestr": "<f4", "data": bytes(12), "version": 3}


def test_an_odd_array_is_refused_in_words():
    raises("A must be a tensor, or a list .* got Strange", T(3), Strange(), T(1), error=TypeError)


def test_on_failure_has_two_values():
    raises('on_failure must be "raise" or "return"; got', T(5), T(2, 5), T(2), on_failure="ignore")
