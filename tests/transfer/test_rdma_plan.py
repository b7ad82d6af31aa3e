"""Spans become work requests: every byte once, in order, none beyond what a request may be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcjax.transfer.transports.endpoint import Spans
from mcjax.transfer.transports.rdma.plan import Limits, requests

ROW = st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(1, 30))
"""Small numbers, so that spans meet."""


@st.composite
def neighbours(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Spans that follow one another at the peer, here now and then."""
    rows: list[tuple[int, int, int]] = []
    local = remote = 0
    for nbytes in draw(st.lists(st.integers(1, 30), max_size=20)):
        local += draw(st.sampled_from([0, 0, 5]))
        remote += draw(st.sampled_from([0, 0, 0, 3]))
        rows.append((local, remote, nbytes))
        local, remote = local + nbytes, remote + nbytes
    return rows


@given(
    rows=st.lists(ROW, max_size=20) | neighbours(),
    pieces=st.integers(1, 4),
    slice_bytes=st.integers(1, 50),
    data=st.data(),
)
def test_every_byte_goes_once(
    rows: list[tuple[int, int, int]], pieces: int, slice_bytes: int, data: st.DataObject
) -> None:
    spans = Spans.of(rows)
    wanted = np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))))
    made = list(requests(spans, wanted, Limits(pieces, slice_bytes)))
    expected = [(local + i, remote + i) for local, remote, n in (rows[index] for index in wanted) for i in range(n)]
    moved: list[tuple[int, int]] = []
    for request in made:
        assert 1 <= len(request.pieces) <= pieces
        assert sum(size for _, size in request.pieces) == request.nbytes <= slice_bytes
        here = [start + i for start, size in request.pieces for i in range(size)]
        moved += zip(here, range(request.remote, request.remote + request.nbytes), strict=True)
    assert moved == expected
    counted = dict.fromkeys(map(int, wanted), 0)
    for request in made:
        for index in range(request.first, request.last + 1):
            counted[index] += 1
    assert all(counted.values())


def test_neighbours_become_one_request() -> None:
    spans = Spans.of((index * 100, index * 100, 100) for index in range(1000))
    (request,) = requests(spans, np.arange(1000), Limits(16, 1 << 20))
    assert (request.first, request.last, request.pieces) == (0, 999, [(0, 100_000)])


@pytest.mark.parametrize(("count", "expected"), [(16, [16]), (17, [16, 1]), (40, [16, 16, 8])])
def test_neighbours_at_the_peer_alone_are_pieces(count: int, expected: list[int]) -> None:
    spans = Spans.of((index * 200, index * 100, 100) for index in range(count))
    made = list(requests(spans, np.arange(count), Limits(16, 1 << 20)))
    assert [len(request.pieces) for request in made] == expected


def test_what_was_left_out_parts_its_neighbours() -> None:
    """A span that failed may not be moved along with those around it."""
    spans = Spans.of((index * 100, index * 100, 100) for index in range(3))
    made = list(requests(spans, np.array([0, 2]), Limits()))
    assert [(request.remote, request.nbytes) for request in made] == [(0, 100), (200, 100)]
