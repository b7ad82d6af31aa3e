"""Results as the tables of `docs/benchmarks.md`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from placement import columns


def tables(results: dict[str, Any]) -> str:
    """Markdown, a section a part that has been measured."""
    parts = {"conv2x": _conv2x, "scale": _scale, "overload": _overload, "placement": _placement}
    return "".join(
        f"## {name}\n\n`{results[name]['command']}`\n\n{make(results[name])}\n"
        for name, make in parts.items()
        if name in results
    )


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    cells = [list(head)]
    lines = [f"| {' | '.join(cells[0])} |", f"|{'---|' * len(cells[0])}"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def _runs(runs: list[dict[str, Any]], key: str, scale: float = 1.0, digits: int = 1) -> str:
    return ", ".join(f"{run[key] / scale:,.{digits}f}" for run in runs)


def _told(value: bool | None) -> str:
    return "one run" if value is None else "yes" if value else "no"


def _conv2x(part: dict[str, Any]) -> str:
    ours, theirs, hard = part["ours"], part["dynosim"], part["overloaded"]
    rows = [
        ("mcjax, " + ours["hardware"], ours["runs"], _told(ours["deterministic"])),
        (f"mcjax, {hard['hardware']}: overloaded", [hard], "one run"),
    ]
    if theirs["measured"]:
        rows.append((f"DynoSim {theirs['version']}", theirs["runs"], _told(theirs["deterministic"])))
    made = table(
        (f"{part['requests']:,} requests, 8P + 8D", "CPU s", "wall s", "peak RSS MB", "reference s", "deterministic"),
        (
            (
                name,
                _runs(runs, "cpu_s"),
                _runs(runs, "wall_s"),
                _runs(runs, "peak_rss_bytes", 1e6, 0),
                _runs(runs, "reference_s", 1, 2),
                same,
            )
            for name, runs, same in rows
        ),
    )
    if theirs["measured"]:
        return made + f"\nmcjax / DynoSim: CPU {part['cpu_ratio']:.2f}, memory {part['rss_ratio']:.2f}\n"
    return made + f"\nDynoSim was not measured: {theirs['why']}\n"


def _scale(part: dict[str, Any]) -> str:
    head = ("instances", "requests", "CPU s", "CPU us a request", "without the start", "peak RSS MB", "reference s")
    made = table(
        head,
        (
            (
                row["instances"],
                f"{row['requests']['submitted']:,}",
                f"{row['cpu_s']:,.1f}",
                f"{row['cpu_per_request_us']:,.0f}",
                f"{row['more_cpu_per_request_us']:,.0f}",
                f"{row['peak_rss_bytes'] / 1e6:,.0f}",
                f"{row['reference_s']:.2f}",
            )
            for row in part["rows"]
        ),
    )
    return made + (_profile(part["profile"]) if "profile" in part else "")


def _profile(profile: dict[str, Any]) -> str:
    few, many = profile["smallest"], profile["instances"]
    rows = [
        (
            f"`{row['function']}`",
            f"{row['own_us_smallest']:,.0f}",
            f"{row['own_us']:,.0f}",
            f"{row['calls_smallest']:,.1f}",
            f"{row['calls']:,.1f}",
        )
        for row in profile["functions"][:20]
    ]
    total = ("all", f"{profile['total_us_smallest']:,.0f}", f"{profile['total_us']:,.0f}", "", "")
    head = (
        f"under cProfile, {profile['requests']:,} requests",
        f"own us a request at {few}",
        f"at {many}",
        f"calls a request at {few}",
        f"at {many}",
    )
    return "\n" + table(head, [total, *rows])


def _overload(part: dict[str, Any]) -> str:
    head = ("run", "CPU s", "CPU us a request", "ratio", "preemptions", "retries", "completed", "virtual s")
    names = ("normal", "overload_swap", "overload_recompute")
    return table(
        head,
        (
            (
                name,
                f"{part[name]['cpu_s']:,.1f}",
                f"{part[name]['cpu_per_request_us']:,.0f}",
                f"{part[name].get('cpu_per_request_ratio', 1.0):.2f}",
                f"{part[name]['preemptions']:,}",
                f"{part[name]['retries']:,}",
                f"{part[name]['requests']['completed']:,}",
                f"{part[name]['virtual_s']:,.0f}",
            )
            for name in names
        ),
    )


def _placement(part: dict[str, Any]) -> str:
    decodes = columns(part["place"])
    pairs = {(row["prefill"], row["decode"]): row for row in part["place"]}
    prefills = list(dict.fromkeys(row["prefill"] for row in part["place"]))
    place = table(
        ("one placement: mean us (cheapest of five rounds)", *(f"decode `{name}`" for name in decodes)),
        ((f"prefill `{one}`", *(_timed(pairs[one, decode], 0) for decode in decodes)) for one in prefills),
    )
    pool = part["pool"]
    inside = table(
        ("of which, or beside it", "mean us (cheapest round)"),
        (
            ("the view", _timed(part["view"], 0)),
            (f"of it the match of {part['prompt_blocks']:.0f} blocks", _timed(part["directory_match"], 0)),
            ("pool: match 256 blocks", _timed(pool["match"], 1)),
            ("pool: pin 256 blocks, and release", _timed(pool["pin_and_release"], 1)),
            ("pool: match, pin and release 256 blocks", _timed(pool["match_pin_and_release"], 1)),
            ("hash 256 blocks of 512 tokens", _timed(pool["hash"], 0)),
            ("name 256 blocks of a trace", _timed(pool["name_trace_blocks"], 1)),
        ),
    )
    about = f"{part['instances']:,} instances, {part['directory_blocks']:,} blocks, {part['placements']:,} calls each"
    return f"{about}; {part['process']['peak_rss_bytes'] / 1e6:,.0f} MB.\n\n{place}\n{inside}"


def _timed(row: dict[str, Any], digits: int) -> str:
    return f"{row['mean_us']:,.{digits}f} ({row['least_us']:,.{digits}f})"
