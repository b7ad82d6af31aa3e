from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import xxhash

from mcjax import aio
from mcjax.errors import BlockCorrupt, StaleRegion, TransferError
from mcjax.kvpool.stores.host import HostStore
from mcjax.kvpool.stores.slots import SlotStore
from mcjax.transfer.base import Copy, CopyResult
from mcjax.transfer.transports.local import Local
from mcjax.transfer.transports.threaded import decode_results, encode_results
from mcjax.types import NullRecorder, Tier


class Outcomes(NullRecorder):
    def __init__(self):
        self.rows = []

    def outcome(self, time_ns, mechanism, call, payload):
        self.rows.append((time_ns, mechanism, call, payload))


class Bench:
    """Two stores of random bytes, a transport between them, and what was recorded."""

    def __init__(self, block_bytes=100):
        self.source, self.target = HostStore("a", 8, block_bytes), HostStore("b", 8, block_bytes)
        self.source.buffer()[:] = np.random.default_rng(0).integers(0, 256, (8, block_bytes), dtype=np.uint8)
        self.recorder = Outcomes()
        self.transport = Local(self.recorder)
        self.transport.register(self.source)
        self.transport.register(self.target)

    def copy(self, source=(0, 1), target=(2, 3), **options):
        return Copy(self.source.regions(source), self.target.regions(target), request_id=5, first_block=9, **options)

    def run(self, *copies, before=lambda: None):
        async def main():
            handle = self.transport.submit(list(copies))
            before()
            return await asyncio.wait_for(handle.future, 10)

        try:
            return asyncio.run(main())
        finally:
            self.transport.close()


def test_bytes_checksums_stats_and_the_recorded_outcome():
    bench = Bench()
    plain, summed = bench.run(bench.copy(), bench.copy((4,), (0,), checksum=True))
    assert plain == CopyResult()
    np.testing.assert_array_equal(bench.target.buffer()[[2, 3, 0]], bench.source.buffer()[[0, 1, 4]])
    digest = xxhash.xxh3_128(bench.source.buffer()[4].tobytes()).digest()
    assert summed == CopyResult(None, (digest,))
    stats = bench.transport.stats()
    assert (stats.bytes_moved, stats.copies, stats.errors, stats.pending_bytes) == (300, 2, 0, 0)
    [(time_ns, mechanism, call, payload)] = bench.recorder.rows
    assert (mechanism, call) == ("local", 0)
    assert time_ns > 0
    assert payload == {
        "results": [
            {"error": None, "kind": None, "checksums": []},
            {"error": None, "kind": None, "checksums": [digest.hex()]},
        ]
    }


def test_a_stale_region_is_refused_before_the_copy():
    bench = Bench()
    copy = bench.copy()
    bench.source.reserve(2)
    bench.source.free([1])
    [result] = bench.run(copy)
    assert type(result.error) is StaleRegion
    assert "before" in str(result.error)
    assert "a.dram" in str(result.error)
    assert not bench.target.buffer().any()


@pytest.mark.parametrize("side", ["source", "target"])
def test_slots_that_change_hands_during_the_copy_are_an_error_too(side, monkeypatch):
    """The middle of a copy is made observable by a buffer that frees the slot as it is read."""
    bench = Bench()
    store = getattr(bench, side)
    copy = bench.copy()
    real = bench.source.buffer()

    class Source(HostStore):
        def buffer(self):
            if threading.current_thread().name.startswith("mcjax-"):
                store.free([copy.source.slots[0] if side == "source" else copy.target.slots[0]])
            return real

    bench.source.__class__ = Source
    [result] = bench.run(copy)
    assert type(result.error) is StaleRegion
    assert "during" in str(result.error)
    assert bench.transport.stats().errors == 1


def test_refusals_are_typed_and_the_rest_of_the_batch_goes_on():
    bench = Bench()
    other = HostStore("c", 4, 100)
    small = HostStore("d", 4, 50)
    sizes = SlotStore("e", Tier.DRAM, 4, 100)
    bench.transport.register(small)
    bench.transport.register(sizes)
    bad = [
        (Copy(bench.source.regions([0]), other.regions([0])), "c.dram is not registered"),
        (Copy(bench.source.regions([0]), small.regions([0])), "do not fit"),
        (Copy(bench.source.regions([0]), sizes.regions([0])), "does not reach"),
        (bench.copy((0, 1), (0,)), "2 source slots, 1 target"),
    ]
    outside = bench.copy((0,), (1,))
    object.__setattr__(outside.target, "slots", (8,))
    bad.append((outside, r"\[8\] lie outside"))
    results = bench.run(*(copy for copy, _ in bad), bench.copy())
    for result, (_, problem) in zip(results[:-1], bad, strict=True):
        assert result.error is not None
        with pytest.raises(TransferError, match=problem):
            raise result.error
    assert results[-1].error is None
    assert bench.transport.stats().errors == 5


def test_a_cancelled_batch_still_ends_and_is_recorded():
    bench = Bench()
    started, hold = threading.Event(), threading.Event()
    real = bench.source.buffer()

    class Slow(HostStore):
        def buffer(self):
            if threading.current_thread().name.startswith("mcjax-"):
                started.set()
                assert hold.wait(10)
            return real

    bench.source.__class__ = Slow

    async def main():
        first = bench.transport.submit([bench.copy()])
        second = bench.transport.submit([bench.copy((5,), (5,))])
        assert started.wait(10)
        second.cancel()
        hold.set()
        return await asyncio.wait_for(first.future, 10) + await asyncio.wait_for(second.future, 10)

    try:
        first, second = asyncio.run(main())
    finally:
        bench.transport.close()
    assert first.error is None
    assert "cancelled" in str(second.error)
    assert not bench.target.buffer()[5].any()
    assert [row[2] for row in bench.recorder.rows] == [0, 1]


def test_nobody_waits_and_the_answer_is_still_recorded():
    bench = Bench()

    async def main():
        handle = bench.transport.submit([bench.copy()])
        handle.future.cancel()
        while not bench.recorder.rows:
            await aio.sleep_ns(1_000_000)

    asyncio.run(main())
    bench.transport.close()
    assert len(bench.recorder.rows) == 1


def test_close_ends_the_thread_and_refuses_what_follows():
    bench = Bench()
    before = threading.active_count()
    bench.run(bench.copy())
    assert threading.active_count() == before

    async def main():
        bench.transport.submit([bench.copy()])

    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(main())
    assert bench.transport.stats().pending_bytes == 0


def test_names_are_unique_and_deregistered_memories_unknown():
    bench = Bench()
    with pytest.raises(ValueError, match=r"a\.dram"):
        bench.transport.register(HostStore("a", 1, 1))
    bench.transport.deregister(bench.target)
    assert not bench.transport.reaches(bench.source, bench.target)
    bench.transport.deregister(bench.target)


def test_results_survive_the_log():
    bench = Bench()
    copies = [bench.copy(), bench.copy(), bench.copy()]
    results = [
        CopyResult(None, (b"\x01\x02", b"\xff")),
        CopyResult(StaleRegion("gone", 5, 9)),
        CopyResult(BlockCorrupt("bad", 5, 9)),
    ]
    back = decode_results(encode_results(results), copies)
    assert back[0] == results[0]
    for got, want in zip(back[1:], results[1:], strict=True):
        assert type(got.error) is type(want.error)
        assert str(got.error) == str(want.error)
    with pytest.raises(ValueError, match="3 results"):
        decode_results(encode_results(results), copies[:2])
