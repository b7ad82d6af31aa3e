"""A request's story in words and tables: plain text for files and pipes, rich tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcjax.track.console import duration, size
from mcjax.track.story import Candidate, RequestDecision, RequestStory
from mcjax.types import Miss

MOST_CANDIDATES = 12
WORDS = frozenset({"", "what", "where", "tiers", "candidate", "first block", "detail"})
"""Columns of words stand to the left, figures to the right."""
LEAST_NEEDED = ("first block", "detail", "tokens", "blocks", "bytes", "tiers")
"""Columns that a narrow terminal goes without, in this order."""
KEY_DIGITS = 12
GAP = 3


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, sentences below it, and a table. `marked` is the row of what was chosen."""

    title: str
    lines: Sequence[str] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    marked: int = -1
    notes: Sequence[str] = ()


def sections(story: RequestStory) -> list[Section]:
    """The story as it is shown: the request, its decisions in order of time, its timeline."""
    return [_heading(story), *(_decided(decision, story.row) for decision in story.decisions), _timeline(story)]


def plain(story: RequestStory) -> str:
    """Text with aligned columns, of any width: nothing is folded or cut."""
    return "\n\n".join("\n".join(_plain_lines(section)) for section in sections(story))


def decision_lines(decision: RequestDecision) -> list[str]:
    """One decision by itself, as `plain` has it."""
    return _plain_lines(_decided(decision, None))


def rich_parts(story: RequestStory, width: int) -> Iterator[Any]:
    """What rich prints, for a terminal of so many columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    for section in sections(story):
        yield Text(section.title, style="bold")
        yield from map(Text, section.lines)
        kept = _columns_within(section, width)
        if section.rows:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for column in kept:
                name = section.header[column]
                table.add_column(name, justify="left" if name in WORDS else "right", no_wrap=name != "detail")
            for index, row in enumerate(section.rows):
                style = "bold green" if index == section.marked else ""
                table.add_row(*(Text(row[column]) for column in kept), style=style)
            yield table
        yield from (Text(note, style="dim") for note in section.notes)
        yield Text("")


def _columns_within(section: Section, width: int) -> list[int]:
    widths, kept = _widths(section), list(range(len(section.header)))
    for name in LEAST_NEEDED:
        if sum(widths[column] + GAP for column in kept) > width and name in section.header:
            kept.remove(section.header.index(name))
    return kept


def _widths(section: Section) -> list[int]:
    return [max(map(len, column)) for column in zip(section.header, *section.rows, strict=True)]


def _plain_lines(section: Section) -> list[str]:
    widths = _widths(section)
    lines = [section.title, *(f"  {line}" for line in section.lines)]
    for row in (section.header, *section.rows) if section.rows else ():
        cells = [
            cell.ljust(width) if name in WORDS else cell.rjust(width)
            for name, cell, width in zip(section.header, row, widths, strict=True)
        ]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return [*lines, *(f"  {note}" for note in section.notes)]


def _prefix(row: Mapping[str, Any]) -> list[str]:
    """Where the prompt's tokens came from, and why no more of them."""
    local, remote, device, ssd = (row[f"{tier}_tokens"] for tier in ("local", "remote", "hbm", "ssd"))
    found = f"{local:,} tokens local, {remote:,} remote"
    found += "".join(f", {tokens:,} from {tier}" for tier, tokens in (("the device", device), ("SSD", ssd)) if tokens)
    lines = [f"prefix: {found}; {row['prompt_tokens'] - local - remote - device - ssd:,} computed"]
    missed = {cause: row[f"missed_{cause}_tokens"] for cause in Miss if row[f"missed_{cause}_tokens"]}
    if missed:
        why = ", ".join(f"{tokens:,} {cause}" for cause, tokens in missed.items())
        lines.append(f"computed because: {why}" + (f" ({row['skip_reason']})" if row["skip_reason"] else ""))
    return lines


def _heading(story: RequestStory) -> Section:
    row = story.row
    if row is None:
        return Section(f"request {story.request_id}: not ended when the run did")
    reason = f", {row['reason']}" if row["reason"] else ""
    owner = ", ".join(f"{name} {row[name]}" for name in ("tenant", "session") if row[name])
    lines = [
        f"arrived {story.arrival_ns / 1e9:.6f} s into the run: {owner}, turn {row['turn']}, priority {row['priority']}",
        f"prompt {row['prompt_tokens']:,} tokens; {row['output_tokens']:,} tokens out of at most {row['max_tokens']:,}",
    ]
    if row["prefill_start_ns"] >= 0:
        lines.extend(_prefix(row))
    retries = max(0, row["attempts"] - 1)
    if row["prefill_instance"]:
        lines.append(
            f"prefill on {row['prefill_instance']}, decode on {row['decode_instance'] or 'nothing'}"
            + (f", after {retries} failed attempt{'s' if retries > 1 else ''}" if retries else "")
        )
    ttft_s, end_s = story.since_arrival_s("first_token_ns"), story.since_arrival_s("finish_ns")
    times = [
        ("first token", ttft_s, row["slo_ttft_s"]),
        ("tail of intervals", _ns(row["tbt_tail_ns"]), row["slo_tbt_s"]),
    ]
    told = [f"{what} {_seconds(took)}{_bound(bound)}" for what, took, bound in times if took is not None]
    lines.append("; ".join([*told, f"ended after {_seconds(end_s)}"]))
    return Section(f"request {story.request_id}: {row['state']}{reason}", lines)


def _bound(seconds: float) -> str:
    return "" if seconds == float("inf") else f" (promised {_seconds(seconds)})"


def _decided(decision: RequestDecision, row: Mapping[str, Any] | None) -> Section:
    source = f", prefix pulled from {decision.source}" if decision.source and decision.stage == "prefill" else ""
    if decision.source and decision.stage == "transfer":
        source = f" from {decision.source}"
    title = f"{decision.stage} at {_at(decision.begin_s)}: {decision.strategy} chose {decision.choice}{source}"
    lines: list[str] = []
    if decision.stage == "prefill":
        lines.append(f"reusing {decision.reused_tokens:,} prompt tokens")
    what = {"prefill": " to the first token", "decode": " between tokens"}.get(decision.stage, "")
    promise = _promised(decision, row)
    expected, outcome = decision.expected_s, decision.outcome_s
    said = f"expected {_seconds(expected)}{what}{promise}" if expected is not None else ""
    if outcome is not None:
        said += f"{', ' if said else ''}was {_seconds(outcome)}{_error(expected, outcome)}"
    if said:
        lines.append(said)
    lines += [f"{word}: {text}" for word, text in (("outcome", decision.outcome), ("reason", decision.reason)) if text]
    header, rows, marked, notes = _candidates(decision)
    return Section(title, lines, header, rows, marked, notes)


def _promised(decision: RequestDecision, row: Mapping[str, Any] | None) -> str:
    column = {"ttft": "slo_ttft_s", "tbt": "slo_tbt_s"}.get(decision.reason)
    if row is None or column is None or not decision.stage.startswith("admission"):
        return ""
    return f", promised {_seconds(row[column])}"


def _error(expected: float | None, outcome: float) -> str:
    if expected is None or outcome <= 0 or expected == float("inf"):
        return ""
    error = (expected - outcome) / outcome
    if abs(error) < 0.0005:
        return " (estimate within 0.1%)"
    return f" (estimate {abs(error):.1%} too {'high' if error > 0 else 'low'})"


def _candidates(decision: RequestDecision) -> tuple[list[str], list[list[str]], int, list[str]]:
    """Header, rows (best first), the marked row, and what to say below."""
    found = decision.candidates
    ranked = sorted(range(len(found)), key=lambda index: (_rank(found[index]), index))
    shown = [index for place, index in enumerate(ranked) if place < MOST_CANDIDATES or found[index].chosen]
    columns = [
        (name, [_seconds(getattr(found[index], attribute)) for index in shown])
        for name, attribute in (
            ("queue", "queue_s"),
            ("transfer", "transfer_s"),
            ("compute", "compute_s"),
            ("total", "total_s"),
        )
        if any(getattr(candidate, attribute) is not None for candidate in found)
    ]
    for quantity in dict.fromkeys(name for candidate in found for name in candidate.others):
        values = [found[index].others.get(quantity) for index in shown]
        text = [
            _seconds(value) if quantity.endswith("_s") else "-" if value is None else f"{value:g}" for value in values
        ]
        columns.append((quantity.removesuffix("_s"), text))
    notes: list[str] = []
    if decision.source and decision.stage == "prefill" and len(found) > 1:
        notes.append(
            "chosen: computes from the pulled prefix. All others: total from their own prefix; transfer, which is no "
            "part of it, is what pulling there would take."
        )
    if len(found) > len(shown):
        notes.append(f"{len(found) - len(shown)} more candidates, none of them better, are not shown")
    rows = [
        ["*" if found[index].chosen else "", found[index].name, *(text[line] for _, text in columns)]
        for line, index in enumerate(shown)
    ]
    marked = next((line for line, index in enumerate(shown) if found[index].chosen), -1)
    return ["", "candidate", *(name for name, _ in columns)], rows, marked, notes


def _rank(candidate: Candidate) -> float:
    if candidate.total_s is not None:
        return candidate.total_s
    return next(iter(candidate.others.values()), float("inf"))


def _timeline(story: RequestStory) -> Section:
    header = ["at", "took", "what", "where", "tiers", "blocks", "first block", "tokens", "bytes", "detail"]
    entries = story.timeline()
    rows = [
        [
            _at(event.begin_s),
            "" if event.took_s is None else _seconds(event.took_s),
            event.kind,
            _inside(event.place),
            event.tier,
            f"{event.blocks:,}" if event.blocks else "",
            event.first_block[:KEY_DIGITS],
            f"{event.tokens:,}" if event.tokens else "",
            size(event.nbytes) if event.nbytes else "",
            event.detail,
        ]
        for event in entries
    ]
    used = [index for index in range(len(header)) if any(row[index] for row in rows)]
    return Section(
        f"timeline since arrival, {len(story.events)} events",
        [],
        [header[i] for i in used],
        [[row[i] for i in used] for row in rows],
    )


def _inside(place: str) -> str:
    """A move inside a node is at that node: which tiers it is between stands beside it."""
    ends = place.split(">")
    return ends[0] if len(ends) == 2 and ends[0] == ends[1] else place


def _ns(value: int | None) -> float | None:
    return None if value is None else value / 1e9


def _at(seconds: float) -> str:
    return f"{seconds:+.6f} s"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value == float("inf"):
        return "no bound"
    return f"-{duration(-value)}" if value < 0 else duration(value)
