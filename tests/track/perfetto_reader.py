"""Reads a trace back with Perfetto's own descriptors, and holds it to what its reader relies on."""

from __future__ import annotations

import gzip
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos  # pyright: ignore[reportMissingImports]

BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4


@dataclass
class Slice:
    """A slice, or an instant (of which `end_ns` is `start_ns`). `path` is that of its track, below the root."""

    path: tuple[str, ...]
    track: int
    name: str
    category: str
    start_ns: int
    end_ns: int
    arguments: dict[str, Any]
    flows: list[int]
    depth: int
    order: int
    """As the reader comes to it: by time, then by place in the file."""


@dataclass
class Trace:
    tracks: dict[int, tuple[str, ...]] = field(default_factory=dict)
    slices: list[Slice] = field(default_factory=list)
    instants: list[Slice] = field(default_factory=list)
    values: dict[tuple[str, ...], list[tuple[int, float]]] = field(default_factory=dict)

    def of(self, category: str) -> list[Slice]:
        return [each for each in [*self.slices, *self.instants] if each.category == category]

    def edges(self) -> list[tuple[Slice, Slice]]:
        """Slices tied by flows, as Perfetto ties them: each number those that bear it, in order of their begin."""
        bearing: dict[int, list[Slice]] = {}
        for each in sorted([*self.slices, *self.instants], key=lambda one: one.order):
            for flow in each.flows:
                bearing.setdefault(flow, []).append(each)
        return [pair for tied in bearing.values() for pair in itertools.pairwise(tied)]


def read(path: Path) -> Trace:
    """Raises `AssertionError` for a file that a reader of traces would stumble over."""
    content = path.read_bytes()
    packets = protos.Trace.FromString(gzip.decompress(content) if path.suffix == ".gz" else content).packet
    trace, words, events = Trace(), {}, []
    for number, packet in enumerate(packets):
        assert packet.trusted_packet_sequence_id == 1
        if packet.HasField("track_descriptor"):
            _declare(trace, packet.track_descriptor)
            continue
        assert packet.sequence_flags == (3 if not events else 2), "names are interned once, from the first event on"
        news = packet.interned_data
        for kind, entries in (("category", news.event_categories), ("argument", news.debug_annotation_names)):
            for entry in entries:
                assert (kind, entry.iid) not in words
                words[kind, entry.iid] = entry.name
        assert packet.track_event.track_uuid in trace.tracks, "a track is declared before it is written on"
        events.append((packet.timestamp, number, packet.track_event))
    open_on: dict[int, list[Slice]] = {}
    for time_ns, _, event in sorted(events, key=lambda each: each[0]):  # stable, as the trace processor's
        _take(trace, words, open_on, time_ns, event)
    assert not any(open_on.values()), "every slice ends"
    return trace


def _declare(trace: Trace, descriptor: Any) -> None:
    assert descriptor.uuid not in trace.tracks
    assert descriptor.uuid == len(trace.tracks) + 1
    if not descriptor.parent_uuid:
        assert not trace.tracks, "one root"
        trace.tracks[descriptor.uuid] = ()
        return
    path = (*trace.tracks[descriptor.parent_uuid], descriptor.name)
    trace.tracks[descriptor.uuid] = path
    if descriptor.HasField("counter"):
        assert path not in trace.values
        trace.values[path] = []


def _take(trace: Trace, words: dict, open_on: dict[int, list[Slice]], time_ns: int, event: Any) -> None:
    track, path = event.track_uuid, trace.tracks[event.track_uuid]
    stack = open_on.setdefault(track, [])
    if event.type == COUNTER:
        trace.values[path].append((time_ns, event.double_counter_value))
    elif event.type == END:
        ended = stack.pop()
        ended.end_ns = time_ns
    else:
        (category,) = [words["category", each] for each in event.category_iids]
        arguments = {words["argument", each.name_iid]: _value(words, each) for each in event.debug_annotations}
        flows, order = list(event.flow_ids), len(trace.slices) + len(trace.instants)
        made = Slice(path, track, event.name, category, time_ns, time_ns, arguments, flows, len(stack), order)
        assert len(set(made.flows)) == len(made.flows)
        if event.type == BEGIN:
            trace.slices.append(made)
            stack.append(made)
        else:
            assert event.type == INSTANT
            trace.instants.append(made)


def _value(words: dict, annotation: Any) -> Any:
    if annotation.dict_entries:
        return {words["argument", each.name_iid]: _value(words, each) for each in annotation.dict_entries}
    kind = annotation.WhichOneof("value")
    return None if kind is None else getattr(annotation, kind)
