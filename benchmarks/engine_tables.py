"""Results of `engine.py` as tables and a plot."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any


def tables(results: dict[str, Any]) -> str:
    """Markdown, a section a part that has been measured."""
    parts = {"limits": _limits, "decode": _steps, "prefill": _steps, "attention": _attention}
    parts |= {"overhead": _overhead, "throughput": _throughput}
    return "".join(
        f"## {name}\n\n`{results[name]['command']}`, load {results[name]['load']:.1f}\n\n{make(results[name])}\n"
        for name, make in parts.items()
        if name in results
    )


def draw(results: dict[str, Any], out: Path) -> None:
    """`engine.png`: tokens a second of the steps that have been measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parts = [part for part in ("decode", "prefill") if part in results]
    if not parts:
        return
    figure, panels = plt.subplots(1, len(parts), figsize=(5 * len(parts), 4), layout="constrained", squeeze=False)
    for axes, part in zip(panels[0], parts, strict=True):
        rows = results[part]["rows"]
        names = list(rows[0]["steps"])
        for place, name in enumerate(names):
            lefts = [index + 0.2 * (place - 1.5) for index in range(len(rows))]
            axes.bar(lefts, [row["steps"][name]["tokens_per_s"] for row in rows], 0.2, label=name)
        axes.set_xticks(range(len(rows)), [_case(row) for row in rows])
        axes.set_ylabel("tokens a second")
        axes.set_title(part)
        axes.legend()
    figure.savefig(out / "engine.png", dpi=120)
    plt.close(figure)


def _limits(part: dict[str, Any]) -> str:
    limits = part["limits"]
    reads, products = limits["read_bytes_per_s"], limits["product_flops_per_s"]
    return _table(
        ("limit", *reads),
        [
            ("read, GB/s", *(f"{value / 1e9:.1f}" for value in reads.values())),
            *(
                (f"product {dtype}, GFLOP/s", *(f"{found[name] / 1e9:,.0f}" for name in reads))
                for dtype, found in products.items()
            ),
        ],
    )


def _steps(part: dict[str, Any]) -> str:
    limits = part["limits"]
    rows = [
        (
            _case(row),
            name,
            f"{1e3 * step['best_s']:,.1f}",
            f"{1e3 * step['median_s']:,.1f}",
            f"{step['tokens_per_s']:,.0f}",
            f"{step['cores']:.1f}",
            *_against(row, name),
        )
        for row in part["rows"]
        for name, step in row["steps"].items()
    ]
    head = ("case", "side", "best ms", "median ms", "tokens/s", "cores", "times torch", "share of the limit")
    best = "; ".join(f"{_case(row)}: {row['best_ratio']:.2f}" for row in part["rows"])
    flops = ", ".join(f"{value / 1e9:,.0f} GFLOP/s {dtype}" for dtype, value in limits["flops_per_s"].items())
    read = f"Limits measured in this run: {limits['dram_bytes_per_s'] / 1e9:.1f} GB/s, {flops}."
    return f"{_table(head, rows)}\nBest dtype of each side, times torch: {best}.\n{read}\n"


def _against(row: dict[str, Any], name: str) -> tuple[str, str]:
    side, dtype = name.split(" ")
    return (f"{row['ratio'][dtype]:.2f}", f"{row['limit_share'][dtype]:.0%}") if side == "mcjax" else ("", "")


def _attention(part: dict[str, Any]) -> str:
    head = ("batch x tokens", "after", "dtype", "mcjax ms", "torch ms", "times torch", "mcjax CPU ms", "torch CPU ms")
    return _table(
        head,
        (
            (
                f"{row['batch']} x {row['tokens']}",
                f"{row['before_tokens']:,}",
                row["dtype"],
                *(f"{1e3 * row['steps'][name]['best_s']:.2f}" for name in ("mcjax", "torch")),
                f"{row['ratio']:.2f}",
                *(f"{1e3 * row['steps'][name]['cpu_s']:.2f}" for name in ("mcjax", "torch")),
            )
            for row in part["rows"]
        ),
    )


def _case(row: dict[str, Any]) -> str:
    if "batch" in row:
        return f"B = {row['batch']}, context {row['context_tokens']}"
    return f"{row['prompt_tokens']:,} tokens"


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    cells = list(head)
    lines = [f"| {' | '.join(cells)} |", f"|{'---|' * len(cells)}"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def _overhead(part: dict[str, Any]) -> str:
    head = ("model", "steps", "ms a step", "device", "dispatch", "Python", "between steps, median us", "longest us")
    rows = [
        (
            row["model"],
            str(row["steps"]),
            f"{row['step_ms']:.2f}",
            *(f"{row[key]:.1%}" for key in ("device_share", "dispatch_share", "python_share")),
            f"{row['between_median_us']:,.0f}",
            f"{row['between_longest_us']:,.0f}",
        )
        for row in part["rows"]
    ]
    profiles = [
        f"\n{row['model']}, CPU of the event loop's thread:\n\n"
        + _table(
            ("function", "own ms", "calls"),
            [(own["function"], f"{1e3 * own['own_s']:.1f}", str(own["calls"])) for own in row["profile"]],
        )
        for row in part["rows"]
    ]
    return _table(head, rows) + "".join(profiles)


def _throughput(part: dict[str, Any]) -> str:
    head = ("side", "seconds", "output tokens/s")
    rows = [(name, f"{row['seconds']:.1f}", f"{row['output_tokens_per_s']:.1f}") for name, row in part["rows"].items()]
    agreement = part["agreement"]
    return (
        f"{_table(head, rows)}\nmcjax 1m against generate: {part['ratio']:.2f} times in float32, "
        f"{part['best_ratio']:.2f} with the best dtype of each. Of {part['requests']} requests {agreement['equal']} "
        f"have the same tokens, {agreement['within_margin']} part where the two best logits are closer than "
        f"{2 * agreement['tolerance']}, {agreement['beyond_margin']} elsewhere (largest gap "
        f"{agreement['largest_gap']:.3f}).\n"
    )
