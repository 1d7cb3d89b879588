"""What samples with large logits, or without a solution, cost beside ordinary ones.

    TAUT_KERNEL=0 python benchmarks/hard.py

`inside`: b is that of a z inside the range; `edge`: within 1e-7 of the edge of what can be reached;
`outside`: beyond it; `masked`: inside, beside one output of each sample that v = −inf holds.
"""

import argparse
import time
from collections import Counter

import torch

import taut

SIZES = ((10, 4), (64, 8), (100, 50))


def draw(name, size, samples, logits, target):
    """Prepared A, v and b, in float64."""
    activation, (outputs, equations) = taut.activations.resolve(name), size
    torch.manual_seed(0)
    A, v = torch.randn(equations, outputs), logits * torch.randn(samples, outputs)
    z = activation.sigma(torch.randn(samples, outputs))
    image = torch.randn(samples, equations) @ A
    lower, upper = activation.range.bounds(v)
    far = torch.where(image > 0, upper, lower)
    if target == "masked":
        v[:, 0], z[:, 0] = -torch.inf, lower
    z = {"edge": far + 1e-7 * (z - far), "outside": far + 0.05 * image}.get(target, z)
    return v, taut.prepare(A, name), z @ A.mT


def measure(problems, repeats):
    """The shortest time of each, in turns, and its verdicts."""
    best, verdicts = dict.fromkeys(problems, float("inf")), {}
    for _ in range(repeats):
        for key, (v, A, b) in problems.items():
            start = time.process_time()
            solution = taut.project(v, A, b, on_failure="return")
            best[key] = min(best[key], time.process_time() - start)
            verdicts[key] = Counter(taut.Status(int(x)).name for x in solution.status)
    return best, verdicts


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    print("kernel:", taut.backends.available())
    kinds = [(x, "inside") for x in (1.0, 1e2, 1e4, 1e6)]
    kinds += [(1e4, "edge"), (1e4, "outside"), (1.0, "masked")]
    for name in ("sigmoid", "tanh"):
        for size in SIZES:
            samples = options.samples if size[1] < 50 else options.samples // 8
            problems = {x: draw(name, size, samples, *x) for x in kinds}
            best, verdicts = measure(problems, options.repeats)
            for key, seconds in best.items():
                each, times = 1e6 * seconds / samples, seconds / best[kinds[0]]
                what = f"{name} {size} {key[1]} {key[0]:g}"
                print(f"{what}: {each:.1f} µs, {times:.1f} times, {dict(verdicts[key])}")


if __name__ == "__main__":
    main()
