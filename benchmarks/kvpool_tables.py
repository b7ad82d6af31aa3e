"""Results of `kvpool.py` as tables and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tables import table


def tables(results: dict[str, Any]) -> str:
    """Markdown, a section a part that has been measured."""
    parts = {"host": _sides, "ssd": _ssd, "peers": _peers, "pool": _pool, "directory": _directory}
    parts |= {"eviction": _eviction}
    return "".join(
        f"## {name}\n\n`{results[name]['command']}`, load {results[name]['load']:.1f}\n\n{make(results[name])}\n"
        for name, make in parts.items()
        if name in results
    )


def draw(results: dict[str, Any], out: Path) -> None:
    """`kvpool.png`: bytes a second of whatever moves blocks, a panel a part."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parts = [part for part in ("host", "peers", "ssd") if part in results]
    if not parts:
        return
    figure, panels = plt.subplots(1, len(parts), figsize=(5 * len(parts), 4), layout="constrained", squeeze=False)
    for axes, part in zip(panels[0], parts, strict=True):
        rows = results[part]["rows"]
        names = list(rows[0]["sides"])
        width = 0.8 / len(names)
        for place, name in enumerate(names):
            lefts = [index + width * (place - (len(names) - 1) / 2) for index in range(len(rows))]
            axes.bar(lefts, [row["sides"][name]["median_bytes_per_s"] / 1e9 for row in rows], width, label=name)
        axes.set_xticks(range(len(rows)), [size(row["block_bytes"]) for row in rows])
        axes.set_xlabel("block")
        axes.set_ylabel("GB/s, median of rounds")
        axes.set_title(part)
        axes.legend(fontsize="small")
    figure.savefig(out / "kvpool.png", dpi=120)
    plt.close(figure)


def size(nbytes: int) -> str:
    """A power of two as people write it."""
    for unit, factor in (("MiB", 2**20), ("KiB", 2**10)):
        if nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def _rates(part: dict[str, Any], against: str) -> str:
    return table(
        ("block", "side", "GB/s, median (best)", f"against {against}"),
        (
            (
                size(row["block_bytes"]),
                name,
                f"{side['median_bytes_per_s'] / 1e9:.2f} ({side['best_bytes_per_s'] / 1e9:.2f})",
                "" if side["ratio"] in (None, 1.0) else f"{side['ratio']:.2f}",
            )
            for row in part["rows"]
            for name, side in row["sides"].items()
        ),
    )


def _sides(part: dict[str, Any]) -> str:
    return f"Batches of {part['batch']}, {part['rounds']} rounds.\n\n{_rates(part, 'memcpy')}"


def _peers(part: dict[str, Any]) -> str:
    about = f"Mooncake Store {part['version']}, batches of {part['batch']}, {part['rounds']} rounds."
    return f"{about}\n\n{_rates(part, 'Mooncake')}"


def _ssd(part: dict[str, Any]) -> str:
    told = f"\nfio was not measured: {part['why']}\n" if part["why"] else ""
    return f"{part['about']}\n\n{_rates(part, 'fio')}{told}"


def _pool(part: dict[str, Any]) -> str:
    names = {"match_pin_release": "match, pin and release 256 blocks"}
    names |= {name: f"insert a span of {name[7:]}" for name in part if name.startswith("insert_")}
    rows = [(what, f"{part[name]['mean_us']:,.1f} ({part[name]['least_us']:,.1f})") for name, what in names.items()]
    books = part["books"]
    about = f"{books['blocks']:,} blocks in the pool, {part['calls']:,} calls each"
    return (
        f"{about}.\n\n{table(('of the pool', 'mean CPU us (cheapest round)'), rows)}\n"
        f"The pool's books: {books['bytes_per_block']:,.0f} bytes a block.\n"
    )


def _directory(part: dict[str, Any]) -> str:
    return (
        f"{part['blocks']:,} blocks on {part['nodes']:,} nodes: {part['grown_bytes'] / 1e6:,.0f} MB, "
        f"{part['bytes_per_block']:,.0f} bytes a block.\n"
    )


def _eviction(part: dict[str, Any]) -> str:
    rows = [(f"`{row['name']}`", f"{row['mean_us']:.2f} ({row['least_us']:.2f})") for row in part["rows"]]
    skipped = "".join(f"\n`{name}` is left out: {why}\n" for name, why in part["skipped"].items())
    about = f"A full pool of {part['pool_blocks']:,} blocks, spans of {part['span']}"
    return f"{about}.\n\n{table(('strategy', 'CPU us a block, mean (cheapest round)'), rows)}{skipped}"
