"""`timeline`: what each instance computed, and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.track.groups import Group
from mcjax.track.levels import REQUESTS
from mcjax.track.plots.drawn import Drawn
from mcjax.track.plots.kind import Kind
from mcjax.track.plots.panels import grouping, joined, natural, nothing, table, time_axis
from mcjax.track.plots.style import BLUE, ORANGE, SMALL_PT, new_figure
from mcjax.track.plots.subject import Subject, without_rows
from mcjax.track.statistics import overlap_ns
from mcjax.track.steps import COLUMNS, Steps, steps_of
from mcjax.types import NS_PER_S

MOST_INSTANCES = 32
MOST_GROUPS = 4
ROW_IN = {"column": 0.14, "page": 0.17}
BINS_AN_INCH = 90
COLOURS = {"prefill": BLUE, "decode": ORANGE}


def draw(subject: Subject) -> Drawn:
    shown = subject.first(MOST_GROUPS)
    found = [steps_of(group.first.pieces("events", *COLUMNS)) for group in shown.groups]
    for group, steps in zip(shown.groups, found, strict=True):
        if not steps.places:
            without_rows(group.first, KIND.name, "the events of steps", REQUESTS)
    from_ns, to_ns = shown.span_ns()
    edges = np.linspace(from_ns, to_ns, round(shown.width_in * BINS_AN_INCH) + 1).astype(np.int64)
    heights = [0.16 + ROW_IN[shown.width] * max(2, min(len(steps.places), MOST_INSTANCES)) for steps in found]
    figure = new_figure(shown.width_in, sum(heights) + 0.75)
    panels = list(figure.subplots(len(found), 1, sharex=True, squeeze=False, height_ratios=heights).flat)
    scale = time_axis(panels, from_ns, to_ns)
    tables: list[Any] = []
    for index, (group, steps, panel) in enumerate(zip(shown.groups, found, panels, strict=True)):
        names = rows_of(steps)
        activity(panel, steps, names, edges, scale)
        panel.set_title(_title(shown, index, group, len(names), len(steps.places)))
        tables += [
            table(
                group=shown.labels[index],
                instance=steps.places[place],
                phase=phase,
                begin_s=edges[:-1] / NS_PER_S,
                end_s=edges[1:] / NS_PER_S,
                busy=busy,
            )
            for place, phase, busy in shares_busy(steps, names, edges)
        ]
    _legend(figure)
    figure.supxlabel(grouping(shown), fontsize=SMALL_PT)
    return Drawn(figure, joined(tables) if tables else table(group="", instance="", phase="", busy=np.zeros(0)))


def rows_of(steps: Steps) -> list[int]:
    """The places that are shown, in order: those that prefill first, then by their numbers."""
    prefills = set(steps.prefill.place.tolist())
    order = sorted(range(len(steps.places)), key=lambda place: (place not in prefills, *natural(steps.places[place])))
    return order[:MOST_INSTANCES]


def shares_busy(
    steps: Steps, places: Sequence[int], edges: NDArray[np.int64]
) -> Iterator[tuple[int, str, NDArray[np.float64]]]:
    """`(place, phase, [bins])`: which share of each bin a place spent in a phase, for the phases that it has."""
    for place in places:
        for phase, busy in (("prefill", steps.prefill), ("decode", steps.decode)):
            union = busy.of(place)
            if len(union[0]):
                yield place, phase, overlap_ns(edges[:-1], edges[1:], union) / np.maximum(np.diff(edges), 1)


def activity(panel: Any, steps: Steps, places: Sequence[int], edges: NDArray[np.int64], scale: float) -> None:
    """A row an instance; of one with both phases, prefill grows up from the row's line, and decode down."""
    if not places:
        nothing(panel, "no steps")
        return
    shares = list(shares_busy(steps, places, edges))
    phases = [place for place, _, _ in shares]
    for place, phase, busy in shares:
        row = places.index(place)
        alone = phases.count(place) == 1
        line, height = (row + 0.42, -0.84) if alone else (row, -0.42 if phase == "prefill" else 0.42)
        # One point a change: a row that is busy throughout is one rectangle.
        changes = np.append(np.flatnonzero(np.concatenate([[True], np.diff(busy) != 0])), -1)
        at, tops = edges[changes] / scale, line + height * busy[changes]
        panel.fill_between(at, np.full(len(at), line), tops, step="post", color=COLOURS[phase], linewidth=0)
    panel.set_ylim(max(len(places), 2) - 0.4, -0.6)
    panel.set_yticks(range(len(places)), [steps.places[place] for place in places])
    panel.set_xlim(edges[0] / scale, edges[-1] / scale)


def _title(subject: Subject, index: int, group: Group, shown: int, of: int) -> str:
    (seed, slice_), _ = next(iter(group.runs.items()))
    words = [subject.labels[index]] if len(subject.groups) > 1 else []
    if len(group.runs) > 1:
        words.append(f"seed {seed}, slice {slice_}")
    if of > shown:
        words.append(f"the first {shown} of {of} instances")
    return "; ".join(words)


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour) for colour in COLOURS.values()]
    figure.legend(handles=handles, labels=list(COLOURS), loc="outside upper right", ncols=2, fontsize=SMALL_PT)


KIND = Kind(
    "timeline",
    "What each instance computed",
    "A row an instance; the height is the share of the time that it was busy with prefill or decode. An instance that "
    "does both has prefill above its line and decode below. One run a group is shown, the first.",
    draw,
    ("from_s", "to_s"),
)
