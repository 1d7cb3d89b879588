"""The table of docs/benchmarks.md, from results/side_by_side.json.

    .venv/bin/python benchmarks/summary.py [--samples 256]

One line per problem and kind of peer: the fastest of its variants whose z has at least the digits
asked for, and its time over that of taut (the faster of `project` and `Projection`, float64).
"""

import argparse
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results/side_by_side.json"
KINDS = ("cvxpylayers", "POT", "LinSATNet", "SciPy", "qpth", "qpax", "PiNet", "proxsuite", "torch")


def total(record: dict[str, Any]) -> float:
    return record["forward_ms"] + record["backward_ms"]


def lines(records: list[dict[str, Any]], samples: int) -> list[str]:
    """Markdown rows, problem after problem."""
    rows = []
    usable = [r for r in records if "failure" not in r]
    for family, size in dict.fromkeys((r["family"], tuple(r["size"])) for r in usable):
        here = [r for r in usable if r["family"] == family and tuple(r["size"]) == size]
        count = samples if any(r["samples"] == samples for r in here) else here[0]["samples"]
        here = [r for r in here if r["samples"] == count]
        ours = [r for r in here if r["who"] in ("taut", "taut Projection")]
        if not ours:
            continue
        own = min(ours, key=total)
        for kind in KINDS:
            peers = [r for r in here if r["who"].startswith(kind) and "last_step" not in r["who"]]
            for label, chosen in (("fastest", peers), ("to 1e-9", _accurate(peers))):
                if chosen:
                    rows.append(_row(family, size, count, own, label, min(chosen, key=total)))
    return list(dict.fromkeys(rows))


def _accurate(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in records if r["error_z"] <= 1e-9 and r["error_gradient"] <= 1e-8]


def _row(family: str, size: tuple, count: int, own: dict, label: str, peer: dict) -> str:
    text = "×".join(f"{s:g}" for s in size)
    star = "*" if peer["extrapolated"] else ""
    ours = "*" if own["extrapolated"] else ""
    return (
        f"| {family} {text} | {count} | {total(own):.3g}{ours} | {own['error_z']:.0e} | "
        f"{peer['who']} ({label}) | {total(peer):.3g}{star} | {peer['error_z']:.0e} | "
        f"{peer['error_gradient']:.0e} | {total(peer) / total(own):.2g} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    records = json.loads(options.results.read_text())["records"]
    print(
        "| problem | N | taut ms | its error | peer | ms | error of z | of gradient | peer / taut |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    print("\n".join(lines(records, options.samples)))


if __name__ == "__main__":
    main()
