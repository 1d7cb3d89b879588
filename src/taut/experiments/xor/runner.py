"""Chunks of runs over processes.

The tensors of a chunk are small, and one thread each is what they are worth: two processes of one
thread are about twice as fast as one process of two threads. A run does not notice in which chunk
or process it is trained.
"""

import multiprocessing
import queue
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from taut.experiments.xor.folder import Arrays, Chunk, Folder
from taut.experiments.xor.settings import Settings, Variant, variant_named
from taut.experiments.xor.teacher import load_teacher
from taut.experiments.xor.threads import one_thread
from taut.experiments.xor.training import train

# 125 runs of 100 patterns: 500 kB for each tensor of a batch, which stays in the cache.
CHUNK = 125

_LONGEST_FIRST = ("newton", "scratch", "history", "free")

OnEpoch = Callable[[int], None]  # how many runs have finished another epoch


def plan(folder: Folder, variants: list[Variant], workers: int) -> list[Chunk]:
    """What is left to do, the longest first, in chunks that keep all workers busy.

    >>> import tempfile
    >>> from taut.experiments.xor.folder import open_folder
    >>> folder = open_folder(Path(tempfile.mkdtemp()), Settings(runs=4))
    >>> [chunk.filename for chunk in plan(folder, [variant_named("newton")], workers=2)]
    ['newton-000000-000001.npz', 'newton-000002-000003.npz']
    """
    names = sorted((variant.name for variant in variants), key=_LONGEST_FIRST.index)
    left = [name for name in names if not folder.is_complete(name)]
    # A chunk takes little longer with more runs in it, so make more of them only for idle workers.
    parts = -(-workers // max(1, len(left)))
    size = min(CHUNK, -(-folder.settings.runs // parts))
    return [chunk for name in left for chunk in folder.missing(name, size)]


def execute(
    folder: Folder, chunks: list[Chunk], workers: int, device: str, on_epoch: OnEpoch
) -> None:
    """Train all `chunks` and save each in the folder as it is finished."""
    folder.teacher()
    workers = min(workers, len(chunks))
    if workers > 1:
        _in_processes(folder, chunks, workers, device, on_epoch)
        return
    with one_thread():
        for chunk in chunks:
            size = len(chunk.runs)
            teacher = folder.teacher_path
            record = _train_chunk(
                folder.settings, teacher, chunk, device, lambda n=size: on_epoch(n)
            )
            folder.save(chunk, record)


def _train_chunk(
    settings: Settings, teacher: Path, chunk: Chunk, device: str, on_epoch: Callable[[], None]
) -> Arrays:
    seeds = [settings.run_seeds[run] for run in chunk.runs]
    variant = variant_named(chunk.variant)
    record = train(settings, load_teacher(teacher), variant, seeds, device, on_epoch)
    return {name: values.numpy() for name, values in record.items()}


def _in_processes(
    folder: Folder, chunks: list[Chunk], workers: int, device: str, on_epoch: OnEpoch
) -> None:
    # "spawn": a forked child of a process that has used torch's threads can hang.
    context = multiprocessing.get_context("spawn")
    tasks, messages = context.Queue(), context.Queue()
    for chunk in [*chunks, *[None] * workers]:
        tasks.put(chunk)
    arguments = (tasks, messages, folder.settings, folder.teacher_path, device)
    processes = [context.Process(target=_work, args=arguments, daemon=True) for _ in range(workers)]
    try:
        for process in processes:
            process.start()
        left = len(chunks)
        while left:
            kind, content = _next_message(messages, processes)
            if kind == "epoch":
                on_epoch(content)
            elif kind == "chunk":
                folder.save(*content)
                left -= 1
            else:
                raise RuntimeError(f"a worker process failed:\n{content}")
    finally:
        # After an interruption the workers are in the middle of chunks nobody waits for.
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _next_message(messages: Any, processes: list[Any]) -> tuple[str, Any]:
    while True:
        try:
            return messages.get(timeout=1.0)
        except queue.Empty:
            for process in processes:
                if process.exitcode not in (None, 0):
                    raise RuntimeError(
                        f"a worker process ended with code {process.exitcode}, perhaps for lack of "
                        "memory. Finished chunks are saved; try again with --threads 1."
                    ) from None


def _work(tasks: Any, messages: Any, settings: Settings, teacher: Path, device: str) -> None:
    """A worker: chunks in, epochs and records out, until None."""
    # Ctrl-C goes to every process of the terminal; the first one decides for all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    while (chunk := tasks.get()) is not None:
        try:
            size = len(chunk.runs)
            record = _train_chunk(
                settings, teacher, chunk, device, lambda n=size: messages.put(("epoch", n))
            )
            messages.put(("chunk", (chunk, record)))
        except Exception:  # whatever it is, the parent reports it
            messages.put(("error", traceback.format_exc()))
            return
