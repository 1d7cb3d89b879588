"""One run as anybody would write it, to check the vectorised runs and to time them against."""

import time
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from taut.experiments.xor.draws import generator, redraw
from taut.experiments.xor.settings import OPTIMIZERS, Settings, Variant
from taut.experiments.xor.teacher import Teacher
from taut.experiments.xor.threads import one_thread
from taut.experiments.xor.training import fresh_patterns, new_projection, train
from taut.losses import matched_loss
from taut.memory import LagrangeMemory


def plain_run(
    settings: Settings, teacher: Teacher, variant: Variant, seed: int
) -> dict[str, list[float]]:
    """Train one student with nn.Linear layers; loss and total iterations of each epoch."""
    net = nn.Sequential(nn.Linear(2, 5), nn.Sigmoid(), nn.Linear(5, 10))
    redraw(net, generator(seed, "weights"))
    net.to(settings.torch_dtype)
    layer = new_projection(settings, teacher, variant)
    if layer is None:
        raise ValueError("plain_run is for the variants with constraints.")
    data = fresh_patterns(settings, teacher, [seed], "inputs", torch.device("cpu"))
    x, y, b = data.x[0], data.y[0], data.b[0]
    memory = LagrangeMemory(len(x), b.shape[-1]).to(b)
    optimizer = OPTIMIZERS[settings.optimizer](net.parameters(), lr=settings.lr)
    source = generator(seed, "shuffle")
    record: dict[str, list[float]] = {"loss": [], "iterations": []}
    for _ in range(settings.epochs):
        total, iterations = 0.0, 0
        for index in torch.randperm(len(x), generator=source).split(settings.batch_size):
            solution = layer.solve(
                net(x[index]), b[index], init=memory[index] if variant.memory else None
            )
            loss = matched_loss(solution, y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if variant.memory:
                memory.store(index, solution)
            total += loss.item() * len(index) / len(x)
            iterations += int(solution.iterations.max())
        record["loss"].append(total)
        record["iterations"].append(iterations)
    return record


@final
@dataclass(frozen=True)
class Comparison:
    """Seconds of one run alone, and its share when `runs` are trained at once; one core each."""

    variant: str
    runs: int
    alone: float
    together: float
    largest_difference: float  # of the loss in any epoch, relative

    @property
    def ratio(self) -> float:
        """How many times cheaper a run is among others."""
        return self.alone / self.together


def compare(settings: Settings, teacher: Teacher, variant: Variant) -> Comparison:
    """Time `settings.runs` runs at once, and the first of them alone, both on one core."""
    with one_thread():
        started = time.perf_counter()
        alone = plain_run(settings, teacher, variant, settings.run_seeds[0])
        middle = time.perf_counter()
        together = train(settings, teacher, variant, settings.run_seeds)
        ended = time.perf_counter()
    losses: Tensor = torch.tensor(alone["loss"], dtype=torch.float64)
    difference = ((together["loss"][0] - losses).abs() / losses).max().item()
    share = (ended - middle) / settings.runs
    return Comparison(variant.name, settings.runs, middle - started, share, difference)
