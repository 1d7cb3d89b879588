"""taut.project refuses what cannot be a problem; every message quotes what it received."""

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
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


# Mistakes that newcomers make: each message names what to do

RECTIFIED = r"pass lower=0\.0, which clips them, or take \"exp\""
SHARES = r"\"exp\" with Σz = 1: project\(v, torch\.ones\(1, K\)"


@pytest.mark.parametrize(
    ("activation", "match"),
    [
        *((name, RECTIFIED) for name in ("relu", "ReLU", "softplus", F.softplus, torch.relu)),
        *((name, SHARES) for name in ("softmax", torch.softmax, torch.nn.Softmax(-1))),
        ("srelu", "Did you mean 'srlu'"),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_activations_of_other_libraries_are_told(activation, match):
    with pytest.raises((TypeError, ValueError), match=match) as caught:
        taut.Projection(T(1, 5), activation=activation)
    assert ("'srlu'" in str(caught.value)) == (activation == "srelu")


def test_no_rectifier_is_called_srlu():
    """Its range is all of ℝ, and theirs is not, or they are not increasing."""
    for name in ("gelu", "elu", "selu", "prelu", "silu"):
        with pytest.raises(ValueError, match="unknown activation") as caught:
            taut.Projection(T(1, 5), activation=name)
        assert "Did you mean" not in str(caught.value)


def test_outputs_are_the_last_dimension():
    v, layer = torch.randn(2, 3, 8, 9), taut.Projection(T(1, 3), T(1), activation="exp")
    match = r"Outputs are the last dimension: pass v\.movedim\(1, -1\).*z\.movedim\(-1, 1\)"
    raises(match, v, T(1, 3), T(1))
    raises(match, v, T(1, 3), T(1), upper=0.5)
    raises(match, v, None, None, G=T(1, 3), lower=0.0)
    raises(match, v, None, None, lower=torch.zeros(3))
    with pytest.raises(ValueError, match=match):
        layer(v)
    assert_close(layer(v.movedim(1, -1)).movedim(-1, 1), v.softmax(1))


def test_the_b_of_one_equation_has_a_last_dimension():
    match, v = r"last dimension too: b\.unsqueeze\(-1\)\.", torch.randn(4, 3)
    layer = taut.Projection(T(1, 3))
    raises(match, v, T(1, 3), T(4))
    raises(match, v, T(1, 3), 1.0)
    raises(match, v, T(1, 3), T(4), upper=9.0)
    for call in (lambda: layer(v, T(4)), lambda: taut.Projection(T(1, 3), T(4))):
        with pytest.raises(ValueError, match=match):
            call()
    assert layer(v, T(4).unsqueeze(-1)).shape == (4, 3)


def test_numbers_of_classes_are_no_targets():
    v, y = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    layer = taut.Projection(T(1, 3), T(1), activation="exp")
    solution = layer.solve(v)
    match = r"numbers of classes, pass torch\.nn\.functional\.one_hot\(y, 3\)\.to\(v\.dtype\)"
    for call in (
        lambda: layer.loss(v, y),
        lambda: taut.matched_loss(solution, y),
        lambda: taut.bregman_loss(solution.u, y, "exp"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    assert_close(layer.loss(v, F.one_hot(y, 3).to(v.dtype)), F.cross_entropy(v, y))


AS_A_TENSOR = {
    "+": lambda s, v: s + 1,
    "1 -": lambda s, v: 1 - s,
    "tensor *": lambda s, v: v * s,
    "@": lambda s, v: s @ v.mT,
    "−": lambda s, v: -s,
    ">": lambda s, v: s > 0,
    "index": lambda s, v: s[0],
    "len": lambda s, v: len(s),
    "mean": lambda s, v: torch.mean(s),
    "stack": lambda s, v: torch.stack([s, s]),
    "loss": lambda s, v: F.mse_loss(s, v),
    "module": lambda s, v: torch.nn.CrossEntropyLoss()(s, v),
    "method": lambda s, v: s.mean(),
    "shape": lambda s, v: s.shape,
    "numpy": lambda s, v: np.asarray(s),
    "project": lambda s, v: taut.project(s, T(1, 3), T(1)),
    "bregman_loss": lambda s, v: taut.bregman_loss(s, v, "exp"),
}


@pytest.mark.parametrize("use", AS_A_TENSOR)
def test_a_solution_is_no_tensor(use):
    v = torch.randn(4, 3)
    solution = taut.project(v, T(1, 3), T(1), activation="exp")
    with pytest.raises((TypeError, AttributeError), match=r"use solution\.z"):
        AS_A_TENSOR[use](solution, v)
    with pytest.raises(AttributeError, match=r"a Solution has no 'x'\.$"):
        print(solution.x)


class Frame:
    """The interface of another library, as polars has it: names of columns, and numbers."""

    def __init__(self, columns):
        self._columns = columns

    @property
    def columns(self):
        return list(self._columns)

    def __getitem__(self, names):
        if isinstance(names, str):
            return Frame({names: self._columns[names]})
        return Frame({name: self._columns[name] for name in names})

    def to_numpy(self):
        return np.stack([np.asarray(x) for x in self._columns.values()], -1)


FRAMES = {"pandas": pd.DataFrame, "another": Frame}
each_frame = pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES.keys())


@each_frame
def test_names_of_columns_must_agree(frame):
    y = frame({"food": [3.0, 4.0], "fuel": [1.0, 2.0], "total": [5.0, 5.0]})
    A = frame({"total": [-1.0], "food": [1.0], "fuel": [1.0]})
    match = r"\['food', 'fuel', 'total'\] in {}, and \['total', 'food', 'fuel'\] in {}"
    for call, names in (
        (lambda: taut.reconcile(y, A, [0.0], activation="exp"), "yA"),
        (lambda: taut.project(y, A, [0.0]), "vA"),
        (lambda: taut.reconcile(y, G=A, lower=0.0), "yG"),
        (lambda: taut.project(y, G=A, lower=0.0), "vG"),
        (lambda: taut.project(y.to_numpy(), A[list(y.columns)], [0.0], G=A, lower=0.0), "AG"),
    ):
        with pytest.raises(ValueError, match=match.format(*names)) as caught:
            call()
        assert f"{names[1]} = {names[1]}[list({names[0]}.columns)]" in str(caught.value)
    z = taut.reconcile(y, A[list(y.columns)], [0.0], activation="exp").z
    assert_close(z[:, 0] + z[:, 1], z[:, 2])
    as_arrays = taut.reconcile(y.to_numpy(), A[list(y.columns)].to_numpy(), [0.0], activation="exp")
    assert_close(z, as_arrays.z)


def test_frames_without_names_are_arrays():
    y = pd.DataFrame({"a": [3.0], "b": [1.0]})
    right = taut.project([[3.0, 1.0]], [[1.0, 2.0]], [2.0]).z
    assert_close(taut.project(y, pd.DataFrame([[1.0, 2.0]]), [2.0]).z, right)
    turned = pd.DataFrame([[1.0, 2.0]]).iloc[:, ::-1]
    with pytest.raises(ValueError, match=r"\[0, 1\] in v, and \[1, 0\] in A"):
        taut.project(pd.DataFrame([[3.0, 1.0]]), turned, [2.0])


@each_frame
def test_a_column_of_text_is_named(frame):
    y = frame({"country": ["a", "b"], "x": [1.0, 2.0], "y": [1.0, 2.0]})
    match = r"column 'country' holds no numbers.*Leave that column out"
    with pytest.raises(TypeError, match=match):
        taut.reconcile(y, T(1, 3), [1.0])
    raises(match, T(2, 3), y, T(2), error=TypeError)
