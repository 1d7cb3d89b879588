"""DC3's own quadratic programs: its 833 test problems, solved exactly.

    .venv/bin/python benchmarks/dc3.py

minimise ½ zᵀQ z + pᵀz  subject to  A z = x, G z ≤ h  with 100 variables, 50 equations and 50
inequalities (Donti, Rolnick and Kolter, 2021). Q is diagonal: it is the geometry weighted(linear,
1/Q), and v = −p. The data are those of its generator, seed 17.
"""

import time

import numpy as np
import torch

import taut


def problems() -> tuple[torch.Tensor, ...]:
    """Q, p, A, G, h, and the x of the test problems."""
    random = np.random.RandomState(17)
    Q, p = random.random(100), random.random(100)
    A = random.normal(0, 1, (50, 100))
    x = random.uniform(-1, 1, (10000, 50))
    G = random.normal(0, 1, (50, 100))
    h = np.abs(G @ np.linalg.pinv(A)).sum(1)
    return tuple(map(torch.from_numpy, (Q, p, A, G, h, x[-833:])))


def main() -> None:
    Q, p, A, G, h, x = problems()
    layer = taut.Projection(A, G=G, upper=h, activation=taut.activations.weighted("linear", 1 / Q))
    v, seconds = -p.expand(833, -1).contiguous(), []
    for _ in range(7):
        start = time.perf_counter()
        z = layer(v, x)
        seconds.append(time.perf_counter() - start)
    objective = (0.5 * Q * z.square() + p * z).sum(-1).mean().item()
    equal, above = (z @ A.T - x).abs().max().item(), (z @ G.T - h).max().item()
    first, best = 1e3 * seconds[0], 1e3 * min(seconds[1:])
    print(f"{len(x)} problems in {best:.1f} ms (the first call {first:.0f} ms)")
    print(f"mean objective {objective:.7f}, |A z − x| ≤ {equal:.1e}, G z − h ≤ {above:.1e}")


if __name__ == "__main__":
    main()
