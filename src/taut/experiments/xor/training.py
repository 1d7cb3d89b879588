"""The loop of section 4, for many runs at once.

Runs share every operation and nothing else: the loss is the sum of the runs' own losses, the
optimiser works elementwise, and the last batch dimension of v is one group of `GradientDescent`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from taut.activations import sigmoid
from taut.experiments.xor.draws import draw_patterns, generator, shuffled
from taut.experiments.xor.network import Students
from taut.experiments.xor.settings import OPTIMIZERS, Settings, Variant
from taut.experiments.xor.teacher import Teacher
from taut.losses import bregman_loss, matched_loss
from taut.memory import LagrangeMemory
from taut.modules import Projection
from taut.projection import project

# What is kept of each epoch of each run.
MEASURES = ("iterations", "iterations_per_batch", "loss", "residual", "multiplier_norm", "seconds")
# What is kept of each run on its fresh test patterns: of z as the variant finds it, and of z where
# Newton finds it at test, whatever was done in training.
TEST_MEASURES = (
    "test_residual",
    "test_error",
    "test_projected_residual",
    "test_projected_error",
)


@final
@dataclass(frozen=True, eq=False)
class Patterns:
    """Inputs, targets y and constraints b = A y, of one run or of many."""

    x: Float[Tensor, "*runs N 2"]
    y: Float[Tensor, "*runs N 10"]
    b: Float[Tensor, "*runs N 4"]

    def batch(self, index: Int[Tensor, "runs batch"]) -> "Patterns":
        """The patterns at `index`, which counts through the patterns of all runs."""
        flat = index.flatten()
        return Patterns(
            *(
                table.flatten(0, 1).index_select(0, flat).reshape(*index.shape, -1)
                for table in (self.x, self.y, self.b)
            )
        )


@final
@dataclass(frozen=True, eq=False)
class Step:
    """What one batch showed, a number for each run."""

    loss: Float[Tensor, "runs"]
    iterations: Float[Tensor, "runs"]
    residual: Float[Tensor, "runs"]
    multiplier_norm: Float[Tensor, "runs"]


def fresh_patterns(
    settings: Settings, teacher: Teacher, seeds: list[int], stream: str, device: torch.device
) -> Patterns:
    """Sec. 4: "new inputs […] are sent into the XOR network to produce the output of the fc2 layer
    which we now call y, the new targets"."""
    count = settings.patterns if stream == "inputs" else settings.test_patterns
    A = teacher.A.to(settings.torch_dtype)
    runs = []
    # Run by run: rounding depends on the shape of a tensor, and a run's must not.
    for seed in seeds:
        x, _ = draw_patterns(count, settings.inputs, generator(seed, stream))
        y = teacher.targets(x).to(A)
        runs.append((x.to(A), y, y @ A.mT))
    return Patterns(*(torch.stack(tensors).to(device) for tensors in zip(*runs, strict=True)))


def new_projection(settings: Settings, teacher: Teacher, variant: Variant) -> Projection | None:
    """The custom layer of section 4, with fixed weights A; None without constraints."""
    if variant.solver is None:
        return None
    return Projection(
        teacher.A.to(settings.torch_dtype),
        activation="sigmoid",
        solver=variant.solver,
        # The paper's stopping rule leaves a residual by design; it is recorded, not raised.
        on_failure="return",
    )


def train(
    settings: Settings,
    teacher: Teacher,
    variant: Variant,
    seeds: list[int],
    device: str = "cpu",
    on_epoch: Callable[[], None] = lambda: None,
) -> dict[str, Tensor]:
    """Train the runs of these seeds; MEASURES as (runs, epochs) and TEST_MEASURES as (runs,).

    >>> from taut.experiments.xor.settings import VARIANTS
    >>> from taut.experiments.xor.teacher import train_teacher
    >>> settings = Settings(runs=2, epochs=1, patterns=50, batch_size=25)
    >>> record = train(settings, train_teacher("corners"), VARIANTS["newton"], settings.run_seeds)
    >>> record["loss"].shape
    torch.Size([2, 1])
    """
    place = torch.device(device)
    data = fresh_patterns(settings, teacher, seeds, "inputs", place)
    students = Students(seeds, settings.torch_dtype).to(place)
    optimizer = OPTIMIZERS[settings.optimizer](students.parameters(), lr=settings.lr)
    layer = new_projection(settings, teacher, variant)
    layer = None if layer is None else layer.to(place)
    memory = LagrangeMemory(len(seeds) * settings.patterns, teacher.A.shape[0]).to(data.b)
    first = settings.patterns * torch.arange(len(seeds)).unsqueeze(-1)
    orders = [generator(seed, "shuffle") for seed in seeds]
    epochs = []
    for _ in range(settings.epochs):
        started = time.perf_counter()
        steps = []
        order = (first + shuffled(settings.patterns, orders)).to(place)
        for index in order.split(settings.batch_size, dim=1):
            held = memory if variant.memory else None
            steps.append(_step(students, optimizer, layer, held, data.batch(index), index))
        epochs.append(_summed(steps, settings, time.perf_counter() - started))
        on_epoch()
    record = {name: torch.stack([epoch[name] for epoch in epochs], 1) for name in MEASURES}
    return record | test(settings, teacher, layer, students, seeds, place)


def _step(
    students: Students,
    optimizer: torch.optim.Optimizer,
    layer: Projection | None,
    memory: LagrangeMemory | None,
    batch: Patterns,
    index: Int[Tensor, "runs batch"],
) -> Step:
    """One batch: solve for λ, then one step of the optimiser on the matched loss."""
    v = students(batch.x)
    if layer is None:
        loss = bregman_loss(v, batch.y, "sigmoid", reduction="none").mean(-1)
        none = torch.zeros_like(loss.detach())
        iterations, residual, norm = none, none, none
    else:
        # Sec. 4: "In each epoch and for each batch, we use a constraint satisfaction network to
        # solve for the 4 Lagrange parameters for each pattern in each batch."
        solution = layer.solve(v, batch.b, init=None if memory is None else memory[index])
        loss = matched_loss(solution, batch.y, reduction="none").mean(-1)
        # Iterations of a batch: until its last pattern is done.
        iterations = solution.iterations.amax(-1).to(loss.dtype)
        residual = solution.residual.amax(-1)
        norm = solution.multipliers.detach().norm(dim=-1).mean(-1)
        if memory is not None:
            memory.store(index, solution)
    optimizer.zero_grad()
    loss.sum().backward()
    optimizer.step()
    return Step(loss.detach(), iterations, residual, norm)


def _summed(steps: list[Step], settings: Settings, seconds: float) -> dict[str, Tensor]:
    """An epoch from its batches; the seconds are shared equally by the runs."""

    def stacked(name: str) -> Tensor:
        return torch.stack([getattr(step, name) for step in steps]).double().cpu()

    sizes = torch.full((len(steps), 1), settings.batch_size, dtype=torch.float64)
    sizes[-1] = settings.patterns - settings.batch_size * (len(steps) - 1)
    share = sizes / settings.patterns
    iterations = stacked("iterations")
    return {
        "iterations": iterations.sum(0),
        "iterations_per_batch": iterations.mean(0),
        "loss": (share * stacked("loss")).sum(0),
        "residual": stacked("residual").amax(0),
        "multiplier_norm": (share * stacked("multiplier_norm")).sum(0),
        "seconds": torch.full_like(iterations[0], seconds / iterations.shape[1]),
    }


@torch.no_grad()
def test(
    settings: Settings,
    teacher: Teacher,
    layer: Projection | None,
    students: Students,
    seeds: list[int],
    device: torch.device,
) -> dict[str, Tensor]:
    """Largest |A z − b| and root mean square of z − y on fresh patterns, λ solved from 0."""
    data = fresh_patterns(settings, teacher, seeds, "test", device)
    v, A = students(data.x), teacher.A.to(settings.torch_dtype).to(device)
    if layer is None:
        z = sigmoid.sigma(v)
    else:
        # The same groups as in training: the paper's solver decides by batches.
        size = settings.batch_size
        parts = zip(v.split(size, dim=1), data.b.split(size, dim=1), strict=True)
        z = torch.cat([layer.solve(part, b).z for part, b in parts], dim=1)
    projected = project(v, A, data.b, activation="sigmoid", on_failure="return").z
    record = {}
    for name, output in (("test", z), ("test_projected", projected)):
        residual = (output @ A.mT - data.b).abs().flatten(1).amax(1)
        error = (output - data.y).square().flatten(1).mean(1).sqrt()
        record |= {
            f"{name}_residual": residual.double().cpu(),
            f"{name}_error": error.double().cpu(),
        }
    return record
