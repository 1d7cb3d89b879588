"""What samples with large logits, or without a solution, cost beside ordinary ones.

    TAUT_KERNEL=0 python benchmarks/hard.py
    python benchmarks/hard.py --alone

`inside`: b is that of a z inside the range; `edge`: within 1e-7 of the edge of what can be reached;
`outside`: beyond it; `masked`: inside, beside one output of each sample that v = −inf holds.
With --alone: what one hard sample among a thousand easy ones adds; and what inequality samples of
at most ten outputs cost, each by itself, of those that fuzz.py draws.
"""

import argparse
import time
from collections import Counter

import torch

import taut
from fuzzing.within import MOST, make_within

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


def beside_easy_ones(repeats):
    """What one hard sample adds to 1000 easy ones, in milliseconds and beside these."""
    for name, logits in (("exp", 60.0), ("sigmoid", 300.0)):
        for size in SIZES[:2]:
            v, A, b = draw(name, size, 1000, 1.0, "inside")
            far, _, edge = draw(name, size, 1, logits, "edge" if name == "sigmoid" else "inside")
            hard = torch.cat([v, far]), A, torch.cat([b, edge])
            best, verdicts = measure({"easy": (v, A, b), "one hard": hard}, repeats)
            more = best["one hard"] - best["easy"]
            what = f"{name} {size}: one hard sample among 1000 adds {1e3 * more:.1f} ms"
            print(
                f"{what}, {more / best['easy']:.1f} times the others, {dict(verdicts['one hard'])}"
            )


def alone(blocks, samples):
    """The milliseconds that inequality samples of at most ten outputs take, each by itself."""
    spent = []
    for number in range(blocks):
        block = make_within(0, number, MOST)
        for i in range(min(samples, len(block)) if block.v.shape[1] <= 10 else 0):
            given = block.one(i)
            best = float("inf")
            for _ in range(2):
                start = time.process_time()
                block.project(given)
                best = min(best, time.process_time() - start)
            spent.append(1e3 * best)
    parts = torch.tensor(spent).quantile(torch.tensor([0.5, 0.99, 1.0])).tolist()
    print(
        "{} inequality samples alone: p50 {:.1f} ms, p99 {:.1f}, max {:.1f}".format(
            len(spent), *parts
        )
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--blocks", type=int, default=150, help="of the fuzzer, with --alone")
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    print("kernel:", taut.backends.available())
    if options.alone:
        beside_easy_ones(options.repeats)
        alone(options.blocks, 64)
        return
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
