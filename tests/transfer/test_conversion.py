"""Copies between memories of different encodings: what arrives, what its checksums are of, what is refused."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest

from mcjax.errors import BlockCorrupt, TransferError, Unencodable
from mcjax.kvpool.encodings.base import BlockLayout, to_float32
from mcjax.kvpool.encodings.named import packer_of
from mcjax.kvpool.keys import KeyTable
from mcjax.kvpool.stores.host import HostStore
from mcjax.kvpool.stores.ssd.store import SsdStore
from mcjax.transfer.base import Copy, CopyResult
from mcjax.transfer.engine import TransferEngine
from mcjax.transfer.transports.file import FileTransport
from mcjax.transfer.transports.local import Local, runs
from mcjax.transfer.transports.threaded import checksum, decode_results, encode_results
from mcjax.types import KVFormat, KVGroup, NullRecorder

LAYOUT = BlockLayout("bfloat16", 4, 32, 64)
PACKERS = {name: packer_of(name, LAYOUT, "key") for name in ("none", "int8", "fp8")}
PAIRS = list(itertools.permutations(PACKERS, 2))


def host(node: str, encoding: str, capacity: int = 6) -> HostStore:
    packer = PACKERS[encoding]
    return HostStore(node, capacity, packer.packed_bytes, packer=packer)


def numbers(seed: int = 0) -> np.ndarray:
    """`[block_bytes]`: a block like a model's."""
    values = np.random.default_rng(seed).standard_normal(LAYOUT.vectors * LAYOUT.width).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def fill(store: HostStore, slots: list[int]) -> None:
    for slot in slots:
        store.buffer()[slot] = store.packer.pack(numbers(slot))


def moved(transport: Local | FileTransport, *copies: Copy) -> list[CopyResult]:
    async def main() -> list[CopyResult]:
        return await asyncio.wait_for(transport.submit(list(copies)).future, 20)

    try:
        return asyncio.run(main())
    finally:
        transport.close()


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_copy_converts_and_tells_of_what_it_read_and_of_what_it_wrote(before, after):
    source, target, transport = host("a", before), host("b", after), Local()
    transport.register(source)
    transport.register(target)
    slots, others = source.reserve(2), target.reserve(2)
    fill(source, slots)
    copy = Copy(source.regions(slots), target.regions(others), checksum=True)
    quiet = Copy(source.regions(slots), target.regions(others))
    result, silent = moved(transport, copy, quiet)
    expected = [target.packer.pack(source.packer.unpack(source.buffer()[slot])) for slot in slots]
    for slot, block in zip(others, expected, strict=True):
        assert target.buffer()[slot].tobytes() == block.tobytes()
    assert result.checksums == tuple(checksum(source.buffer()[slot]) for slot in slots)
    assert result.converted == result.written == tuple(checksum(target.buffer()[slot]) for slot in others)
    assert silent == CopyResult()
    assert decode_results(encode_results([result, silent]), [copy, quiet]) == [result, silent]


def test_between_memories_of_one_encoding_bytes_move_as_they_are():
    source, target, transport = host("a", "int8"), host("b", "int8"), Local()
    transport.register(source)
    transport.register(target)
    fill(source, [0, 1])
    [result] = moved(transport, Copy(source.regions([0, 1]), target.regions([4, 5]), checksum=True))
    assert target.buffer()[[4, 5]].tobytes() == source.buffer()[[0, 1]].tobytes()
    assert (result.converted, result.written) == ((), result.checksums)


def test_blocks_of_another_layout_are_refused():
    source, transport = host("a", "none"), Local()
    small = BlockLayout("bfloat16", 2, 32, 64)
    other = packer_of("int8", small, "key")
    target = HostStore("b", 2, other.packed_bytes, packer=other)
    transport.register(source)
    transport.register(target)
    [result] = moved(transport, Copy(source.regions([0]), target.regions([0])))
    assert result.error is not None
    assert "do not fit" in str(result.error)


class Counted(Local):
    """Counts batches."""

    def __init__(self):
        super().__init__()
        self.batches = 0

    def submit(self, copies, priority=0):
        self.batches += 1
        return super().submit(copies, priority)


def test_numbers_without_a_place_are_a_typed_error_of_their_request_and_never_tried_again():
    source, target, transport = host("a", "none"), host("b", "fp8"), Counted()
    engine = TransferEngine([transport], NullRecorder(), attempts=3)
    engine.register(source)
    engine.register(target)
    fill(source, [0, 1])
    source.buffer()[1].view(np.uint16)[5] = 0x7F80  # infinity

    async def main():
        with pytest.raises(Unencodable, match=r"request 7, block 3: fp8 has no NaN and no infinity"):
            await engine.move(Copy(source.regions([0, 1]), target.regions([0, 1]), 7, 3, checksum=True))

    try:
        asyncio.run(main())
    finally:
        transport.close()
    assert transport.batches == 1
    failed = CopyResult(Unencodable("no", 7, 3))
    [back] = decode_results(encode_results([failed]), [Copy(source.regions([0]), target.regions([0]), 7, 3)])
    assert type(back.error) is Unencodable


class Files:
    """An SSD store of an encoding, its host memory, and the transport between them."""

    def __init__(self, folder, encoding: str, above: str = "none"):
        self.table = KeyTable()
        self.keys = [b"key %028d" % number for number in range(8)]
        kv_format = KVFormat("tiny", LAYOUT.tokens, (KVGroup(bytes_per_token=LAYOUT.block_bytes // LAYOUT.tokens),))
        packer = PACKERS[encoding]
        self.ssd = SsdStore("n", folder, 8, packer.packed_bytes, kv_format, self.table, packer=packer)
        self.host = host("n", above)
        self.blocks = list(self.table.intern(self.keys))

    def move(self, *copies: Copy) -> list[CopyResult]:
        transport = FileTransport(threads=2)
        transport.register(self.ssd)
        transport.register(self.host)
        return moved(transport, *copies)

    def save(self, count: int = 3) -> CopyResult:
        slots, rows = self.ssd.reserve(count), list(range(count))
        fill(self.host, rows)
        sums = [checksum(self.host.buffer()[row]) for row in rows]
        self.ssd.stage(slots, self.blocks[:count], sums, None)
        [result] = self.move(Copy(self.host.regions(rows), self.ssd.regions(slots), checksum=True))
        if result.error is None:
            self.ssd.commit(slots, self.blocks[:count], result.written)
        return result


@pytest.mark.parametrize(("above", "below"), [*PAIRS, ("int8", "int8")])
def test_blocks_go_to_files_and_come_back_by_another_process(tmp_path, above, below):
    files = Files(tmp_path / "n", below, above)
    saved = files.save()
    assert saved.error is None
    assert files.ssd.lossy == PACKERS[below].lossy
    assert saved.checksums == tuple(checksum(files.host.buffer()[row]) for row in range(3))
    assert bool(saved.converted) == (above != below)
    files.ssd.close()

    again = Files(tmp_path / "n", below, above)
    found = sorted(again.ssd.recovered(), key=lambda stored: stored.block)
    assert [stored.checksum for stored in found] == list(saved.written), "headers tell of what lies behind them"
    slots = [stored.slot for stored in found]
    [read] = again.move(Copy(again.ssd.regions(slots), again.host.regions([3, 4, 5]), checksum=True))
    assert read.error is None
    assert read.checksums == saved.written
    assert read.written == tuple(checksum(again.host.buffer()[row]) for row in (3, 4, 5))
    for row in range(3):
        whole = [
            again.host.packer.unpack(store.buffer()[at]) for store, at in ((files.host, row), (again.host, row + 3))
        ]
        first, second = (to_float32(block, LAYOUT) for block in whole)
        assert np.abs(first - second).max() <= np.abs(first).max() / 14
        assert above != below or (first == second).all()
    again.ssd.close()


def test_what_is_announced_for_a_file_is_of_the_bytes_above(tmp_path):
    files = Files(tmp_path / "n", "int8")
    slots = files.ssd.reserve(1)
    fill(files.host, [0])
    files.ssd.stage(slots, files.blocks[:1], [checksum(files.host.packer.pack(numbers(1)))], None)
    [result] = files.move(Copy(files.host.regions([0]), files.ssd.regions(slots), checksum=True))
    assert type(result.error) is BlockCorrupt


def test_a_block_that_cannot_be_encoded_does_not_get_to_the_disk(tmp_path):
    files = Files(tmp_path / "n", "int8")
    slots = files.ssd.reserve(1)
    fill(files.host, [0])
    files.host.buffer()[0].view(np.uint16)[0] = 0x7FC0
    files.ssd.stage(slots, files.blocks[:1], [checksum(files.host.buffer()[0])], None)
    [result] = files.move(Copy(files.host.regions([0]), files.ssd.regions(slots), 4, 9, checksum=True))
    assert isinstance(result.error, TransferError)
    assert type(result.error) is Unencodable
    assert "request 4, block 9" in str(result.error)
    files.ssd.free(slots)
    files.ssd.close()
    again = Files(tmp_path / "n", "int8")
    assert list(again.ssd.recovered()) == []
    again.ssd.close()


def test_runs_of_slots_that_follow_one_another_on_both_sides():
    assert list(runs((3, 4, 5, 9, 1), (0, 1, 2, 3, 4))) == [(3, 0, 3), (9, 3, 1), (1, 4, 1)]
    assert list(runs((0, 1, 2), (4, 5, 7))) == [(0, 4, 2), (2, 7, 1)]
    assert list(runs((), ())) == []


@pytest.mark.parametrize("summed", [False, True])
def test_blocks_larger_than_a_piece_arrive_whole(summed):
    source, target, transport = HostStore("a", 3, 700_001), HostStore("b", 3, 700_001), Local()
    transport.register(source)
    transport.register(target)
    source.buffer()[:] = np.random.default_rng(0).integers(0, 256, source.buffer().shape, dtype=np.uint8)
    [result] = moved(transport, Copy(source.regions([0, 1, 2]), target.regions([0, 1, 2]), checksum=summed))
    np.testing.assert_array_equal(target.buffer(), source.buffer())
    assert result.checksums == (tuple(checksum(row) for row in source.buffer()) if summed else ())
