"""Many students as one network: each run has its own fc1 and fc2, and all are applied at once."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from taut.activations import sigmoid
from taut.experiments.xor.draws import draw_layer, generator


@final
class Students(nn.Module):
    """fc1 and fc2 of every run, 2→5→10, as products of stacked matrices; the output is v.

    >>> Students([0, 1, 2])(torch.zeros(3, 7, 2)).shape
    torch.Size([3, 7, 10])
    """

    def __init__(self, seeds: list[int], dtype: torch.dtype = torch.float32):
        super().__init__()
        layers: list[list[Tensor]] = [[], [], [], []]
        for seed in seeds:
            source = generator(seed, "weights")
            drawn = (*draw_layer(2, 5, source), *draw_layer(5, 10, source))
            for stack, tensor in zip(layers, drawn, strict=True):
                stack.append(tensor)
        weight1, bias1, weight2, bias2 = (torch.stack(stack).to(dtype) for stack in layers)
        self.weight1: nn.Parameter = nn.Parameter(weight1.mT.contiguous())
        self.bias1: nn.Parameter = nn.Parameter(bias1.unsqueeze(1))
        self.weight2: nn.Parameter = nn.Parameter(weight2.mT.contiguous())
        self.bias2: nn.Parameter = nn.Parameter(bias2.unsqueeze(1))

    def forward(self, x: Float[Tensor, "runs batch 2"]) -> Float[Tensor, "runs batch 10"]:
        # taut's own sigmoid, because the bits of torch's depend on an element's place in the
        # tensor, and a run must not notice which other runs are beside it.
        hidden = sigmoid.output(torch.baddbmm(self.bias1, x, self.weight1))
        return torch.baddbmm(self.bias2, hidden, self.weight2)
