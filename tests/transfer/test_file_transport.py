"""Host memory to files and back: whatever the alignment, every byte and checksum, and durable before the answer."""

from __future__ import annotations

import asyncio
import mmap
import os
import threading

import numpy as np
import pytest

from mcjax import aio
from mcjax.errors import BlockCorrupt, StaleRegion, TransferError
from mcjax.kvpool.stores.host import HostStore
from mcjax.kvpool.stores.slots import SlotStore
from mcjax.transfer.base import Copy
from mcjax.transfer.engine import TransferEngine
from mcjax.transfer.transports.disk import PAGE_BYTES, Disk
from mcjax.types import NullRecorder, Tier
from ssd_fixtures import SsdTier, key_of, payload_of


class Rows(SlotStore):
    """Host slots at a chosen distance from a page boundary, and from each other."""

    def __init__(self, capacity: int, block_bytes: int, shift: int = 0, gap: int = 0):
        super().__init__("n", Tier.DRAM, capacity, block_bytes, "n.rows")
        stride = block_bytes + gap
        self._raw = mmap.mmap(-1, shift + capacity * stride)
        slab = np.frombuffer(self._raw, np.uint8, capacity * stride, shift).reshape(capacity, stride)
        self._rows = slab[:, :block_bytes]

    def buffer(self) -> np.ndarray:
        return self._rows


class Watched(Disk):
    """The real disk; keeps what each call was given: how many views, where, and at what address."""

    def __init__(self):
        self.calls: list[tuple[str, int, list[int]]] = []

    def _note(self, what, views, offset):
        addresses = [np.frombuffer(view, np.uint8).ctypes.data for view in views]
        self.calls.append((what, offset, addresses))
        for number in (offset, *addresses, *map(len, views)):
            assert number % PAGE_BYTES == 0

    def read(self, file, views, offset):
        self._note("read", views, offset)
        return super().read(file, views, offset)

    def write(self, file, views, offset):
        self._note("write", views, offset)
        return super().write(file, views, offset)

    def sync(self, file):
        self.calls.append(("sync", 0, []))
        super().sync(file)


@pytest.mark.parametrize(
    ("block_bytes", "shift", "gap", "in_place"),
    [
        (8192, 0, 0, True),
        (8192, 0, 4096, True),
        (8192, 64, 0, False),
        (8192, 0, 64, False),
        (5000, 0, 3192, False),
        (1, 0, 0, False),
    ],
)
def test_direct_io_goes_straight_to_host_slots_where_they_lie_well(tmp_path, block_bytes, shift, gap, in_place):
    disk = Watched()
    host = Rows(4, block_bytes, shift, gap)
    tier = SsdTier(tmp_path, block_bytes=block_bytes, host=host, disk=disk)
    if not tier.store.direct:
        pytest.skip("the file system has no direct I/O")
    slots = tier.put(0, [0, 1, 2])
    host.buffer()[3] = 7
    assert tier.read(slots).error is None
    assert [row.tobytes() for row in host.buffer()[:3]] == [payload_of(key_of(0, n), block_bytes) for n in range(3)]
    assert host.buffer()[3].tolist() == [7] * block_bytes, "its neighbour was touched"
    rows = {host.buffer()[slot].ctypes.data for slot in range(4)}
    used = {address for what, _, addresses in disk.calls for address in addresses if what != "sync"}
    assert (len(used & rows) == 3) == in_place
    tier.close()


@pytest.mark.parametrize("kind", ["the file system has none", "the platform has none"])
@pytest.mark.parametrize("block_bytes", [8192, 5000])
def test_without_direct_io_it_works_through_the_page_cache_and_says_so_once(
    tmp_path, monkeypatch, caplog, kind, block_bytes
):
    if kind == "the platform has none":
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    else:
        real = os.open

        def refuses(path, flags, *mode, **options):
            if flags & os.O_DIRECT:
                raise OSError(22, "Invalid argument")
            return real(path, flags, *mode, **options)

        monkeypatch.setattr(os, "open", refuses)
    tier = SsdTier(tmp_path, block_bytes=block_bytes)
    assert not tier.store.direct
    slots = tier.put(0, [0, 1, 2, 3, 4])
    assert tier.read(slots[::-1]).error is None
    assert tier.host.buffer()[4].tobytes() == payload_of(key_of(0, 0), block_bytes)
    tier.close()
    said = [record for record in caplog.records if "page cache" in record.getMessage()]
    assert len(said) == (1 if hasattr(os, "O_DIRECT") else 0)
    tier = SsdTier(tmp_path, block_bytes=block_bytes)
    assert list(tier.served().values()) == [True] * 5
    tier.close()


def test_a_file_system_that_takes_the_flag_and_then_refuses_the_reading(tmp_path, monkeypatch):
    def refuses(descriptor, views, offset):
        raise OSError(22, "Invalid argument")

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", refuses)
        tier = SsdTier(tmp_path)
    assert not tier.store.direct
    assert tier.read(tier.put(0, [0])).error is None
    tier.close()


def test_neighbours_go_by_one_call_and_others_by_their_own(tmp_path):
    disk = Watched()
    tier = SsdTier(tmp_path, disk=disk, host_slots=8)  # two files of four slots
    slots = tier.put(0, range(8))
    assert sorted(what for what, _, _ in disk.calls) == ["sync", "sync", "write", "write"]
    disk.calls.clear()
    apart = [slots[n] for n in (0, 2, 4, 6)]
    assert tier.read(apart).error is None
    assert len(disk.calls) == 4
    tier.close()


def test_answers_and_checksums_come_in_the_order_of_the_copies(tmp_path):
    tier = SsdTier(tmp_path, capacity=32, host_slots=32, threads=4)
    slots = tier.put(0, range(32))
    order = np.random.default_rng(0).permutation(32)
    copies = [
        Copy(
            tier.store.regions([slots[n] for n in order[at : at + 4]]),
            tier.host.regions(range(at, at + 4)),
            checksum=True,
        )
        for at in range(0, 32, 4)
    ]
    results = tier.run(*copies)
    assert all(result.error is None for result in results)
    got = [digest for result in results for digest in result.checksums]
    assert got == [tier.checksum(slots[n]) for n in order]
    for place, n in enumerate(order):
        assert tier.host.buffer()[place].tobytes() == payload_of(key_of(0, int(n)))
    tier.close()


def test_a_write_is_answered_when_it_is_durable_and_not_before(tmp_path):
    go_on, syncing = threading.Event(), threading.Event()

    class Slow(Disk):
        def sync(self, file):
            syncing.set()
            assert go_on.wait(20)
            super().sync(file)

    tier = SsdTier(tmp_path, disk=Slow())
    copy = tier.staged(0, [0])

    async def main():
        handle = tier.transport.submit([copy])
        while not syncing.is_set():
            await aio.sleep_ns(1_000_000)
        assert not handle.future.done()
        go_on.set()
        return await asyncio.wait_for(handle.future, 20)

    [result] = asyncio.run(main())
    assert result.error is None
    tier.close()


def test_writes_that_wait_together_are_synced_together(tmp_path):
    first, others = threading.Event(), threading.Semaphore(0)

    class Slow(Disk):
        syncs = 0

        def write(self, file, views, offset):
            done = super().write(file, views, offset)
            others.release()
            return done

        def sync(self, file):
            self.syncs += 1
            if self.syncs == 1:
                first.set()
                for _ in range(4):  # until all have been written
                    assert others.acquire(timeout=20)
            super().sync(file)

    disk = Slow()
    tier = SsdTier(tmp_path, slab_bytes=None, disk=disk, threads=2)

    async def main():
        handles = []
        for chain in range(4):
            handles.append(tier.transport.submit([tier.staged(chain, [0], chain)]))
            while chain == 0 and not first.is_set():
                await aio.sleep_ns(1_000_000)
        return [await asyncio.wait_for(handle.future, 20) for handle in handles]

    assert all(result.error is None for [result] in asyncio.run(main()))
    tier.transport.close()
    # One for the first, and at most one for the last write, whose end the first sync does not wait for.
    assert 2 <= disk.syncs <= 3
    assert tier.transport.stats().syncs == disk.syncs
    tier.close()


def test_a_payload_other_than_announced_is_not_written(tmp_path):
    tier = SsdTier(tmp_path)
    good, bad = tier.staged(0, [0]), tier.staged(1, [0], 1)
    tier.host.buffer()[1, 17] ^= 1
    right, wrong = tier.run(good, bad)
    assert right.error is None
    assert type(wrong.error) is BlockCorrupt
    tier.close()
    tier = SsdTier(tmp_path)
    assert tier.served() == {key_of(0, 0): True}
    tier.close()


def test_a_checksum_that_is_not_known_beforehand_is_taken_on_the_way(tmp_path):
    tier = SsdTier(tmp_path)
    [expected] = tier.fill([key_of(0, 0)])
    slots = tier.store.reserve(1)
    tier.store.stage(slots, tier.blocks(0, [0]), (), None)
    [result] = tier.run(Copy(tier.host.regions([0]), tier.store.regions(slots), checksum=True))
    assert result.checksums == (expected,)
    tier.close()
    tier = SsdTier(tmp_path)
    assert tier.served() == {key_of(0, 0): True}
    tier.close()


def test_refusals_are_typed(tmp_path):
    tier = SsdTier(tmp_path)
    other = HostStore("m", 2, 100)
    tier.transport.register(other)
    slots = tier.store.reserve(2)
    host, disk = tier.host.regions([0]), tier.store.regions(slots[:1])
    expected = [
        (Copy(host, disk), f"nothing was staged for slot {slots[0]}"),
        (Copy(disk, other.regions([0])), "do not fit"),
        (Copy(host, tier.host.regions([1])), "does not reach"),
        (Copy(disk, tier.store.regions(slots[1:])), "does not reach"),
        (Copy(tier.host.regions([0, 1]), disk), "2 source slots, 1 target"),
    ]
    results = tier.run(*(copy for copy, _ in expected))
    for result, (_, problem) in zip(results, expected, strict=True):
        assert result.error is not None
        with pytest.raises(TransferError, match=problem):
            raise result.error
    assert tier.run(Copy(tier.host.regions([]), tier.store.regions([])))[0].error is None
    assert tier.transport.stats().errors == 5
    tier.close()


@pytest.mark.parametrize("side", ["source", "target"])
def test_slots_that_change_hands_under_a_copy_are_stale(tmp_path, side):
    class Takes(Disk):
        """Frees a slot of one side while the disk is busy."""

        def read(self, file, views, offset):
            store = tier.store if side == "source" else tier.host
            store.free([(copy.source if side == "source" else copy.target).slots[0]])
            return super().read(file, views, offset)

    tier = SsdTier(tmp_path, disk=Takes())
    slots = tier.put(0, [0, 1])
    tier.host.reserve(8)
    copy = Copy(tier.store.regions(slots), tier.host.regions([0, 1]))
    [result] = tier.run(copy)
    assert type(result.error) is StaleRegion
    assert "during" in str(result.error)
    [result] = tier.run(copy)
    assert type(result.error) is StaleRegion
    assert "before" in str(result.error)
    tier.close()


def test_a_cancelled_batch_still_ends_and_what_was_under_way_is_let_go(tmp_path):
    started, hold = threading.Event(), threading.Event()

    class Slow(Disk):
        def read(self, file, views, offset):
            started.set()
            assert hold.wait(20)
            return super().read(file, views, offset)

    tier = SsdTier(tmp_path, disk=Slow(), threads=1)
    slots = tier.put(0, [0, 1])

    async def main():
        first = tier.transport.submit([Copy(tier.store.regions(slots[:1]), tier.host.regions([0]))])
        second = tier.transport.submit([Copy(tier.store.regions(slots[1:]), tier.host.regions([1]))])
        assert started.wait(20)
        second.cancel()
        hold.set()
        return await asyncio.wait_for(first.future, 20) + await asyncio.wait_for(second.future, 20)

    done, given_up = asyncio.run(main())
    assert done.error is None
    assert "cancelled" in str(given_up.error)
    tier.close()


def test_close_finishes_what_was_submitted_and_refuses_what_follows(tmp_path):
    tier = SsdTier(tmp_path)
    before = threading.active_count()

    async def main():
        handle = tier.transport.submit([tier.staged(0, [0])])
        tier.transport.close()
        with pytest.raises(RuntimeError, match="closed"):
            tier.transport.submit([])
        return await asyncio.wait_for(handle.future, 20)

    assert asyncio.run(main())[0].error is None
    assert threading.active_count() == before
    tier.close()


def test_a_memory_may_be_forgotten_while_its_blocks_are_under_way(tmp_path):
    tier = SsdTier(tmp_path)

    async def main():
        handle = tier.transport.submit([tier.staged(0, [0])])
        tier.transport.deregister(tier.store)
        return await asyncio.wait_for(handle.future, 20)

    assert asyncio.run(main())[0].error is None
    assert not tier.transport.reaches(tier.host, tier.store)
    tier.transport.register(tier.store)
    assert tier.transport.reaches(tier.host, tier.store)
    assert tier.transport.reaches(tier.store, tier.host)
    tier.close()


def test_many_at_once_in_both_directions(tmp_path):
    tier = SsdTier(tmp_path, capacity=64, host_slots=64, slab_bytes=None, threads=8)
    engine = TransferEngine([tier.transport], NullRecorder())

    async def chain(number: int) -> None:
        first, depths = number * 4, range(4)
        for turn in range(5):
            copy = tier.staged(100 * turn + number, depths, first)
            await engine.move(copy)
            slots = tier.commit(copy, 100 * turn + number, depths)
            tier.host.buffer()[first : first + 4] = 0
            sums = await engine.move(Copy(tier.store.regions(slots), copy.source, checksum=True))
            assert sums == tuple(tier.checksum(slot) for slot in slots)
            for depth in depths:
                assert tier.host.buffer()[first + depth].tobytes() == payload_of(key_of(100 * turn + number, depth))
            tier.store.free(slots)

    async def main() -> None:
        await asyncio.wait_for(asyncio.gather(*(chain(number) for number in range(16))), 60)

    asyncio.run(main())
    tier.store.check_idle()
    stats = tier.transport.stats()
    assert (stats.copies, stats.errors, stats.pending_bytes) == (160, 0, 0)
    tier.close()
