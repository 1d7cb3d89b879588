"""Lagrange parameters as hidden units, without an inner solve: trained jointly, and predicted.

Both minimise the one objective Σ B(y‖σ(v + Aᵀλ)), convex in u = v + Aᵀλ, by the optimiser of W.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from taut.experiments.xor.draws import generator, redraw
from taut.experiments.xor.settings import OPTIMIZERS, VARIANTS, Settings
from taut.experiments.xor.teacher import Teacher
from taut.experiments.xor.training import Patterns, fresh_patterns, train
from taut.head import LagrangeHead
from taut.losses import bregman_loss
from taut.projection import project


@final
@dataclass(frozen=True)
class Joint:
    """One run after each epoch, λ trained like W; residuals |A z − b| of the training patterns."""

    residual: list[float]  # the largest
    mean_residual: list[float]  # each pattern's largest, mean over patterns
    loss: list[float]


@final
@dataclass(frozen=True)
class Predicted:
    """One run on fresh test patterns: λ from the network alone, and as the start of a solve."""

    residual: float  # largest |A z − b| with predicted λ, b unknown
    error: float  # root mean square of z − y
    solved_residual: float  # b known: Newton from the predicted λ
    solved_error: float
    iterations: float  # Newton iterations per pattern from the predicted λ
    iterations_from_zero: float  # from λ = 0

    @property
    def saved(self) -> float:
        """Share of the iterations that the prediction saves."""
        return 1 - self.iterations / self.iterations_from_zero


def train_joint(settings: Settings, teacher: Teacher, seed: int) -> Joint:
    """λ_n of every pattern as ordinary parameters: Sec. 4's "global optimization problem on both
    W and {λ_n}", in one loop."""
    data = _only(fresh_patterns(settings, teacher, [seed], "inputs", torch.device("cpu")))
    A = teacher.A.to(data.y)
    net = nn.Sequential(nn.Linear(2, 5), nn.Sigmoid(), nn.Linear(5, 10))
    redraw(net, generator(seed, "weights"))
    net.to(settings.torch_dtype)
    multipliers = nn.Parameter(torch.zeros_like(data.b))
    optimizer = OPTIMIZERS[settings.optimizer]([*net.parameters(), multipliers], lr=settings.lr)
    source = generator(seed, "shuffle")
    residual, mean_residual, losses = [], [], []
    for _ in range(settings.epochs):
        for index in torch.randperm(len(data.x), generator=source).split(settings.batch_size):
            u = net(data.x[index]) + multipliers[index] @ A
            # A y = b, so that this is eq. 1 of the paper, whose multiplier term is bᵀλ.
            loss = bregman_loss(u, data.y[index], "sigmoid")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            u = net(data.x) + multipliers @ A
            left = _residual(torch.sigmoid(u), A, data.b)
            losses.append(bregman_loss(u, data.y, "sigmoid").item())
        residual.append(left.max().item())
        mean_residual.append(left.mean().item())
    return Joint(residual, mean_residual, losses)


def train_predicted(settings: Settings, teacher: Teacher, seed: int) -> Predicted:
    """`LagrangeHead` on the features of fc1: λ for patterns never seen, without knowing b."""
    place = torch.device("cpu")
    data = _only(fresh_patterns(settings, teacher, [seed], "inputs", place))
    body = nn.Sequential(nn.Linear(2, 5), nn.Sigmoid()).to(settings.torch_dtype)
    head = LagrangeHead(5, teacher.A.to(data.y), activation="sigmoid")
    source = generator(seed, "weights")
    redraw(body, source)
    redraw(head, source)
    parameters = [*body.parameters(), *head.parameters()]
    optimizer = OPTIMIZERS[settings.optimizer](parameters, lr=settings.lr)
    order = generator(seed, "shuffle")
    for _ in range(settings.epochs):
        for index in torch.randperm(len(data.x), generator=order).split(settings.batch_size):
            v, multipliers = head(body(data.x[index]))
            loss = bregman_loss(head.predictor(v, multipliers), data.y[index], "sigmoid")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return _judge(head, body, _only(fresh_patterns(settings, teacher, [seed], "test", place)))


@torch.no_grad()
def _judge(head: LagrangeHead, body: nn.Module, test: Patterns) -> Predicted:
    v, multipliers = head(body(test.x))
    z = torch.sigmoid(head.predictor(v, multipliers))
    warm = project(v, head.A, test.b, activation="sigmoid", init=multipliers, on_failure="return")
    cold = project(v, head.A, test.b, activation="sigmoid", on_failure="return")
    return Predicted(
        residual=_residual(z, head.A, test.b).max().item(),
        error=_error(z, test.y),
        solved_residual=warm.residual.max().item(),
        solved_error=_error(warm.z, test.y),
        iterations=warm.iterations.double().mean().item(),
        iterations_from_zero=cold.iterations.double().mean().item(),
    )


def run_units(
    settings: Settings, teacher: Teacher, on_run: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Both forms for every run of the settings, and what the paper's solver leaves in the same
    runs; plain numbers, for units.json."""
    joint, predicted = [], []
    for seed in settings.run_seeds:
        joint.append(asdict(train_joint(settings, teacher, seed)))
        found = train_predicted(settings, teacher, seed)
        predicted.append(asdict(found) | {"saved": found.saved})
        on_run()
    solved = {
        name: train(settings, teacher, VARIANTS[name], settings.run_seeds)["residual"].tolist()
        for name in ("scratch", "history")
    }
    return {"joint": joint, "predicted": predicted, "solver_residual": solved}


def _only(data: Patterns) -> Patterns:
    return Patterns(data.x[0], data.y[0], data.b[0])


def _residual(
    z: Float[Tensor, "N K"], A: Float[Tensor, "I K"], b: Float[Tensor, "N I"]
) -> Float[Tensor, "N"]:
    return (z @ A.mT - b).abs().amax(-1)


def _error(z: Tensor, y: Tensor) -> float:
    return (z - y).square().mean().sqrt().item()
