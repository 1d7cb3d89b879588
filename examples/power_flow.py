"""A network that reads the state of a power grid from its loads, and obeys the laws of the grid.

At every bus of a grid the injected power is what its voltage and those of its neighbours make of
it: P + iQ = V ∘ conj(Y V), the AC power flow equations. The loads of each scenario are drawn, and
PYPOWER solves it: that is the truth. The network sees P and Q of every bus but the first, with
noise, and predicts V, θ, P and Q of all of them.

    python examples/power_flow.py                 # pip install 'taut[examples]'
    python examples/power_flow.py --figure power_flow.png
"""

import argparse
import contextlib
import io
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import taut

CASES = ("case9", "case14", "case30")
TRAIN, TEST, STEPS, NOISE = 64, 200, 200, 0.02
_V, _ANGLE = 7, 8  # columns of PYPOWER's bus table


@dataclass(frozen=True)
class Grid:
    """Y = G + iB of the buses, and V, θ as PYPOWER has solved the case itself."""

    G: Tensor
    B: Tensor
    V: Tensor
    θ: Tensor
    kinds: Tensor  # of the buses: 1 load, 2 generator, 3 reference

    @property
    def buses(self) -> int:
        return len(self.V)

    @staticmethod
    def of(case: str) -> "Grid":
        from pypower import api
        from pypower.ext2int import ext2int
        from pypower.makeYbus import makeYbus

        inside = ext2int(solved(getattr(api, case)()))
        Y = makeYbus(inside["baseMVA"], inside["bus"], inside["branch"])[0].toarray()
        V, θ = inside["bus"][:, _V], np.deg2rad(inside["bus"][:, _ANGLE])
        kinds = inside["bus"][:, 1].astype(int)
        return Grid(*map(torch.tensor, (Y.real, Y.imag, V, θ, kinds)))

    def injections(self, V: Tensor, θ: Tensor) -> tuple[Tensor, Tensor]:
        """P and Q that voltages make, in units of the base power."""
        e, f = V * θ.cos(), V * θ.sin()
        real, imaginary = e @ self.G.mT - f @ self.B.mT, f @ self.G.mT + e @ self.B.mT
        return e * real + f * imaginary, f * real - e * imaginary

    def mismatch(self, z: Tensor) -> Tensor:
        """h(z) of z = (V, θ, P, Q): 0 where the power flow equations hold."""
        V, θ, P, Q = z.split(self.buses, -1)
        p, q = self.injections(V, θ)
        return torch.cat([p - P, q - Q], -1)

    def state(self, V: Tensor, θ: Tensor) -> Tensor:
        """z = (V, θ, P, Q)."""
        return torch.cat([V, θ, *self.injections(V, θ)], -1)

    def flow(self) -> taut.Solution:
        """The power flow of the case, from a flat start: what is given are equations too."""
        n, z = self.buses, self.state(self.V, self.θ)
        generator, reference = self.kinds >= 2, self.kinds == 3
        given = torch.cat([generator, reference, ~reference, ~generator])
        A = torch.eye(4 * n, dtype=z.dtype)[given]
        flat = torch.cat([torch.ones_like(self.V), torch.zeros(3 * n, dtype=z.dtype)])
        return taut.project(flat, A, A @ z, h=self.mismatch)


def solved(case: dict) -> dict:
    """The case with its power flow, by PYPOWER."""
    from pypower import api

    with contextlib.redirect_stdout(io.StringIO()):
        found, good = api.runpf(case, api.ppoption(VERBOSE=0, OUT_ALL=0))
    if not good:
        raise RuntimeError("PYPOWER has found no power flow.")
    return found


def scenarios(case: str, count: int, seed: int) -> Tensor:
    """Truths: loads and generation between 60 and 140 % of the case's, bus by bus."""
    from pypower import api

    draws, states = np.random.default_rng(seed), []
    while len(states) < count:
        given = getattr(api, case)()
        for table in ("bus", "gen"):
            given[table] = given[table].astype(float)
        given["bus"][:, 2:4] *= draws.uniform(0.6, 1.4, (len(given["bus"]), 1))
        given["gen"][:, 1] *= draws.uniform(0.6, 1.4, len(given["gen"]))
        with contextlib.suppress(RuntimeError):
            bus = solved(given)["bus"]
            states.append(np.concatenate([bus[:, _V], np.deg2rad(bus[:, _ANGLE])]))
    V, θ = torch.tensor(np.array(states)).chunk(2, -1)
    return Grid.of(case).state(V, θ)


def measured(z: Tensor, buses: int, seed: int) -> Tensor:
    """P and Q of every bus but the first, with noise."""
    _, _, P, Q = z.split(buses, -1)
    x = torch.cat([P[:, 1:], Q[:, 1:]], -1)
    source = torch.Generator().manual_seed(seed)
    noise = torch.randn(x.shape, generator=source, dtype=x.dtype)
    return x + NOISE * x.std(0) * noise


def train(x: Tensor, loss, outputs: int, seed: int = 0) -> torch.nn.Module:
    """A network that minimises `loss` of its output v."""
    torch.manual_seed(seed)
    net = torch.nn.Sequential(
        torch.nn.Linear(x.shape[-1], 128), torch.nn.Tanh(), torch.nn.Linear(128, outputs)
    ).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(net(x)).backward()
        optimizer.step()
    return net


def run(case: str, train_count: int = TRAIN, test_count: int = TEST) -> dict[str, tuple]:
    """Each way: its error to the truth, in standard units, its largest mismatch, and its z."""
    grid = Grid.of(case)
    truth = scenarios(case, train_count + test_count, seed=0)
    x = measured(truth, grid.buses, seed=1)
    mean, scale = truth[:train_count].mean(0), truth[:train_count].std(0)
    # What does not vary is known: voltages that generators hold, buses without load, one angle.
    known = scale < 1e-9
    scale = scale.where(~known, 1.0)
    x = (x - x[:train_count].mean(0)) / x[:train_count].std(0).clamp_min(1e-6)
    y, x, x_test = ((truth - mean) / scale)[:train_count], x[:train_count], x[train_count:]

    # Outputs in standard units, so that all count alike.
    A = torch.eye(len(mean), dtype=mean.dtype)[known]
    layer = taut.Projection(A, A.new_zeros(len(A)), h=lambda z: grid.mismatch(mean + scale * z))
    last: list[taut.Solution | None] = [None]

    def loss(v: Tensor) -> Tensor:
        last[0] = layer.solve(v, init=last[0])  # where the last step ended, one is nearly there
        return taut.matched_loss(last[0], y)

    plain = train(x, lambda v: 0.5 * (v - y).square().sum(-1).mean(), len(mean))
    through = train(x, loss, len(mean))
    with torch.no_grad():
        predicted = {
            "plain": plain(x_test),
            "plain, projected at test": layer(plain(x_test)),
            "trained through the layer": layer(through(x_test)),
        }
    found = {}
    for name, own in predicted.items():
        z = mean + scale * own
        error = ((z - truth[train_count:]) / scale).square().mean().sqrt().item()
        found[name] = error, grid.mismatch(z).abs().max().item(), z
    return found


def figure(found: dict[str, dict[str, tuple]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    names = list(next(iter(found.values())))
    for axis, column, label in zip(
        axes,
        (0, 1),
        ("error to PYPOWER, standard units", "largest mismatch, per unit"),
        strict=True,
    ):
        for k, name in enumerate(names):
            places = [i + 0.26 * (k - 1) for i in range(len(found))]
            values = [found[case][name][column] for case in found]
            bars = axis.bar(places, values, 0.24, label=name)
            text = "%.3f" if column == 0 else "%.0e"
            axis.bar_label(bars, fmt=text, fontsize=7, padding=1)
        axis.set_xticks(range(len(found)), [f"{case[4:]} buses" for case in found])
        axis.set_ylabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_yscale("log")
    axes[1].set_ylim(1e-17, 1e4)
    axes[1].axhline(1e-10, color="grey", lw=0.8, ls=":")
    axes[0].margins(y=0.15)
    fig.legend(
        *axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False
    )
    fig.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--figure", help="where to draw the figure")
    options = parser.parse_args()
    found = {}
    for case in options.cases:
        start = time.perf_counter()
        found[case] = run(case)
        print(f"{case}, {time.perf_counter() - start:.0f} s")
        for name, (error, mismatch, _) in found[case].items():
            print(f"  {name:26} error {error:.4f}, largest mismatch {mismatch:.1e}")
    if options.figure:
        figure(found, options.figure)


if __name__ == "__main__":
    main()
