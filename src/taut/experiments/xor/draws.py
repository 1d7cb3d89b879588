"""All randomness: a run has generators of its own, so its numbers do not depend on the others."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

_STREAMS = ("inputs", "weights", "shuffle", "test")
# Numbers are drawn in one dtype, so that a seed means the same in each precision.
_DTYPE = torch.float32
_NOISE = 0.1  # around the corners (0,0), (0,1), (1,0), (1,1)


def generator(seed: int, stream: str) -> torch.Generator:
    """The generator of one purpose in one run.

    >>> first, again = generator(3, "inputs"), generator(3, "inputs")
    >>> bool(torch.rand(1, generator=first) == torch.rand(1, generator=again))
    True
    """
    return torch.Generator().manual_seed(len(_STREAMS) * seed + _STREAMS.index(stream))


def draw_patterns(
    count: int, inputs: str, source: torch.Generator
) -> tuple[Float[Tensor, "N 2"], Float[Tensor, "N"]]:
    """Points in R² and their XOR labels, from the input distribution of that name.

    >>> x, label = draw_patterns(4, "uniform", generator(0, "inputs"))
    >>> bool(((x[:, 0] > 0) ^ (x[:, 1] > 0)).eq(label > 0).all())
    True
    """
    if inputs == "corners":
        bits = torch.randint(0, 2, (count, 2), generator=source)
        x = bits + _NOISE * torch.randn(count, 2, generator=source, dtype=_DTYPE)
        return x, (bits[:, 0] ^ bits[:, 1]).to(x.dtype)
    if inputs == "uniform":
        x = 2 * torch.rand(count, 2, generator=source, dtype=_DTYPE) - 1
    else:
        x = torch.randn(count, 2, generator=source, dtype=_DTYPE)
    return x, ((x[:, 0] > 0) ^ (x[:, 1] > 0)).to(x.dtype)


def draw_layer(
    fan_in: int, fan_out: int, source: torch.Generator
) -> tuple[Float[Tensor, "out in"], Float[Tensor, "out"]]:
    """Weight and bias, distributed as in a new `nn.Linear`: uniform within ±1/√fan_in.

    >>> weight, bias = draw_layer(2, 5, generator(0, "weights"))
    >>> weight.shape, bias.shape
    (torch.Size([5, 2]), torch.Size([5]))
    """
    bound = fan_in**-0.5

    def uniform(*shape: int) -> Tensor:
        return bound * (2 * torch.rand(*shape, generator=source, dtype=_DTYPE) - 1)

    return uniform(fan_out, fan_in), uniform(fan_out)


@torch.no_grad()
def redraw(network: nn.Module, source: torch.Generator) -> None:
    """Give every linear layer of `network` fresh weights from `source`."""
    for layer in network.modules():
        if isinstance(layer, nn.Linear):
            weight, bias = draw_layer(layer.in_features, layer.out_features, source)
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)


def shuffled(count: int, sources: list[torch.Generator]) -> Int[Tensor, "runs count"]:
    """A fresh order of the patterns for each run."""
    return torch.stack([torch.randperm(count, generator=source) for source in sources])
