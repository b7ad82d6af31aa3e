"""A list of runs as a table on the terminal, as plain text, Markdown, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Sequence
from typing import Any

from mcjax.track.groups import label_of
from mcjax.track.listing.entries import Entry, differing
from mcjax.track.metrics import CATALOGUE, HEADLINE, Metric

FORMATS = ("table", "md", "csv", "json")
FIRST = (
    "requests.rejected",
    "requests.failed",
    "goodput_rps",
    "ttft_s.p90",
    "tbt_s.p90",
    "slo_attainment",
    "requests.completed",
    "prefix_hit_rate.token",
)
"""The figures of a table in the order in which they are given room. Rejections and failures are never left out."""
ALWAYS = 3
KEY_DIGITS = 8
LEAST_CONFIG = 16
"""Characters of a line that are kept for what differs."""
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def text_of_list(listed: Sequence[Entry], form: str, now_s: float | None = None) -> str:
    """The runs as text, ended by a newline. `form` is one of `FORMATS`; `table` is plain, aligned text here."""
    keys = differing(listed)
    if form == "json":
        return json.dumps([_plain(entry, keys) for entry in listed], indent=1) + "\n"
    if form == "csv":
        return _csv(listed, keys)
    if form == "md":
        header, rows = _cells(listed, keys, HEADLINE, now_s, exact=True)
        lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
        return "".join("| " + " | ".join(line) + " |\n" for line in lines)
    header, rows = _cells(listed, keys, FIRST, now_s)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n"
        for row in (header, *rows)
    )


def table_of_list(listed: Sequence[Entry], width: int, now_s: float | None = None) -> Any:
    """The runs as a `rich` table that fits into `width` characters: figures for which there is no room are left out."""
    from rich.table import Table
    from rich.text import Text

    keys = differing(listed)
    header, rows = _cells(listed, keys, FIRST, now_s)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    fixed = _FIXED - 1
    used = sum(widths[:fixed]) + 2 * fixed + min(LEAST_CONFIG, widths[fixed])
    shown = list(range(_FIXED))
    for index in range(_FIXED, len(header)):
        used += widths[index] + 2
        if used <= width or index < _FIXED + ALWAYS:
            shown.append(index)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), collapse_padding=True, width=min(width, 400))
    for index in shown:
        config = index == fixed
        table.add_column(
            header[index],
            justify="right" if index >= _FIXED else "left",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if config else None,
            min_width=None if config else min(widths[index], 24),
        )
    colours = {"failed": "red", "killed": "red", "damaged": "red", "running": "yellow", "done": ""}
    for entry, row in zip(listed, rows, strict=True):
        table.add_row(*(Text(row[index], style=colours[entry.state] if index == 3 else "") for index in shown))
    return table


_FIXED = 5
"""Columns before the figures; the last of them is what differs."""


def _cells(
    listed: Sequence[Entry], keys: Sequence[str], names: Sequence[str], now_s: float | None, exact: bool = False
) -> tuple[list[str], list[list[str]]]:
    metrics = [CATALOGUE[name] for name in names]
    header = ["key", "run", "when", "state", "config", *(_title(metric) for metric in metrics)]
    now_s = time.time() if now_s is None else now_s
    labels: dict[tuple[str | None, ...], str] = {}

    def label(entry: Entry) -> str:
        values = tuple(map(entry.value, keys))
        if values not in labels:
            pairs = zip(keys, values, strict=True)
            labels[values] = label_of({key: value for key, value in pairs if value is not None})
        return labels[values]

    return header, [
        [
            entry.record.run_key[:KEY_DIGITS] or "-",
            entry.name,
            entry.record.started if exact else ago(now_s - entry.started_s) if entry.started_s else "",
            entry.state,
            label(entry),
            *(_figure(entry.record.headline.get(metric.name), metric) for metric in metrics),
        ]
        for entry in listed
    ]


def ago(age_s: float) -> str:
    """`3 min`."""
    for seconds, unit in _UNITS:
        if age_s >= seconds:
            return f"{age_s // seconds:.0f} {unit}"
    return "now"


def _title(metric: Metric) -> str:
    return f"{metric.label} {metric.unit}" if metric.unit in ("s", "1/s") else metric.label


def _figure(value: float | None, metric: Metric) -> str:
    if value is None:
        return "-"
    if metric.unit == "share":
        return f"{100 * value:.1f}%"
    return f"{value:.0f}" if metric.name.startswith("requests.") else f"{value:.3g}"


def _plain(entry: Entry, keys: Sequence[str]) -> dict[str, Any]:
    own = entry.record
    return {
        "key": own.run_key,
        "run": str(entry.directory),
        "started": own.started,
        "ended": own.ended,
        "state": entry.state,
        "note": entry.note,
        "sweep": own.sweep,
        "config": {key: value for key in keys if (value := entry.value(key)) is not None},
        "figures": {name: own.headline.get(name) for name in HEADLINE},
        "digest": own.digest,
    }


def _csv(listed: Sequence[Entry], keys: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["key", "run", "started", "state", "sweep", *keys, *HEADLINE])
    for entry in listed:
        own = entry.record
        values = [entry.value(key) for key in keys]
        figures = [own.headline.get(name) for name in HEADLINE]
        writer.writerow([own.run_key, entry.directory, own.started, entry.state, own.sweep, *values, *figures])
    return text.getvalue()
