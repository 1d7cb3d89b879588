"""Blocks, one after the other or in processes, and what to print when one fails."""

import itertools
import multiprocessing
import signal
from collections.abc import Iterator
from types import FrameType

import numpy as np
import torch

import taut
from fuzzing.bits import check_bits
from fuzzing.blocks import MOST, Block, make_block
from fuzzing.checks import Answer, check_samples
from fuzzing.curves import check_curves
from fuzzing.doors import check_doors
from fuzzing.extremes import check_extremes
from fuzzing.gradients import check_gradients
from fuzzing.held import check_held
from fuzzing.optimal import check_optimal, look_closely
from fuzzing.proofs import prove
from fuzzing.scales import check_scales
from fuzzing.tally import Failure, Tally, count_block
from fuzzing.tangents import check_tangents
from fuzzing.transforms import check_transforms
from fuzzing.within import Within, make_within

PATIENCE = 180  # seconds after which a block counts as hanging
KINDS = ("equations", "inequalities")
_BITS_EVERY = 7  # coprime to the number of activations, so that all get their turn


class Hang(Exception):
    """A block did not come back."""


def _alarm(number: int, frame: FrameType | None) -> None:
    raise Hang(f"no answer within {PATIENCE} s")


def make(seed: int, number: int, most: int, kind: str = "equations") -> Block | Within:
    """The block of that kind and number."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}; got {kind!r}.")
    return make_block(seed, number, most) if kind == KINDS[0] else make_within(seed, number, most)


def run_block(seed: int, number: int, most: int = MOST, kind: str = "equations") -> Tally:
    """Make, solve and check one block."""
    block = make(seed, number, most, kind)
    previous = signal.signal(signal.SIGALRM, _alarm)
    signal.alarm(PATIENCE)
    try:
        solution = block.solve()
        answer = Answer.of(solution)
        signal.alarm(PATIENCE)
        if isinstance(block, Within):
            return _checked_within(block, answer, solution)
        again = check_bits(block) if number % _BITS_EVERY == 0 else []
    except (Hang, RuntimeError, ValueError, IndexError) as error:
        # Whatever the batch holds, project must come back with a verdict on every sample.
        return _no_answer(block, error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    return _checked(block, answer, again + check_scales(block, solution))


def _no_answer(block: Block | Within, error: Exception) -> Tally:
    check = f"project returns ({type(error).__name__}: {str(error)[:200]})"
    tally = Tally(samples=len(block), blocks=1)
    tally.checks[check] += len(block)
    tally.failures.append(_failure(block, 0, check))
    return tally


def _checked(block: Block, answer: Answer, again: list[tuple[int, str]]) -> Tally:
    found = [
        (int(row), check)
        for check, mask in check_samples(block, answer).items()
        for row in np.flatnonzero(mask)
    ]
    proofs = prove(block, answer)
    found += proofs.failures
    wrong = {row for row, _ in found}
    gradients, compared = check_gradients(block)
    curves, curved = check_curves(block.seed, block.number)
    extremes, claimed = check_extremes(block.seed, block.number)
    still, asked = check_transforms(block.seed, block.number)
    found += again + gradients + check_doors(block) + check_held(block) + curves + extremes + still
    counts = [proofs.counts, compared, curved, claimed, asked]
    return _counted(block, answer, found, wrong, counts)


def _checked_within(block: Within, answer: Answer, solution: taut.Solution) -> Tally:
    found = [
        (int(row), check)
        for check, mask in check_optimal(block, answer, solution).items()
        for row in np.flatnonzero(mask)
    ]
    closely, counts = look_closely(block, answer, solution)
    found += closely
    wrong = {row for row, _ in found}
    tangents, compared = check_tangents(block)
    found += tangents + check_held(block) + check_scales(block, solution)
    return _counted(block, answer, found, wrong, [counts, compared])


def _counted(
    block: Block | Within, answer: Answer, found: list, wrong: set[int], counts: list
) -> Tally:
    tally = count_block(block, answer, wrong)
    for some in counts:
        tally.looked_at.update(some)
    tally.checks.update(check for _, check in found)
    kept: dict[str, int] = {}
    for row, check in found:
        kept[check] = kept.get(check, 0) + 1
        if kept[check] <= 2:
            tally.failures.append(_failure(block, row, check, answer))
    return tally


def _failure(block: Block | Within, row: int, check: str, answer: Answer | None = None) -> Failure:
    kind = KINDS[isinstance(block, Within)]
    what, rows = ("A", block.A) if isinstance(block, Block) else ("[A; G]", block.C)
    I, K = rows.shape[1:]
    about = (
        f"{block.law.activation.name}, {np.dtype(block.dtype).name}, "
        f"{block.kind} {what} ({I}, {K}) "
        f"{'shared' if block.shared else 'per sample'}, target {block.targets[block.target[row]]}, "
        f"|v| ≤ {np.abs(block.v[row]).max():.3g}"
    )
    if answer is not None:
        about += f", status {answer.status[row]}, residual {answer.residual[row]:.3g}"
    return Failure(block.seed, block.number, block.most, row, check, about, kind)


def reproducer(failure: Failure) -> str:
    """A snippet that rebuilds the sample and shows the check that failed."""
    place = f"{failure.seed}, {failure.block}, {failure.most}, {failure.kind!r}"
    return f"""\
# FAILED: {failure.check}
# {failure.about}
# run with: PYTHONPATH=benchmarks .venv/bin/python
import taut
from fuzzing.runner import make, replay

block, sample = make({place}), {failure.sample}
problem = block.one(sample)  # v, A, b, init, and what else there is
solution = block.project(problem)
print(taut.Status(solution.status).name, solution.residual, solution.iterations)
print(replay({failure.sample}, {place}))  # the checks that fail for this sample within its block
"""


def replay(row: int, seed: int, number: int, most: int, kind: str = "equations") -> list[str]:
    """The checks that a sample of a block fails, neighbours and gradients included."""
    block = make(seed, number, most, kind)
    if isinstance(block, Within):
        solution = block.solve()
        answer = Answer.of(solution)
        checks = check_optimal(block, answer, solution).items()
        others = look_closely(block, answer, solution)[0] + check_tangents(block)[0]
        others += check_scales(block, solution)
        return [c for c, mask in checks if mask[row]] + [c for r, c in others if r == row]
    solution = block.solve()
    answer = Answer.of(solution)
    failed = [check for check, mask in check_samples(block, answer).items() if mask[row]]
    failed += [check for r, check in prove(block, answer).failures if r == row]
    others = check_gradients(block)[0] + check_bits(block) + check_curves(seed, number)[0]
    others += check_scales(block, solution) + check_transforms(seed, number)[0]
    return failed + [check for r, check in others if r == row]


def _initialise() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop


def _run(task: tuple[int, int, int, str]) -> Tally:
    return run_block(*task)


def run_blocks(
    seed: int, first: int, most: int, processes: int, kinds: tuple[str, ...] = KINDS
) -> Iterator[Tally]:
    """Tallies of block after block, of each kind in turn, without end; close it to stop."""
    tasks = ((seed, number, most, kind) for number in itertools.count(first) for kind in kinds)
    if processes == 0:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield from map(_run, tasks)
        finally:
            torch.set_num_threads(threads)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, initializer=_initialise) as pool:
        # A bounded look-ahead: imap would read an endless generator to its end.
        waiting = [pool.apply_async(_run, (next(tasks),)) for _ in range(2 * processes)]
        while True:
            done = waiting.pop(0)
            waiting.append(pool.apply_async(_run, (next(tasks),)))
            yield done.get()
