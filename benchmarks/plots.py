"""Pictures of results."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(results: dict[str, Any], out: Path) -> None:
    """`scale.png`, and `placement.png`, of the parts that have been measured."""
    import matplotlib

    matplotlib.use("Agg")
    if "scale" in results:
        _scale(results["scale"]["rows"], out / "scale.png")
    if "placement" in results:
        _placement(results["placement"]["place"], out / "placement.png")


def _scale(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    instances = [row["instances"] for row in rows]
    axes.plot(instances, [row["cpu_per_request_us"] for row in rows], "o-", label="whole process")
    axes.plot(instances, [row["more_cpu_per_request_us"] for row in rows], "s--", label="without its start")
    axes.set_xscale("log", base=2)
    axes.set_xticks(instances, [str(count) for count in instances])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("instances, each under the same load")
    axes.set_ylabel("CPU time a request, us")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _placement(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 1 + 0.3 * len(rows)), layout="constrained")
    names = [f"{row['prefill']}, {row['decode']}" for row in rows]
    axes.barh(names, [row["mean_us"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("one placement (prefill, decode selection), mean CPU us")
    figure.savefig(path, dpi=120)
    plt.close(figure)
