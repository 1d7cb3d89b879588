"""A small slice of `make fuzz`: many little blocks, every check, the same rows every time."""

import numpy as np
import pytest

from fuzzing.blocks import make_block
from fuzzing.checks import Answer, check_rows
from fuzzing.laws import LABELS
from fuzzing.runner import reproducer, run_block
from fuzzing.tally import Tally
from tables import SEED


def _run(label, blocks):
    tally = Tally()
    for number in range(LABELS.index(label), blocks * len(LABELS), len(LABELS)):
        tally.merge(run_block(seed=SEED, number=number, most=32))
    assert tally.silent_wrong == 0 and not tally.checks, reproducer(tally.failures[0])
    return tally


@pytest.mark.parametrize("label", LABELS)
def test_no_row_is_wrong_in_silence(label):
    assert _run(label, blocks=2).rows > 30


@pytest.mark.slow
@pytest.mark.parametrize("label", LABELS)
def test_no_row_is_wrong_in_silence_in_more_blocks(label):
    assert _run(label, blocks=20).rows > 300


def test_a_block_is_the_same_every_time():
    one, two = make_block(3, 11, 16), make_block(3, 11, 16)
    for name in ("v", "A", "b", "target"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


@pytest.mark.parametrize(
    ("spoil", "check"),
    [
        (lambda a: a.z.__iadd__(1e-6), "CONVERGED: A z = b"),
        (lambda a: a.multipliers.__iadd__(1e-6), "CONVERGED: z = σ(v + Aᵀλ)"),
        (lambda a: a.residual.__iadd__(1e-6), "the residual reported is that of z"),
        (lambda a: a.status.fill(2), "INFEASIBLE: the multipliers are a certificate"),
        (lambda a: a.status.fill(3), "INCONSISTENT: b is not in the range of A"),
        (lambda a: a.status.fill(0), "a row with NaN or inf is called NONFINITE"),
    ],
)
def test_the_checks_notice_what_they_are_for(spoil, check):
    block = make_block(0, 1, 64)  # linear, float64: nothing to be found wrong
    answer = Answer.of(block.solve())
    assert not any(mask.any() for mask in check_rows(block, answer).values())
    spoil(answer)
    assert check_rows(block, answer)[check].any()
