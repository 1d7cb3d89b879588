"""Stores problems, and what the kernel answers to them here, for harness.c to repeat elsewhere.

    python tests/portable/record.py FILE [SEED]

Of taut it takes plans, rules, and the functions of the compiled code with the structures
that csrc/calls.h describes.
"""

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import rounding
import torch
import within
from torch import Tensor

import taut
from taut.activations import bounded, exp, mixed, tempered, weighted
from taut.backends import Rules, cpu
from taut.backends.plan import make_plan
from taut.held import slack

SAMPLES = 37  # no multiple of any number of lanes
SHAKEN = 256  # times that a training step is tried with v changed in its last places
RULES = Rules()


def _cycle(K: int, *values: float) -> Tensor:
    return torch.tensor(values).repeat(K)[:K]


#: By the number of outputs.
ACTIVATIONS = {
    "exp": lambda K: exp,
    "sigmoid": lambda K: taut.activations.sigmoid,
    "tanh": lambda K: taut.activations.tanh,
    "linear": lambda K: taut.activations.linear,
    "bounded": lambda K: bounded(_cycle(K, -1.0, 0.0, 2.0, -5.0), _cycle(K, 1.0, 3.0, 2.5, 5.0)),
    "tempered weighted tanh": lambda K: tempered(
        weighted("tanh", _cycle(K, 0.5, 1.0, 2.0)), _cycle(K, 0.5, 1.0, 2.0, 1.5)
    ),
    "weighted linear": lambda K: weighted("linear", _cycle(K, 0.5, 1.0, 2.0)),
    "mixed": lambda K: mixed((K * ["exp", "sigmoid", "tanh", "linear", bounded(-2.0, 1.0)])[:K]),
}


def _margins(rows: int, columns: int) -> Tensor:
    """Sums of the rows and of the columns of a table: mostly zeros, and one row too many."""
    one = torch.kron(torch.eye(rows), torch.ones(columns))
    return torch.cat([one, torch.kron(torch.ones(rows), torch.eye(columns))])


def _hierarchy() -> Tensor:
    """total = Σ regions, region = Σ towns, with 5 regions of 3 towns."""
    towns = torch.kron(torch.eye(5), torch.ones(3))
    total = torch.cat([-torch.ones(1), torch.ones(5), torch.zeros(15)])[None]
    return torch.cat([total, torch.cat([torch.zeros(5, 1), -torch.eye(5), towns], dim=1)])


def _redundant() -> Tensor:
    """Small integers, so that rows which depend on others do so in float32 too."""
    A = torch.randint(-4, 5, (3, 7)).double()
    return torch.stack([A[0], A[1], A[0] + A[1], torch.zeros(7), A[2], 2 * A[0]])


MATRICES = {
    "one": lambda: torch.ones(1, 1),
    "sum": lambda: torch.ones(1, 3),
    "small": lambda: torch.randn(3, 5),
    "tile": lambda: torch.randn(4, 8),
    "positive": lambda: torch.rand(5, 16),
    "dense": lambda: torch.randn(9, 30),
    "gradients": lambda: torch.randn(18, 42),
    "redundant": _redundant,
    "margins": lambda: _margins(8, 6),
    "hierarchy": _hierarchy,
}


@dataclass(frozen=True)
class Regime:
    """How far logits, right answers and starts are spread; b is feasible where not spoilt."""

    logits: float
    answers: float
    start: float | None = None
    shift: float = 0.0
    limit: int = 30
    spoilt: bool = False


REGIMES = {
    "plain": Regime(2.0, 1.0),
    "warm": Regime(2.0, 1.0, start=0.1),
    "hard start": Regime(2.0, 1.0, start=5.0),
    "saturated": Regime(8.0, 3.0),
    "far too high": Regime(2.0, 1.0, shift=30.0),
    "few iterations": Regime(2.0, 1.0, limit=3),
    "spoilt": Regime(2.0, 1.0, spoilt=True),
}


class Writer:
    """Arrays by name, each filled up to a multiple of 8 bytes: see arrays.h."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        file.write(b"taut 2\n\0")

    def bytes(self, name: str, data: bytes) -> None:
        self._file.write(name.encode().ljust(32, b"\0"))
        self._file.write(len(data).to_bytes(8, sys.byteorder, signed=True))
        self._file.write(data + bytes(-len(data) % 8))

    def section(self, kind: str, title: str) -> None:
        self.bytes(kind, title.encode() + b"\0")

    def arrays(self, **arrays: Tensor | float | None) -> None:
        """Tensors, and numbers as int64 or float64; None is left out."""
        for name, x in arrays.items():
            if x is not None:
                x = x if isinstance(x, Tensor) else torch.tensor(x)
                x = x.double() if x.ndim == 0 and x.is_floating_point() else x
                self.bytes(name, x.detach().contiguous().numpy().tobytes())


class Recorder:
    """One A with one σ in one dtype: the calls, their answers, and how far others may be off."""

    def __init__(self, writer: Writer, A: Tensor, activation: taut.Activation, dtype: torch.dtype):
        self.write, self.A, self.activation, self.dtype = writer, A, activation, dtype
        self.plan = make_plan(taut.prepare(A, activation).basis, activation)
        sizes, arrays = self.plan.sizes, self.plan.arrays
        order, kept = arrays["order"][: sizes["kept"]], torch.zeros(len(A), dtype=torch.bool)
        kept[order[order >= 0]] = True
        kept &= (A != 0).any(-1)
        numbers = {n: arrays[n][: sizes["given"]] for n in ("shift", "scale", "temperature")}
        size, eps = numbers["scale"] * numbers["temperature"], torch.finfo(dtype).eps
        self.scene = rounding.Scene(A, kept, activation, numbers["shift"], size, eps)
        fields = {name: arrays.get(name) for name in _fields("plan")}
        fields |= {name: int(x) for name, x in sizes.items()}
        rules = {name: getattr(RULES, name) for name in _fields("rules")}
        self.structures = _structure("plan", **fields), _structure("rules", **rules)
        self.write.arrays(**fields, **rules)

    def run(self, name: str, given: dict[str, Any], found: dict[str, Tensor]) -> None:
        """The compiled code itself, without what cpu.py does for redundant equations."""
        plan, rules = map(ctypes.addressof, self.structures)
        more = {"plan": plan} if name == "loss" else {"plan": plan, "rules": rules}
        samples = {"samples": SAMPLES, "next": 0, "unsolved": SAMPLES}
        call = _structure(name, **given | samples, **found, **more)
        function, _ = cpu._functions[name]
        function(ctypes.byref(call))

    def call(self, name: str, given: dict[str, Any], found: dict[str, Tensor]) -> None:
        given |= {"samples": SAMPLES, "single": int(self.dtype == torch.float32)}
        self.run(name, given, found)
        self.write.section("call", name)
        self.write.arrays(**given, **found)

    def empty(self, *widths: int) -> Tensor:
        return torch.full((SAMPLES, *widths), torch.nan, dtype=self.dtype)

    def within(self, bounds: dict[str, Tensor]) -> None:
        self.write.arrays(**{f"within_{name}": bound for name, bound in bounds.items()})

    def regime(self, regime: Regime) -> None:
        """Solve, then backward and loss at the answers."""
        shape = SAMPLES, self.A.shape[1]
        v = (regime.logits * torch.randn(shape) + regime.shift).to(self.dtype)
        y = self.activation.sigma(regime.answers * torch.randn(shape)).to(self.dtype)
        b = (y.double() @ self.A.mT).to(self.dtype)
        if regime.spoilt:
            v[3], b[5], b[11], b[20] = torch.nan, torch.inf, 1e9, -1e3
        start = None
        if regime.start is not None:
            start = (regime.start * torch.randn(b.shape)).to(self.dtype)
        found, solved, bounds = self.solve(v, b, start, regime.limit)
        if solved.all() and self.firmly(v, b, start, regime.limit):
            self.train(v, b, y, start, found, bounds)
        u, multipliers = (found[name].where(solved[:, None], 0) for name in ("u", "multipliers"))
        self.backward(u, torch.zeros(SAMPLES, dtype=torch.long))
        v, b = v.where(solved[:, None], 0), b.where(solved[:, None], 0)
        self.loss(v, b, y, u, multipliers)

    def solve(
        self, v: Tensor, b: Tensor, start: Tensor | None, limit: int
    ) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        """What was found, which samples are solved, and how far off others may be."""
        I, K = self.A.shape
        target, share = RULES.target(self.dtype), RULES.share(self.dtype)
        given = {"v": v, "b": b, "start": start, "index": None, "b_stride": I, "limit": limit}
        given |= self.settings()
        found = {"multipliers": self.empty(I), "u": self.empty(K), "z": self.empty(K)}
        found |= {"residual": self.empty(), "iterations": torch.full((SAMPLES,), -1)}
        found["status"] = torch.full((SAMPLES,), -1)
        self.call("solve", given, found)
        solved = found["status"] == 0
        answer = (
            x[solved].double() for x in (v, b, *(found[n] for n in ("multipliers", "u", "z")))
        )
        bounds = rounding.of_solve(self.scene, *answer, target=target, share=share)
        self.write.arrays(solved=solved)
        self.within({name: _spread(x, solved) for name, x in bounds.items()})
        return found, solved, bounds

    def settings(self) -> dict[str, float]:
        """What every solve is told of its dtype."""
        kind = torch.finfo(self.dtype)
        rules = {name: getattr(RULES, name)(self.dtype) for name in ("target", "share", "cap")}
        return rules | {"huge": kind.max, "slack": slack(kind.eps), "held": 0}

    def firmly(self, v: Tensor, b: Tensor, start: Tensor | None, limit: int) -> bool:
        """Are all solved whatever rounding does? A step that leaves one is left whole."""
        (I, K), numbers = self.A.shape, (None if x is None else x.double() for x in (b, start))
        b, start = numbers
        given = {"b": b, "start": start, "index": None, "b_stride": I, "limit": limit}
        given |= self.settings() | {"single": 0}
        widths = {"multipliers": (I,), "u": (K,), "z": (K,), "residual": ()}
        found = {name: torch.empty(SAMPLES, *width).double() for name, width in widths.items()}
        found |= {name: torch.full((SAMPLES,), -1) for name in ("iterations", "status")}
        for _ in range(SHAKEN):
            by = 2 * torch.rand(SAMPLES, K, dtype=torch.double) - 1
            self.run("solve", given | {"v": v.double() * (1 + 2.0**-47 * by)}, found)
            if found["status"].any():
                return False
        return True

    def train(
        self, v: Tensor, b: Tensor, y: Tensor, start: Tensor | None,
        found: dict[str, Tensor], bounds: dict[str, Tensor],
    ) -> None:  # fmt: skip
        """The same samples in one step, from a memory in another order where there is a start."""
        I, K = self.A.shape
        index = None if start is None else torch.randperm(SAMPLES)
        order = torch.arange(SAMPLES) if index is None else index.argsort()
        table = None if start is None else start[order].contiguous()
        begun = None if table is None else table.clone()
        plan, rules = map(ctypes.addressof, self.structures)
        given = {"v": v, "b": b, "index": index, "b_stride": I, "limit": 30, "samples": SAMPLES}
        given |= self.settings() | {"single": int(self.dtype == torch.float32)}
        none = dict.fromkeys(("u", "z", "residual", "iterations", "status"))
        multipliers, loss, dv, scale = self.empty(I), self.empty(), self.empty(K), 1 / SAMPLES
        more = {"plan": plan, "rules": rules, "multipliers": multipliers, "start": table}
        solve = _structure("solve", **given, **none, **more, next=0, unsolved=SAMPLES)
        more = {"y": y, "loss": loss, "dv": dv, "scale": scale, "table": table}
        state = {"seen": 0, "stopped": 0, "unsolved": SAMPLES, "total": 0.0}
        call = _structure("train", solve=ctypes.addressof(solve), **more, entries=SAMPLES, **state)
        cpu._functions["train"][0](ctypes.byref(call))
        assert call.unsolved == 0, "a sample that solve solves"
        self.write.section("call", "train")
        self.write.arrays(**given, y=y, scale=scale, begun_table=begun)
        self.write.arrays(multipliers=multipliers, loss=loss, dv=dv, table=table)
        answer = (x.double() for x in (v, b, y, found["u"], multipliers, loss))
        apart = 2 * bounds["residual"] * bounds["multipliers"].sum(-1)
        within = {
            "multipliers": bounds["multipliers"],
            "loss": apart
            + rounding.of_loss(self.scene, *answer)["loss"]
            + rounding.of_divergence(self.scene, loss.double()),
            "dv": scale * bounds["z"]
            + self.scene.rounded(scale * y.double())
            + self.scene.rounded(dv),
        }
        if table is not None:
            within["table"] = bounds["multipliers"][order]
        self.within(within)

    def backward(self, u: Tensor, status: Tensor) -> None:
        I, K = self.A.shape
        status[[2, 17]] = 1  # not solved: their gradients are 0
        widths = {"multipliers": I, "u": K, "z": K}
        for some in ("z", "multipliers u z"):
            grads = {
                name: torch.randn(SAMPLES, width, dtype=self.dtype)
                if name in some.split()
                else None
                for name, width in widths.items()
            }
            dv, db = self.empty(K), self.empty(I)
            given = {"u": u, "status": status} | {f"g_{name}": g for name, g in grads.items()}
            self.call("backward", given, {"dv": dv, "db": db})
            self.write.arrays(solved=~db.isnan().any(-1))
            wide = [None if x is None else x.double() for x in grads.values()]
            bounds = rounding.of_backward(self.scene, u.double(), wide, dv.double(), db.double())
            self.within(bounds)

    def loss(self, v: Tensor, b: Tensor, y: Tensor, u: Tensor, multipliers: Tensor) -> None:
        given = {"v": v, "b": b, "y": y, "u": u, "multipliers": multipliers}
        loss = self.empty()
        self.call("loss", given | {"b_stride": b.shape[1]}, {"loss": loss})
        answer = (x.double() for x in (*given.values(), loss))
        self.within(rounding.of_loss(self.scene, *answer))


def _fields(kind: str) -> list[str]:
    """In the order of csrc/calls.h."""
    return [name for name, *_ in cpu._structures[kind][0]._fields_]


def _structure(kind: str, /, **fields: Any) -> ctypes.Structure:
    """With the addresses of tensors, which must outlive it."""
    assert all(x.is_contiguous() for x in fields.values() if isinstance(x, Tensor))
    fields = {name: x.data_ptr() if isinstance(x, Tensor) else x for name, x in fields.items()}
    assert fields.keys() == set(_fields(kind)), f"{kind}: library and recorder differ"
    return cpu._structures[kind][0](**fields)


def _spread(x: Tensor, solved: Tensor) -> Tensor:
    """Back to all samples: NaN, which nothing is within, where there is no answer."""
    out = x.new_full((len(solved), *x.shape[1:]), torch.nan)
    out[solved] = x
    return out


def record(path: Path, seed: int) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    with path.open("wb") as file:
        writer = Writer(file)
        for matrix, make in MATRICES.items():
            for name, activation in ACTIVATIONS.items():
                for dtype in (torch.float64, torch.float32):
                    A = make().to(dtype).double()
                    writer.section("problem", f"{matrix}, {name}, {str(dtype)[6:]}")
                    recorder = Recorder(writer, A, activation(A.shape[1]), dtype)
                    for regime in REGIMES.values():
                        recorder.regime(regime)
        within.record(writer, _structure, ACTIVATIONS)


if __name__ == "__main__":
    record(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
