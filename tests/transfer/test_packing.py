"""Scattered pieces into one stretch and back."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcjax.transfer.packing import LONG_BYTES, PACK_BELOW_BYTES, fragmented, gather, merged, pieces, scatter

RANDOM = np.random.default_rng(5).integers(0, 256, 1 << 20, np.uint8)


def listed(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


LENGTHS = st.lists(st.sampled_from([1, 2, 3, 64, 64, 1000, LONG_BYTES - 1, LONG_BYTES, LONG_BYTES + 1]), max_size=12)


@given(lengths=LENGTHS, data=st.data())
def test_gathered_one_behind_the_other_and_scattered_back(lengths: list[int], data: st.DataObject) -> None:
    gaps = data.draw(st.lists(st.integers(0, 50), min_size=len(lengths), max_size=len(lengths)))
    order = data.draw(st.permutations(range(len(lengths))))
    starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)[: len(lengths)] + np.cumsum(gaps, dtype=np.int64)
    offsets, nbytes = listed(*starts.tolist())[list(order)], listed(*lengths)[list(order)]
    buffer = RANDOM[: sum(lengths) + sum(gaps) + 1]
    packed = np.zeros(sum(lengths) + 3, np.uint8)
    gather(buffer, offsets, nbytes, packed)
    wanted = [buffer[start : start + length] for start, length in zip(offsets.tolist(), nbytes.tolist(), strict=True)]
    assert packed[: sum(lengths)].tobytes() == b"".join(piece.tobytes() for piece in wanted)
    assert not packed[sum(lengths) :].any()
    back = np.zeros_like(buffer)
    scatter(packed, back, offsets, nbytes)
    inside = np.zeros(len(buffer), bool)
    for start, length in zip(offsets.tolist(), nbytes.tolist(), strict=True):
        inside[start : start + length] = True
    assert (back[inside] == buffer[inside]).all()
    assert not back[~inside].any()


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-1, 4), (97, 4), (0, 101), (0, 0), (0, -1), (1 << 62, 1 << 62), (100, 1)]
)
def test_a_piece_outside_is_refused_before_a_byte_is_copied(offset: int, nbytes: int) -> None:
    buffer, packed = np.ones(100, np.uint8), np.zeros(1000, np.uint8)
    for copy in (
        lambda: gather(buffer, listed(0, offset), listed(4, nbytes), packed),
        lambda: scatter(packed, buffer, listed(0, offset), listed(4, nbytes)),
    ):
        with pytest.raises(ValueError, match="of a buffer of 100"):
            copy()
    assert not packed.any()
    assert buffer.all()


def test_too_little_room_is_refused() -> None:
    with pytest.raises(ValueError, match="8 bytes of pieces, 7 of room"):
        gather(np.ones(100, np.uint8), listed(0, 8), listed(4, 4), np.zeros(7, np.uint8))
    with pytest.raises(ValueError, match="2 offsets, 1 lengths"):
        gather(np.ones(100, np.uint8), listed(0, 8), listed(4), np.zeros(7, np.uint8))


@given(lengths=st.lists(st.integers(1, 100), max_size=50), most=st.integers(1, 300))
def test_stretches_are_short_and_complete(lengths: list[int], most: int) -> None:
    nbytes = listed(*lengths)
    found = list(pieces(nbytes, most))
    assert [index for piece in found for index in range(piece.start, piece.stop)] == list(range(len(lengths)))
    assert all(nbytes[piece].sum() <= most or piece.stop - piece.start == 1 for piece in found)
    for before, after in itertools.pairwise(found):
        assert nbytes[before].sum() + nbytes[after.start] > most  # no shorter than need be


def test_neighbours_on_both_sides_are_one_piece() -> None:
    (local, remote), nbytes = merged(listed(0, 4, 8, 12, 20), listed(50, 54, 60, 64, 72), nbytes=listed(4, 4, 4, 4, 4))
    assert (local.tolist(), remote.tolist(), nbytes.tolist()) == ([0, 8, 20], [50, 60, 72], [8, 8, 4])
    (none,), empty = merged(listed(), nbytes=listed())
    assert len(none) == len(empty) == 0


def test_only_many_short_pieces_are_packed() -> None:
    assert fragmented(np.full(1000, PACK_BELOW_BYTES - 1))
    assert not fragmented(np.full(1000, PACK_BELOW_BYTES))
    assert not fragmented(listed(512)), "one piece is packed as it is"
    assert not fragmented(listed())
    assert fragmented(listed(10, 20_000), below_bytes=20_000)
