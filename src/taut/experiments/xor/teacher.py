"""The XOR network, 2→5→10→4→1: it gives the students their targets y and constraints A.

Sec. 4: "10 weights in fc1 (2 units to 5 units), 50 weights in fc2, 40 weights in fc3 and 4 weights
in fc4. Each set of weights in each layer is accompanied by bias weights as well."
"""

from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from taut.experiments.xor.draws import draw_patterns, generator, redraw
from taut.experiments.xor.files import whole
from taut.experiments.xor.threads import one_thread

_PATTERNS, _BATCH, _LR, _EPOCHS, _ATTEMPTS = 2000, 100, 0.01, 400, 50
_GOAL = 0.995  # above the 99 % asked for, so that fresh patterns reach that too


@final
@dataclass(frozen=True, eq=False)
class Teacher:
    """The trained network and how it was obtained."""

    network: nn.Sequential
    accuracy: float
    seed: int
    epochs: int

    @property
    def A(self) -> Float[Tensor, "4 10"]:
        """The weights of fc3."""
        fc3 = self.network[4]
        if not isinstance(fc3, nn.Linear):
            raise TypeError(f"the fifth layer should be fc3; got {type(fc3).__name__}.")
        return fc3.weight.detach()

    @torch.no_grad()
    def targets(self, x: Float[Tensor, "*batch 2"]) -> Float[Tensor, "*batch 10"]:
        """y, the outputs of fc2."""
        return self.network[:4](x)

    @property
    def facts(self) -> dict[str, float]:
        """How it was obtained, for results.json."""
        return {"accuracy": self.accuracy, "seed": self.seed, "epochs": self.epochs}

    def save(self, path: Path) -> None:
        """Write the weights and the facts; complete or not at all."""
        with whole(path) as part:
            torch.save({"network": self.network.state_dict(), **self.facts}, part)


def new_network() -> nn.Sequential:
    """fc1 … fc4 with sigmoid hidden units.

    >>> sum(p.numel() for p in new_network().parameters())  # 10 + 50 + 40 + 4 and 20 biases
    124
    """
    return nn.Sequential(
        nn.Linear(2, 5),
        nn.Sigmoid(),
        nn.Linear(5, 10),
        nn.Sigmoid(),
        nn.Linear(10, 4),
        nn.Sigmoid(),
        nn.Linear(4, 1),
    ).to(torch.float32)


def load_teacher(path: Path) -> Teacher:
    """A teacher saved before."""
    saved = torch.load(path, weights_only=True)
    network = new_network()
    network.load_state_dict(saved["network"])
    return Teacher(network, saved["accuracy"], saved["seed"], saved["epochs"])


def train_teacher(inputs: str, seed: int = 0, goal: float = _GOAL) -> Teacher:
    """Train on 2000 patterns until `goal` accuracy; from another seed where that gets stuck.

    >>> train_teacher("corners").accuracy >= 0.99
    True
    """
    best = 0.0
    for attempt in range(_ATTEMPTS):
        with one_thread():
            teacher = _attempt(inputs, seed + attempt, goal)
        if teacher.accuracy >= goal:
            return teacher
        best = max(best, teacher.accuracy)
    raise RuntimeError(
        f"no XOR network reached {goal:.1%} accuracy in {_ATTEMPTS} attempts (best {best:.1%}). "
        "Try another --seed or --inputs."
    )


def _attempt(inputs: str, seed: int, goal: float) -> Teacher:
    source = generator(seed, "weights")
    x, label = draw_patterns(_PATTERNS, inputs, generator(seed, "inputs"))
    network = new_network()
    redraw(network, source)
    optimizer = torch.optim.Adam(network.parameters(), lr=_LR)
    accuracy, epoch = 0.0, 0
    for epoch in range(1, _EPOCHS + 1):
        for index in torch.randperm(_PATTERNS, generator=source).split(_BATCH):
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(network(x[index]).squeeze(-1), label[index]).backward()
            optimizer.step()
        with torch.no_grad():
            right = (network(x).squeeze(-1) > 0) == (label > 0)
        accuracy = right.double().mean().item()
        # Sigmoid networks that still split the plane by one line after 100 epochs rarely recover.
        if accuracy >= goal or (epoch >= 100 and accuracy < 0.8):
            break
    return Teacher(network.requires_grad_(False).eval(), accuracy, seed, epoch)
