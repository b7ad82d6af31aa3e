"""Results of `transfer.py` as tables and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpool_tables import size
from tables import table
from transfer_systems import SYSTEMS

TARGETS: tuple[tuple[str, str, str, str, float, int], ...] = (
    ("shm", "NIXL", "single", "throughput", 1.2, 2**18),
    ("shm", "NIXL", "batch", "throughput", 1.0, 2**18),
    ("shm", "memcpy", "single", "throughput", 0.9, 2**18),
    ("shm", "memcpy", "batch", "throughput", 0.9, 2**18),
    ("shm, verified", "memcpy", "batch", "throughput", 0.6, 2**18),
    ("tcp", "raw socket", "single", "throughput", 0.9, 2**20),
    ("tcp", "raw socket", "batch", "throughput", 0.9, 2**20),
    ("tcp", "Mooncake", "single", "throughput", 2.0, 0),
    ("tcp", "Mooncake", "batch", "throughput", 2.0, 0),
    ("tcp", "Mooncake", "single", "CPU-s/GB", 2.0, 0),
    ("tcp", "Mooncake", "batch", "CPU-s/GB", 2.0, 0),
)
"""System, rival, way, what of, how many times as good it is meant to be, from which size of a block on."""
LATENCIES = {"shm": 60.0, "tcp": 120.0}
OF_LARGE = 0.8
LIMITS: dict[str, Any] = {"memcpy": "--", "process_vm_readv": "-.", "raw socket": (0, (1, 2, 4, 2))}
"""What nothing of its kind can pass, and how its line is drawn."""


def tables(results: dict[str, Any]) -> str:
    """Markdown, a section a part that has been measured."""
    parts = {"throughput": _throughput, "spans": _spans, "latency": _latency, "profile": _profile}
    return "".join(
        f"## {name}\n\n`{results[name]['command']}`, load {results[name]['load']:.1f}\n\n{make(results[name])}"
        f"{_left_out(results[name])}\n"
        for name, make in parts.items()
        if name in results
    )


def _left_out(part: dict[str, Any]) -> str:
    why = {**part["missing"], **part.get("left_out", {})}
    return "".join(f"\n`{name}` is left out: {text}\n" for name, text in why.items())


def by_way(part: dict[str, Any], way: str) -> tuple[list[int], dict[str, dict[int, dict[str, Any]]]]:
    """Sizes, and the rows of each system by size."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in part["rows"]:
        kind, nbytes = row["case"].split()
        if kind == way:
            found.setdefault(row["system"], {})[int(nbytes)] = row
    sizes = sorted({nbytes for rows in found.values() for nbytes in rows})
    return sizes, found


def _throughput(part: dict[str, Any]) -> str:
    text = f"{part['rounds']} rounds; GB/s, median (best)\n"
    for way, title in (("single", "One block at a time"), ("batch", f"Batches of {part['batch']}")):
        sizes, found = by_way(part, way)
        names = [size(nbytes) for nbytes in sizes]
        rates = [(name, *(_rate(rows[nbytes]) for nbytes in sizes)) for name, rows in found.items()]
        cpu = [(name, *(_cpu(rows[nbytes]) for nbytes in sizes)) for name, rows in found.items()]
        text += f"\n{title}:\n\n{table((way, *names), rates)}"
        text += f"\nCPU-s/GB, reader + peer:\n\n{table((way, *names), cpu)}"
        for rival in ("memcpy", "raw socket", "NIXL", "Mooncake"):
            ratios = [
                (name, *(f"{rows[nbytes]['ratios'][rival]:.2f}" for nbytes in sizes))
                for name, rows in found.items()
                if all(rival in rows[nbytes]["ratios"] for nbytes in sizes)
            ]
            if ratios:
                text += f"\nAgainst {rival}, median of the ratios of each round:\n\n"
                text += table((f"{way} / {rival}", *names), ratios)
    return text + _targets(part)


def _rate(row: dict[str, Any]) -> str:
    return f"{row['median_bytes_per_s'] / 1e9:.2f} ({row['best_bytes_per_s'] / 1e9:.2f})"


def _cpu(row: dict[str, Any]) -> str:
    return f"{row['reader_cpu_s_per_gb']:.2f} + {row['peer_cpu_s_per_gb']:.2f}"


def _targets(part: dict[str, Any]) -> str:
    """What was aimed at, beside what came of it; nothing is asserted."""
    lines: list[tuple[str, ...]] = []
    for system, rival, way, what, times, least in TARGETS:
        sizes, found = by_way(part, way)
        wanted = [nbytes for nbytes in sizes if nbytes >= least]
        if system not in found or rival not in found or not wanted:
            continue
        ours, theirs = found[system], found[rival]
        if what == "throughput":
            ratios = [ours[nbytes]["ratios"][rival] for nbytes in wanted]
        else:
            ratios = [_all_cpu(theirs[nbytes]) / _all_cpu(ours[nbytes]) for nbytes in wanted]
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        met = sum(ratio >= times for ratio in ratios)
        lines.append((f"{system} / {rival}, {way}, {what}", f"{times:g}", shown, f"{met} of {len(ratios)}"))
    head = ("aim", "times as good", "measured, by size", "met")
    return f"\n{table(head, lines)}" if lines else ""


def _all_cpu(row: dict[str, Any]) -> float:
    return max(1e-9, row["reader_cpu_s_per_gb"] + row["peer_cpu_s_per_gb"])


def _spans(part: dict[str, Any]) -> str:
    about = (
        f"{part['count']:,} blocks of {size(part['block_bytes'])} in one batch, against the same bytes in blocks of "
    )
    rows: dict[str, dict[str, Any]] = {}
    for row in part["rows"]:
        rows.setdefault(row["system"], {})[row["case"]] = row
    cells = [
        (
            name,
            _rate(found["spans"]),
            _cpu(found["spans"]),
            _rate(found["large blocks"]),
            f"{found['spans']['of_large']:.2f}",
        )
        for name, found in rows.items()
    ]
    head = ("system", "spans, GB/s", "CPU-s/GB", "large, GB/s", "spans / large")
    return f"{about}{size(part['large_bytes'])}; {part['rounds']} rounds; aim: {OF_LARGE}.\n\n{table(head, cells)}"


def _latency(part: dict[str, Any]) -> str:
    about = f"Reads of {part['nbytes']} bytes, one after the other, {part['rounds']} rounds of {part['reads']}."
    rows = [
        (
            row["system"],
            f"{row['median_us']:,.1f}",
            f"{row['best_round_us']:,.1f}",
            f"{row['p99_us']:,.1f}",
            f"{LATENCIES[row['system']]:g}" if row["system"] in LATENCIES else "",
        )
        for row in part["rows"]
    ]
    return f"{about}\n\n{table(('system', 'median us', 'best round', 'p99 us', 'aim'), rows)}"


def _profile(part: dict[str, Any]) -> str:
    rows: list[tuple[str, ...]] = []
    for row in part["rows"]:
        for side, samples in row["samples"].items():
            shown = ", ".join(
                f"{one['function']}{' (kernel)' if one['kernel'] else ''} {one['percent']:.0f} %" for one in samples[:4]
            )
            found = row["calls_per_block"].get(side, {})
            calls = ", ".join(f"{call} {count:.2f}" for call, count in list(found.items())[:3])
            rows.append((row["system"], row["case"], side, shown, calls))
    head = ("system", "case", "side", "where its samples fell", "system calls a block")
    return f"{part['seconds']} s each, under `perf` and then `strace -c -f`.\n\n{table(head, rows)}"


def draw(results: dict[str, Any], out: Path) -> None:
    """`transfer.png`: bytes a second by size of a block, one at a time and in batches."""
    if "throughput" not in results:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    part = results["throughput"]
    figure, panels = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained", sharey=True)
    for axes, way, title in zip(panels, ("single", "batch"), ("one block at a time", f"batches of {part['batch']}")):
        sizes, found = by_way(part, way)
        colors = {name: f"C{index}" for index, name in enumerate(name for name in SYSTEMS if name not in LIMITS)}
        for name, rows in found.items():
            system = name.removesuffix(", verified")
            style = LIMITS.get(system, "-") if name == system else ":"
            color = "black" if system in LIMITS else colors[system]
            rates = [rows[nbytes]["median_bytes_per_s"] / 1e9 for nbytes in sizes]
            axes.plot(sizes, rates, linestyle=style, marker="o", markersize=3, color=color, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes, [size(nbytes) for nbytes in sizes])
        axes.set_xlabel("block")
        axes.set_title(title)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("GB/s, median of rounds")
    handles, names = panels[1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center", fontsize="small")
    figure.savefig(out / "transfer.png", dpi=110)
    plt.close(figure)
