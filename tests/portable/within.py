"""Inequalities and bounds for record.py: problems, calls, and how far other answers may lie."""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from rounding import CURVED, EPS
from torch import Tensor

import taut
from taut.analysis import analyse
from taut.backends import Rules, cpu
from taut.backends.rows import make_rows
from taut.held import slack

#: (K, I, M), and what becomes of the rows of G.
SHAPES = {"small": (5, 2, 3), "no equations": (9, 0, 5), "dense": (17, 4, 7)}
ROWS = {
    "plain": lambda G: G,
    "twice": lambda G: torch.cat([G, G]),
    "boxes": lambda G: torch.cat([torch.eye(G.shape[1])[: len(G)], G[:2]]),
    "bounds": None,
}


@dataclass(frozen=True)
class Given:
    """Samples with their sides; `floor` and `ceiling` are bounds on z, or None."""

    v: Tensor
    lower: Tensor
    upper: Tensor
    floor: Tensor | None
    ceiling: Tensor | None


class Recorder:
    """One C = [A; G] with one σ in one dtype."""

    def __init__(
        self, writer: Any, structure: Any, activation: taut.Activation, dtype: torch.dtype
    ):
        self.write, self.structure, self.activation, self.dtype = (
            writer, structure, activation, dtype)  # fmt: skip
        self.rules, self.samples = Rules(), 37

    def prepare(self, A: Tensor, G: Tensor) -> None:
        """The plan, and that of the line if there is one."""
        self.A, self.C = A, torch.cat([A, G])
        both = analyse(self.C, 0.0, aloud=False), analyse(A, 1e-16)
        self.rows = rows = make_rows(*both, self.activation)
        known = cpu._structures
        fields = {name: rows.plan.arrays.get(name) for name, *_ in known["plan"][0]._fields_}
        fields |= {
            name: int(x) if isinstance(x, bool) else x for name, x in rows.plan.sizes.items()
        }
        rules = {name: getattr(self.rules, name) for name, *_ in known["rules"][0]._fields_}
        self.structures = {"plan": self.structure("plan", **fields)}
        self.structures["rules"] = self.structure("rules", **rules)
        self.write.arrays(**fields, **rules, **rows.ends, first_of_G=rows.equations)
        self.structures["line"] = None
        if rows.line is not None:
            line = rows.line.arrays | rows.line.sizes
            self.structures["line"] = self.structure("line", **line)
            self.write.arrays(**{f"line_{name}": x for name, x in line.items()})

    def draw(self, bounded: bool, spoilt: bool) -> Given:
        shape = self.samples, self.C.shape[1]
        v = 2 * torch.randn(shape)
        y = self.activation.sigma(torch.randn(shape))
        width, r = y.std(0), y @ self.C.mT
        gap = 0.3 * torch.rand(r.shape) * (width * self.C.abs()).sum(-1)
        lower, upper = r - gap, r + 0.3 * gap
        I = len(self.A)
        lower[:, :I] = upper[:, :I] = r[:, :I]
        lower[:, I::3], upper[:, I + 1 :: 3] = -torch.inf, torch.inf
        if spoilt:
            v[3], lower[7], lower[11, -1] = torch.nan, torch.inf, torch.nan
        floor = ceiling = None
        if bounded:
            floor, ceiling = (x.to(self.dtype) for x in (y - 0.2 * width, y + 0.05 * width))
        v, lower, upper = (x.to(self.dtype) for x in (v, lower, upper))
        upper[:, :I] = lower[:, :I]
        return Given(v, lower, upper, floor, ceiling)

    def call(self, name: str, given: dict[str, Any], found: dict[str, Tensor]) -> None:
        addresses = {
            key: None if x is None else ctypes.addressof(x) for key, x in self.structures.items()
        }
        given |= {"samples": self.samples, "single": int(self.dtype == torch.float32)}
        more = dict(addresses)
        if name == "within":
            ends = self.rows.ends
            more |= {key: ends.get(key) for key in ("lowest", "highest", "norm", "only")}
            more["equations"] = self.rows.equations
        before = {f"begun_{key}": x.clone() for key, x in found.items() if name == "within"}
        call = self.structure(name, **given, **found, **more, next=0, unsolved=self.samples)
        cpu._functions[name][0](ctypes.byref(call))
        self.write.section("call", name)
        self.write.arrays(**given, **found, **before)

    def empty(self, *widths: int) -> Tensor:
        return torch.full((self.samples, *widths), torch.nan, dtype=self.dtype)

    def solve(self, given: Given, start: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
        rows, K = self.C.shape
        n, dtype = self.samples, self.dtype
        sides = {name: getattr(given, name) for name in ("v", "lower", "upper", "floor", "ceiling")}
        numbers = {"begun": 0, "limit": self.rules.first, "inner": 60, "target": 8 * EPS}
        numbers |= {"cap": self.rules.cap(dtype), "slack": slack(torch.finfo(dtype).eps)}
        numbers |= {"huge": torch.finfo(dtype).max, "held": 0}
        found = {"multipliers": self.empty(rows), "u": self.empty(K), "z": self.empty(K)}
        found |= {"residual": self.empty(), "iterations": torch.full((n,), -1)}
        found["status"] = torch.full((n,), -1)
        self.call("within", sides | {"start": start} | numbers, found)
        solved = found["status"] == 0
        self.write.arrays(solved=solved)
        return found, solved

    def bounds(self, given: Given, found: dict[str, Tensor], solved: Tensor, unique: bool) -> None:
        """Of z, and of ν and u where no rows depend on each other: see `of_solve`."""
        v, low, high = (x[solved].double() for x in (given.v, given.lower, given.upper))
        ν, u, z = (found[name][solved].double() for name in ("multipliers", "u", "z"))
        w, active = self.slopes(given, u, z, solved), (ν != 0) | (low == high)
        side = torch.where((ν > 0) | (low == high), low, high).where(active, 0.0)
        size, steps = self.C.abs(), (sum(self.C.shape) + 30) * EPS
        reached = v.abs() + ν.abs() @ size
        shift = self.rows.plan.arrays["shift"][: z.shape[1]]
        lost = z.abs() + 2 * shift.abs() + w * reached
        scale = side.abs() + lost @ size.mT
        residual = (8 * EPS + 4 * EPS + steps) * scale
        inverse = self.inverse(w, active)
        apart = CURVED * torch.einsum("nij,nj->ni", inverse, 2 * residual) * active
        moved = apart @ size + 2 * steps * reached
        stored = torch.finfo(self.dtype).eps
        tiny = torch.finfo(torch.float32).tiny * (stored > EPS)
        within = {"z": CURVED * w * moved + 2 * steps * lost + stored * z.abs() + tiny}
        if unique:
            within["multipliers"] = apart + stored * ν.abs() + tiny
            within["u"] = moved + stored * u.abs() + tiny
        spread = {}
        for name, x in within.items():
            spread[name] = x.new_full((len(solved), *x.shape[1:]), torch.nan)
            spread[name][solved] = x
        self.write.arrays(**{f"within_{name}": x for name, x in spread.items()})

    def slopes(self, given: Given, u: Tensor, z: Tensor, solved: Tensor) -> Tensor:
        w = self.activation.slope(u)
        if given.floor is None:
            return w
        floor, ceiling = given.floor[solved].double(), given.ceiling[solved].double()
        return w.where((z > floor) & (z < ceiling), 0.0)

    def inverse(self, w: Tensor, active: Tensor) -> Tensor:
        """|H⁻¹| in the active rows, of the identity in others; the least one where they depend."""
        C = self.C * active.unsqueeze(-1)
        gram = torch.einsum("nik,nk,njk->nij", C, w, C) + torch.diag_embed((~active).double())
        return torch.linalg.pinv(gram, rtol=1e-12, hermitian=True).abs()

    def pull(self, given: Given, found: dict[str, Tensor], solved: Tensor) -> None:
        """At the answers, with two samples that failed; see `of_backward`."""
        status = torch.where(solved, 0, 1)
        status[[2, 17]] = 1
        ok = status == 0
        u, ν = (torch.where(ok[:, None], found[x], 0) for x in ("u", "multipliers"))
        low, high = (x.nan_to_num(0.0) for x in (given.lower, given.upper))
        grads = {name: torch.randn(x.shape, dtype=self.dtype) for name, x in
                 (("g_z", u), ("g_u", u), ("g_multipliers", ν))}  # fmt: skip
        made = {"dv": self.empty(u.shape[1]), "dlower": self.empty(ν.shape[1])}
        made |= {
            "dupper": self.empty(ν.shape[1]),
            "left": torch.ones(self.samples, dtype=torch.int8),
        }
        made |= dict.fromkeys(("dfloor", "dceiling"))
        if given.floor is not None:
            made |= {name: self.empty(u.shape[1]) for name in ("dfloor", "dceiling")}
        taken = {"u": u, "multipliers": ν, "lower": low, "upper": high, "status": status}
        taken |= {"floor": given.floor, "ceiling": given.ceiling}
        self.call("pull", taken | grads, made)
        self.write.arrays(solved=made["left"] == 0)
        z = found["z"].where(ok[:, None], 0).double()
        w = self.slopes(given, u.double(), z, ok | ~ok)
        active = ok[:, None] & ((ν != 0) | (low == high))
        s = torch.where(active, made["dlower"] + made["dupper"], 0).double().abs()
        size, steps = self.C.abs(), (sum(self.C.shape) + 30) * EPS
        g_z, g_u, g_ν = (x.double().abs() for x in grads.values())
        g = g_u + w * g_z
        weighted = torch.einsum("ik,nk,jk->nij", size, w, size)
        error = 3 * steps * (g @ size.mT + g_ν + torch.einsum("nij,nj->ni", weighted, s))
        apart = 2 * torch.einsum("nij,nj->ni", self.inverse(w, active), error * active) * active
        stored = torch.finfo(self.dtype).eps
        tiny = torch.finfo(torch.float32).tiny * (stored > EPS)
        lost = 2 * steps * (g + w * (s @ size))
        within = {"dv": w * (apart @ size) + lost + stored * made["dv"].double().abs() + tiny}
        for name in ("dlower", "dupper"):
            within[name] = apart + stored * made[name].double().abs() + tiny
        self.write.arrays(**{f"within_{name}": x for name, x in within.items()})


def record(writer: Any, structure: Any, activations: dict[str, Any]) -> None:
    """Every shape with every kind of rows, activation and dtype: cold, warm and spoilt."""
    for shape, (K, I, M) in SHAPES.items():
        for kind, make in ROWS.items():
            if make is None and I == 0:
                continue
            for name, activation in activations.items():
                for dtype in (torch.float64, torch.float32):
                    writer.section("problem", f"{shape}, {kind}, {name}, {str(dtype)[6:]}")
                    A, G = (torch.randn(n, K).to(dtype).double() for n in (I, M))
                    recorder = Recorder(writer, structure, activation(K), dtype)
                    recorder.prepare(A, G[:0] if make is None else make(G))
                    for spoilt in (False, True):
                        given = recorder.draw(make is None, spoilt)
                        found, solved = recorder.solve(given, None)
                        recorder.bounds(given, found, solved, kind == "plain")
                        ν = found["multipliers"].where(solved[:, None], 0)
                        start = ν + 0.1 * torch.randn(ν.shape, dtype=dtype)
                        warm, ok = recorder.solve(given, start)
                        recorder.bounds(given, warm, ok, kind == "plain")
                        recorder.pull(given, found, solved)
