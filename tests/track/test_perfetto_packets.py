"""What is written by hand is what Perfetto's descriptors read; lanes and flows keep what they promise."""

from __future__ import annotations

import io
import itertools
import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from perfetto_reader import read

from mcjax.track.perfetto.flows import Flows, Location, flow_of, submitted
from mcjax.track.perfetto.lanes import Lanes
from mcjax.track.perfetto.packets import PacketWriter, varint

NUMBERS = st.integers(-(2**63), 2**63 - 1)
WORDS = st.text(st.characters(codec="utf-8"), max_size=20)
VALUES = st.recursive(
    st.one_of(st.booleans(), NUMBERS, st.floats(), WORDS),
    lambda inner: st.dictionaries(WORDS, inner, min_size=1, max_size=3),
    max_leaves=6,
)


@given(st.integers(0, 2**64 - 1))
def test_a_number_is_read_as_it_was_written(value: int) -> None:
    found = shift = 0
    for byte in varint(value):
        found |= (byte & 0x7F) << shift
        shift += 7
    assert found == value
    assert all(byte & 0x80 for byte in varint(value)[:-1])
    assert not varint(value)[-1] & 0x80


@given(
    st.lists(
        st.tuples(
            WORDS, WORDS, st.integers(0, 2**62), st.integers(0, 2**40), st.dictionaries(WORDS, VALUES, max_size=4)
        ),
        max_size=8,
    ),
    st.sets(st.integers(0, 2**64 - 1), max_size=4),
    st.lists(st.floats(allow_nan=False), max_size=5),
)
def test_slices_instants_and_values_are_read_as_they_were_written(
    tmp_path_factory, written: list, flows: set[int], values: list[float]
) -> None:
    file = io.BytesIO()
    writer = PacketWriter(file)
    root = writer.track("root")
    shown = writer.track("shown", root, unit="bytes")
    for name, category, start_ns, took_ns, arguments in written:
        track = writer.track(name, root)
        writer.begin(track, name, start_ns, category, arguments, flows)
        writer.end(track, start_ns + took_ns)
        writer.instant(track, name, start_ns, category, arguments)
    for time_ns, value in enumerate(values):
        writer.value(shown, time_ns, value)
    path = tmp_path_factory.mktemp("packets") / "made.pftrace"
    path.write_bytes(file.getvalue())
    trace = read(path)
    by_time = sorted(written, key=lambda each: each[2])
    assert len(trace.slices) == len(trace.instants) == len(written)
    for found, (name, category, start_ns, took_ns, arguments) in zip(trace.slices, by_time, strict=True):
        assert (found.name, found.category, found.path) == (name, category, (name,))
        assert (found.start_ns, found.end_ns, set(found.flows)) == (start_ns, start_ns + took_ns, flows)
        assert same(found.arguments, arguments)
    assert trace.values["shown",] == list(enumerate(values))


def same(found: object, given: object) -> bool:
    if isinstance(given, dict):
        return isinstance(found, dict) and found.keys() == given.keys() and all(same(found[k], given[k]) for k in given)
    if isinstance(given, float) and math.isnan(given):
        return isinstance(found, float) and math.isnan(found)
    return found == given and type(found) is type(given)


SPANS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda at: (at[0], at[0] + at[1])), max_size=40)


@given(SPANS)
def test_lanes_hold_no_two_at_a_time_and_are_as_few_as_can_be(spans: list[tuple[int, int]]) -> None:
    made: list[int] = []

    def new_lane() -> int:
        made.append(len(made))
        return made[-1]

    lanes = Lanes(new_lane)
    ended: dict[int, int] = {}
    for start, end in sorted(spans, key=lambda span: span[1]):
        lane = lanes.take(start, end)
        assert start >= ended.get(lane, 0)
        ended[lane] = end
    # So many go on at once at some time; what takes no time needs no lane of its own.
    most = max([sum(a <= at < b for a, b in spans) for at in range(71)], default=0)
    assert most <= len(made) <= max(most, 1 if spans else 0) + sum(a == b for a, b in spans)
    if all(a < b for a, b in spans):
        assert len(made) == most


@given(SPANS)
def test_lanes_keep_slices_apart_whatever_their_order(spans: list[tuple[int, int]]) -> None:
    names = iter(range(100))
    lanes = Lanes(lambda: next(names))
    on: dict[int, list[tuple[int, int]]] = {}
    for start, end in spans:
        on.setdefault(lanes.take(start, end), []).append((start, end))
    for of_lane in on.values():
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(of_lane))


P_HBM, P_DRAM = Location("node-p0", "hbm"), Location("node-p0", "dram")
D_DRAM, D_HBM = Location("node-d0", "dram"), Location("node-d0", "hbm")


def ties(steps: dict[str, list[int]]) -> set[tuple[str, str]]:
    """Which step hands on to which: those that bear one number, in order."""
    bearing: dict[int, list[str]] = {}
    for name, flows in steps.items():
        for flow in flows:
            bearing.setdefault(flow, []).append(name)
    return {pair for names in bearing.values() for pair in itertools.pairwise(names)}


def test_each_chunk_is_tied_to_its_own_copies_and_decode_to_all() -> None:
    flows = Flows()
    steps = {
        "submit": submitted(4),
        "load": flows.moved(4, P_DRAM, P_HBM, 0, 1),
        "chunk 1": flows.computed(4, P_HBM, 1, 5),
        "store 1": flows.moved(4, P_HBM, P_DRAM, 5, 6),
        "send 1": flows.moved(4, P_DRAM, D_DRAM, 6, 8),
        "chunk 2": flows.computed(4, P_HBM, 5, 9),
        "store 2": flows.moved(4, P_HBM, P_DRAM, 9, 10),
        "send 2": flows.moved(4, P_DRAM, D_DRAM, 10, 12),
    }
    sending, steps["sending"] = flows.held(4, P_HBM, 0, 12)
    steps["fill"] = flows.moved(4, D_DRAM, D_HBM, 12, 13)
    decoding, steps["decoding"] = flows.held(4, D_HBM, 12, 40)
    steps["completed"] = flows.end(4)
    assert (sending, decoding) == (9, 13)
    assert ties(steps) == {
        ("submit", "load"),
        ("load", "chunk 1"),
        ("chunk 1", "store 1"),
        ("store 1", "send 1"),
        ("chunk 1", "chunk 2"),
        ("chunk 2", "store 2"),
        ("store 2", "send 2"),
        ("chunk 2", "sending"),
        ("send 1", "fill"),
        ("send 2", "fill"),
        ("fill", "decoding"),
        ("decoding", "completed"),
    }


def test_what_was_rejected_or_comes_again_starts_from_its_submission() -> None:
    flows = Flows()
    assert ties({"submit": submitted(0), "rejected": flows.end(0)}) == {("submit", "rejected")}
    steps = {"submit": submitted(1), "first": flows.computed(1, P_HBM, 0, 5)}
    flows.held(1, P_HBM, 0, 6)
    steps["again"] = flows.computed(1, D_HBM, 9, 12)
    assert ties(steps) == {("submit", "first"), ("first", "again")}  # one number for both, so one after the other


@given(
    st.lists(st.tuples(st.integers(0, 2**38), st.integers(0, 2**22 - 1), st.sampled_from(["stay", "within", "across"])))
)
def test_flows_have_numbers_of_their_own(handing_on: list) -> None:
    numbers = [flow_of(*each) for each in handing_on]
    assert len(set(numbers)) == len(set(handing_on))
    assert all(0 < number < 2**64 for number in numbers)


def test_tracks_of_a_file_are_its_own(tmp_path: Path) -> None:
    path = tmp_path / "empty.pftrace"
    with path.open("wb") as file:
        PacketWriter(file).track("root")
    assert read(path).tracks == {1: ()}
