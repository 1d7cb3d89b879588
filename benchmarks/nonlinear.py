"""The nearest point of a curved surface: taut beside ENFORCE and SciPy's SLSQP, Euclidean.

All run in one process, in turns, on one thread, in the environment of the peer::

    python benchmarks/nonlinear.py            # makes benchmarks/.envs/enforce on first use

"off" is the part of z − v that lies along the surface: 0 at the nearest point. The times are CPU
time, the least of the repeats, in µs a sample.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NAMES = ("norm", "toy", "quartic", "distillation", "quadratic")
SAMPLES, NOISE, REPEATS, FEW = 256, 0.3, 7, 8


def equations(given: Any) -> Callable[[Any], Any]:
    """All of them, of z alone."""
    import torch

    family, params = given.family, given.params

    def c(z: Any) -> Any:
        h = family.h(z, *params)
        return h if given.b is None else torch.cat([z @ family.A.mT - given.b, h], -1)

    return c


def by_taut(given: Any) -> Callable[[Any], Any]:
    import taut

    family = given.family
    layer = taut.Projection(family.A, h=family.h, activation="linear", on_failure="return")
    return lambda v: layer(v, given.b, params=given.params)


def by_enforce(given: Any) -> Callable[[Any], Any]:
    """Its projection by itself, in float64, to 1e-12, with its implicit derivative."""
    import torch
    from enforce.core.config import ENFORCEConfig
    from enforce.core.model import ENFORCE, _ProjectionIFT

    c, outputs = equations(given), given.v.shape[-1]
    config = ENFORCEConfig(output_neurons=outputs, ift_backward=True, max_it=100)
    plain = [(torch.zeros(1), torch.ones(1)), (torch.zeros(outputs), torch.ones(outputs))]
    model = ENFORCE(*plain, lambda x, y: c(y), config, weighting_option=1).double()
    for name in ("mean_input", "std_input", "mean_output", "std_output"):
        setattr(model, name, getattr(model, name).double())
    x = given.v.new_zeros(len(given.v), 1)
    return lambda v: _ProjectionIFT.apply(v, model, x, "max", 1e-12, 100)


def timed(solve: Callable[[Any], Any], v: Any) -> tuple[float, float, Any]:
    """Seconds forward and backward, and z."""
    leaf = v.clone().requires_grad_()
    start = time.process_time()
    z = solve(leaf)
    middle = time.process_time()
    z.square().sum().backward()
    return middle - start, time.process_time() - middle, z.detach()


def measured(given: Any, z: Any) -> str:
    """The largest |c|, and what part of z − v lies along the surface: median and largest."""
    import torch

    c = equations(given)
    leaf = z.clone().requires_grad_()
    value = c(leaf)
    rows = [
        torch.autograd.grad(value[:, i].sum(), leaf, retain_graph=True)[0]
        for i in range(value.shape[-1])
    ]
    J, step = torch.stack(rows, 1), (z - given.v).unsqueeze(-1)
    along = step - J.mT @ torch.linalg.pinv(J.mT) @ step
    off = along.norm(dim=(-2, -1)) / step.norm(dim=(-2, -1))
    return f"{value.abs().max().item():.0e}; {off.median().item():.0e} ({off.max().item():.0e})"


def by_slsqp(given: Any, index: int) -> tuple[float, Any]:
    """Seconds for one sample, and z."""
    import torch
    from scipy.optimize import minimize

    one = given.take([index])
    c, v = equations(one), one.v[0]
    of = lambda x: c(torch.as_tensor(x)[None])[0]  # noqa: E731
    slope = torch.func.jacrev(lambda x: c(x[None])[0])
    start = time.process_time()
    found = minimize(
        lambda x: (0.5 * ((x - v.numpy()) ** 2).sum(), x - v.numpy()),
        v.numpy(),
        jac=True,
        method="SLSQP",
        constraints={
            "type": "eq",
            "fun": lambda x: of(x).numpy(),
            "jac": lambda x: slope(torch.as_tensor(x)).numpy(),
        },
        options={"maxiter": 500, "ftol": 1e-14},
    )
    return time.process_time() - start, torch.tensor(found.x)


def inside() -> None:
    import torch

    from surfaces import FAMILIES

    torch.set_num_threads(1)
    print("| | forward / backward, µs | largest residual; off, median (largest) |\n|---|---|---|")
    for name in NAMES:
        given = FAMILIES[f"{name}/linear"].problem(SAMPLES, NOISE, 1)
        ways = {"taut": by_taut(given), "ENFORCE, to 1e-12": by_enforce(given)}
        times: dict[str, list] = {way: [] for way in ways}
        points = {}
        for _ in range(REPEATS):
            for way, solve in ways.items():
                *seconds, points[way] = timed(solve, given.v)
                times[way].append(seconds)
        for way, pairs in times.items():
            least = [1e6 * min(column) / SAMPLES for column in zip(*pairs, strict=True)]
            label = f"{name} {given.v.shape[1]} outputs, {way}"
            print(f"| {label} | {least[0]:.0f} / {least[1]:.0f} | {measured(given, points[way])} |")
        runs = [by_slsqp(given, i) for i in range(FEW)]
        apart = [(z - points["taut"][i]).abs().max().item() for i, (_, z) in enumerate(runs)]
        same = sum(x < 1e-5 for x in apart)
        each = 1e6 * sum(seconds for seconds, _ in runs) / FEW
        print(f"| {name}, SLSQP | {each:.0f} / – | the same point in {same} of {FEW} |")


def main() -> None:
    if sys.argv[1:] == ["--inside"]:
        return inside()
    from environments import ensure

    path = os.pathsep.join([str(HERE), str(HERE.parent / "src"), str(HERE.parent / "examples")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [str(ensure("enforce")), "-W", "ignore", __file__, "--inside"]
    subprocess.run(command, check=True, env=environment)


if __name__ == "__main__":
    main()
