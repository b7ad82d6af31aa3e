"""The picture of one request: where it was when, a row a place, its decisions above."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mcjax.track.plots.style import BLUE, GREEN, GREY, ORANGE, PURPLE
from mcjax.track.story import DECODING, RequestEvent, RequestStory

COLOURS = {"prefill_step": BLUE, "mixed_step": BLUE, DECODING: ORANGE, "transfer": GREEN}
NAMES = {"prefill_step": "prefill", "mixed_step": "prefill", DECODING: "decode", "transfer": "transfer"}
TROUBLE = ("retry", "preempt", "rejected", "failed", "cancelled", "lease_lost", "pull_failed", "write_back_failed")
PHASES = "phases"


def timeline(story: RequestStory) -> Any:
    """A `matplotlib.figure.Figure`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    end_s = max([_end(event) for event in story.events] + [story.since_arrival_s("finish_ns") or 0.0])
    scale, unit = (1.0, "seconds") if end_s >= 1 else (1e3, "milliseconds")
    bars = _bars(story)
    places = [PHASES, *dict.fromkeys(_place(event) for event in story.timeline())]
    figure: Any = Figure(figsize=(11, 1.9 + 0.42 * len(places)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    panel.spines[["top", "right"]].set_visible(False)
    told: set[str] = set()

    def label(name: str) -> str | None:
        new = name not in told
        told.add(name)
        return name if new else None

    for place, begin_s, took_s, name, colour in bars:
        # An edge of its own colour: a transfer of a millisecond shows beside a minute of waiting.
        panel.barh(
            places.index(place),
            took_s * scale,
            left=begin_s * scale,
            height=0.62,
            color=colour,
            edgecolor=colour,
            linewidth=0.8,
            label=label(name),
        )
    for event in story.events:
        if event.took_s is None:
            bad = event.kind in TROUBLE
            style = {"marker": "X", "color": PURPLE} if bad else {"marker": "|", "color": "black"}
            name = event.kind if bad else "log entry"
            row = places.index(_place(event))
            panel.plot(event.begin_s * scale, row, linestyle="", markersize=9, label=label(name), **style)
    for decision in story.decisions:
        panel.plot(
            decision.begin_s * scale,
            -0.75,
            linestyle="",
            marker="v",
            color=GREY,
            clip_on=False,
            label=label("decision"),
        )
    panel.set_yticks(range(len(places)), places)
    panel.set_ylim(len(places) - 0.4, -0.9)
    panel.set_xlim(-0.01 * max(end_s, 1e-6) * scale, max(end_s, 1e-6) * scale * 1.01)
    panel.set_xlabel(f"time since arrival, {unit}")
    panel.grid(axis="x", alpha=0.25)
    panel.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=8, frameon=False, fontsize=9)
    panel.set_title(_title(story), loc="left", fontsize=11, fontweight="bold", pad=12)
    return figure


def _bars(story: RequestStory) -> list[tuple[str, float, float, str, str]]:
    """(row, begin, seconds, name, colour): first what the request was waiting for, then what was done for it."""
    # A job that its instance has taken on still waits there; the first step is when computing began.
    steps_s = [event.begin_s for event in story.events if event.kind in ("prefill_step", "mixed_step")]
    computing_s = min(steps_s, default=story.since_arrival_s("prefill_start_ns"))
    ends_s = [computing_s, *map(story.since_arrival_s, ("first_token_ns", "finish_ns"))]
    bars: list[tuple[str, float, float, str, str]] = []
    begin_s = 0.0
    for name, colour, end_s in zip(("waiting", "prefill", "decode"), ("#BBBBBB", BLUE, ORANGE), ends_s, strict=True):
        if end_s is None:
            break
        bars.append((PHASES, begin_s, end_s - begin_s, name, colour))
        begin_s = end_s
    for event in story.timeline():
        if event.took_s is not None:
            kind = event.kind
            bars.append((_place(event), event.begin_s, event.took_s, NAMES.get(kind, kind), COLOURS.get(kind, PURPLE)))
    return bars


def _place(event: RequestEvent) -> str:
    """`node-p0 hbm>dram` for a move inside a node, `node-p0>node-d0` between two."""
    ends: Sequence[str] = event.place.split(">")
    return f"{ends[0]} {event.tier}" if len(ends) == 2 and ends[0] == ends[1] else event.place


def _end(event: RequestEvent) -> float:
    return event.begin_s + (event.took_s or 0.0)


def _title(story: RequestStory) -> str:
    row = story.row
    if row is None:
        return f"request {story.request_id}, unfinished"
    reason = f" ({row['reason']})" if row["reason"] else ""
    return (
        f"request {story.request_id}, {row['state']}{reason}: {row['prompt_tokens']:,} prompt tokens, "
        f"{row['output_tokens']:,} out"
    )
