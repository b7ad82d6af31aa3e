"""Frames between controller and worker: what goes in comes out, however it is cut, and garbage is an error, no more."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.backends.processes.frames import HEAD, MAGIC, MOST_BODY_BYTES, FrameBroken, Frames, Message, encode

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
MESSAGES = st.builds(
    Message,
    st.text(min_size=1, max_size=8),
    st.dictionaries(st.text(max_size=6), JSON, max_size=5),
    st.lists(st.binary(max_size=40), max_size=4).map(tuple),
)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


@given(messages=st.lists(MESSAGES, min_size=1, max_size=4), places=st.lists(st.integers(0, 10_000), max_size=8))
def test_what_goes_in_comes_out_however_it_is_cut(messages: list[Message], places: list[int]) -> None:
    frames = Frames()
    found: list[Message] = []
    for piece in cut(b"".join(map(encode, messages)), places):
        found += frames.feed(piece)
    assert found == messages


@settings(max_examples=500)
@given(data=st.binary(min_size=HEAD.size, max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    if data.startswith(MAGIC):
        data = b"x" + data[1:]
    with pytest.raises(FrameBroken):
        Frames().feed(data)


@settings(max_examples=500)
@given(message=MESSAGES, place=st.integers(0, 10_000), change=st.integers(1, 255))
def test_a_frame_with_a_changed_byte_is_a_message_or_refused_or_waits_for_more(
    message: Message, place: int, change: int
) -> None:
    data = bytearray(encode(message))
    data[place % len(data)] ^= change
    try:
        found = Frames().feed(bytes(data))
    except FrameBroken:
        return
    assert all(isinstance(part, Message) for part in found)


def framed(header: Any, body: bytes = b"") -> bytes:
    written = header if isinstance(header, bytes) else json.dumps(header).encode()
    return HEAD.pack(MAGIC, len(written), len(body)) + written + body


@pytest.mark.parametrize(
    "frame",
    [
        framed(b"no json"),
        framed(b"[" * 100_000),
        framed({"kind": "x"}),
        framed(["x", {}]),
        framed([1, {}, []]),
        framed(["x", [], []]),
        framed(["x", {}, 1]),
        framed(["x", {}, [True]], b"1"),
        framed(["x", {}, [-1, 2]], b"1"),
        framed(["x", {}, [2]], b"1"),
        framed(["x", {}, []], b"1"),
        HEAD.pack(MAGIC, 1 << 31, 0),
        HEAD.pack(MAGIC, 2, 1 << 63),
    ],
    ids=range(13),
)
def test_a_lying_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(FrameBroken):
        Frames().feed(frame)


def test_too_long_a_message_is_refused_by_its_sender() -> None:
    with pytest.raises(FrameBroken):
        encode(Message("x", {}, [bytes(1 << 20)] * (MOST_BODY_BYTES // (1 << 20) + 1)))
