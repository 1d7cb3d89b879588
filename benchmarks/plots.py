"""Draw ``results/*.json``: time against N, and error against time, on logarithmic axes."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FLOOR = 1e-17  # an error of exactly 0 is drawn here
OURS: dict[str, dict[str, Any]] = {
    "taut": {"linestyle": "--", "marker": "o"},
    "taut Projection": {"linestyle": "-", "marker": "D"},
    "taut float32": {"linestyle": ":", "marker": "o", "markerfacecolor": "white"},
}


def _total(record: dict[str, Any]) -> float:
    return (record["forward_ms"] + record["backward_ms"]) / record["samples"]


def _size(record: dict[str, Any]) -> str:
    return "×".join(f"{s:g}" for s in record["size"])


def _styles(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """One colour per peer; ours black, and thicker, each with a line of its own."""
    names = list(dict.fromkeys(record["who"] for record in records))
    colours = plt.get_cmap("tab20")
    return {
        who: {"color": "black", "linewidth": 2.5, "zorder": 3, **OURS[who]}
        if who in OURS
        else {"color": colours(i % 20), "linewidth": 1, "marker": "s" if "tight" in who else "."}
        for i, who in enumerate(names)
    }


def _draw_family(family: str, records: list[dict[str, Any]], path: Path) -> None:
    sizes = list(dict.fromkeys(_size(record) for record in records))
    styles = _styles(records)
    figure, axes = plt.subplots(
        2, len(sizes), figsize=(4.2 * len(sizes) + 3.5, 8), squeeze=False, layout="constrained"
    )
    for column, size in enumerate(sizes):
        here = [record for record in records if _size(record) == size]
        times, errors = axes[0, column], axes[1, column]
        for who in dict.fromkeys(record["who"] for record in here):
            mine = [record for record in here if record["who"] == who]
            times.plot([r["samples"] for r in mine], [_total(r) for r in mine], **styles[who])
            middle = mine[min(1, len(mine) - 1)]
            point = {**styles[who], "linestyle": "none"}
            errors.plot(_total(middle), max(middle["error_z"], FLOOR), **point)
        times.set(title=f"{family} {size}", xlabel="N", ylabel="ms per sample, forward + backward")
        errors.set(xlabel=f"ms per sample at N = {middle['samples']}", ylabel="largest error of z")
        for axis in (times, errors):
            axis.set(xscale="log", yscale="log")
            axis.grid(alpha=0.3)
        counts = sorted({record["samples"] for record in here})
        times.set_xticks(counts, [str(count) for count in counts])
        times.set_xticks([], minor=True)
    handles = [plt.Line2D([], [], label=who, **style) for who, style in styles.items()]
    figure.legend(handles=handles, loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw(path: Path) -> None:
    """Draw every family of one results file beside it."""
    records = [r for r in json.loads(path.read_text())["records"] if "failure" not in r]
    for family in dict.fromkeys(record["family"] for record in records):
        chosen = [record for record in records if record["family"] == family]
        target = path.with_name(f"{path.stem}_{family}.png")
        _draw_family(family, chosen, target)
        print(f"drawn: {target.relative_to(path.parent.parent)}")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        draw(Path(name).resolve())
