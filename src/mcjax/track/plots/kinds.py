"""The kinds of pictures by name, and the one function that draws them all."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mcjax.errors import ConfigError
from mcjax.track.plots import (
    goodput,
    hit_rate,
    instances,
    links,
    load,
    pareto,
    queues,
    residency,
    tbt_cdf,
    ttft_cdf,
)
from mcjax.track.plots.drawn import Drawn
from mcjax.track.plots.kind import Kind
from mcjax.track.plots.style import WIDTHS, styled
from mcjax.track.plots.subject import Subject, subject_of
from mcjax.track.run import Run

KINDS: Mapping[str, Kind] = {
    module.KIND.name: module.KIND
    for module in (ttft_cdf, tbt_cdf, goodput, pareto, hit_rate, residency, queues, links, instances, load)
}
OPTIONS = ("width", "title")
"""What every kind takes."""
SPAN = ("from_s", "to_s")


def draw(runs: Sequence[Run] | Run, kind: str, **options: object) -> Drawn:
    """A picture of these runs: `draw(runs, "ttft_cdf", width="page").save("fig.pdf")`.

    Args:
        runs: one, or several; runs that differ only in seed and slice are repetitions, and give intervals.
        kind: one of `KINDS`.
        options: `width` (`column` or `page`), `title`, and what the kind takes (`KINDS[kind].options`).

    Raises:
        ConfigError: no such kind or option, or a value that it cannot take.
        RunError: no run is finished, or one was recorded at a level that kept too little.
    """
    if kind not in KINDS:
        raise ConfigError("kind", kind, f"no such kind{_close(kind, KINDS)}", KINDS)
    found = KINDS[kind]
    given = {key: str(value) for key, value in options.items() if value is not None}
    for key, value in given.items():
        if key not in (*OPTIONS, *found.options):
            allowed = (*OPTIONS, *found.options)
            raise ConfigError(key, value, f"kind={kind} takes no {key}{_close(key, allowed)}", allowed)
    subject = _subject([runs] if isinstance(runs, Run) else runs, given)
    with styled():
        drawn = found.draw(subject)
        if given.get("title"):
            drawn.figure.suptitle(given["title"], x=0.01, ha="left", fontweight="bold")
    note = note_of(found, subject)
    return replace(drawn, kind=kind, title=given.get("title") or found.title, note=note, missing=subject.missing)


def note_of(kind: Kind, subject: Subject) -> str:
    """What the kind shows, what its intervals are, and which runs are not in it."""
    least, most = (pick(len(group.runs) for group in subject.groups) for pick in (min, max))
    if kind is instances.KIND:
        interval = ""
    elif most > 1:
        count = f"{most}" if least == most else f"{least} to {most}"
        interval = (
            "Bands and bars are 95 % bootstrap intervals of the mean over repetitions (seeds and slices), each point "
            f"by itself: {count} runs a group."
        )
    elif kind in (residency.KIND, queues.KIND):
        interval = "One run a group: the band goes from the least to the most of its instances."
    else:
        interval = "One run a group, so there is no interval: repeat over seeds (+seeds=10) or slices (+slices=8)."
    missing = f"Not among them: {', '.join(subject.missing)}." if subject.missing else ""
    return " ".join(part for part in (kind.note, interval, missing) if part)


def _subject(runs: Sequence[Run], given: Mapping[str, str]) -> Subject:
    width = given.get("width", "column")
    if width not in WIDTHS:
        raise ConfigError("width", width, "unknown width", WIDTHS)
    from_s, to_s = (_seconds(key, given, default) for key, default in zip(SPAN, (0.0, math.inf), strict=True))
    return replace(subject_of(runs), width=width, from_s=from_s, to_s=to_s, options=given)


def _seconds(key: str, given: Mapping[str, str], default: float) -> float:
    try:
        value = float(given.get(key, default))
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise ConfigError(key, given[key], "must be 0 or more seconds of run time")
    return value


def _close(word: str, words: Sequence[str] | Mapping[str, object]) -> str:
    found = difflib.get_close_matches(word, list(words), 1)
    return f", did you mean {found[0]}" if found else ""
