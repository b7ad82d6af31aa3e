"""A run's tables as one file for Perfetto. Nothing of a run is held as a whole."""

from __future__ import annotations

import gzip
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from mcjax.engine.cluster_spec import node_of
from mcjax.errors import ConfigError
from mcjax.track.perfetto.events import Event, EventTracks
from mcjax.track.perfetto.packets import PacketWriter
from mcjax.track.perfetto.requests import write_decisions, write_requests
from mcjax.track.perfetto.selection import Selection, select
from mcjax.track.perfetto.tracks import Path as TrackPath
from mcjax.track.perfetto.tracks import Tracks
from mcjax.types import Tier

if TYPE_CHECKING:
    from mcjax.track.run import Run

ORDER = (
    *("requests", "frontend", "decisions", "conductor", "instances", "links", "tiers"),
    *("prefill chunks", "decode steps", "sending", "decoding", "batch", "queue_prompts", "log"),
)
"""How tracks stand one below the other."""
TIERS = {"page_fill": Tier.HBM, "pool_fill": Tier.DRAM}
"""Gauges of how full a tier is: that of an instance's pages, that of a node's pool."""
TRANSPORTS = ("pending_bytes", "moved_bytes")


def write_trace(
    run: Run, path: str | Path, requests: Sequence[int] = (), from_s: float | None = None, to_s: float | None = None
) -> Path:
    """Write a run, or some of its requests, as a file that https://ui.perfetto.dev opens. A name in `.gz` is packed.

    Args:
        requests: only what was done for these, and what all shared while they were there: decode steps, gauges.
        from_s: only what goes on at or after this second of run time; `to_s`: only what does at or before.

    Raises:
        RunError: there is no such request (names the nearest), or a table is damaged.
        ConfigError: the file cannot be written, or nothing lies between the times.
    """
    selection = select(run, requests, from_s, to_s)
    target = Path(path)
    part = target.with_name(f"{target.name}.part")
    try:
        with part.open("wb") as file:
            if target.suffix == ".gz":
                # Neither name nor time in it: equal runs give equal files.
                with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
                    _write(selection, packed)
            else:
                _write(selection, file)
        os.replace(part, target)
    except OSError as problem:
        raise ConfigError("--out", path, f"cannot be written: {problem}") from problem
    finally:
        part.unlink(missing_ok=True)
    return target


def _write(selection: Selection, file: BinaryIO | gzip.GzipFile) -> None:
    directory = selection.run.directory
    tracks = Tracks(PacketWriter(file), "run" if directory is None else f"run {directory.name}", ORDER)
    write_requests(selection, tracks)
    write_decisions(selection, tracks)
    events = EventTracks(tracks, selection.roles)
    for row in selection.rows("events", "start_ns", "time_ns", "place"):
        events.write(Event(*row))
    for time_ns, source, metric, value in selection.rows("samples", "time_ns", "time_ns", "source"):
        tracks.value(_gauge(events, source, metric), time_ns, value)


def _gauge(events: EventTracks, source: str, metric: str) -> TrackPath:
    """Beside what it is a gauge of: a tier, a link, else the instance."""
    if metric in TIERS:
        node = node_of(source) if metric == "page_fill" else source
        return ("tiers", f"{node} {TIERS[metric]}", metric)
    if metric in TRANSPORTS:
        return ("links", source, metric)
    return ("links", metric, source) if metric == "outgoing_bytes" else (*events.instance(source), metric)
