"""Block streams between two nodes of real pools: order, what fails, the private tail, and chains of streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from engine_fixtures import MS

from mcjax import aio
from mcjax.backends.check.faults import FaultCounts, Faults
from mcjax.backends.check.store import ByteStore
from mcjax.backends.check.transport import CheckTransport
from mcjax.backends.virtual import VirtualLoop
from mcjax.engine.node import Node
from mcjax.engine.stream import BlockStream, Piece
from mcjax.errors import InstanceDown, LeaseLost, StaleRegion, TransferError
from mcjax.kvpool.eviction.lru import LRU
from mcjax.kvpool.pool import Pool
from mcjax.kvpool.watermark.static import Static as StaticWatermark
from mcjax.transfer.engine import TransferEngine
from mcjax.types import NS_PER_S, NullRecorder, Tier

BLOCKS = (10, 11, 12, 13)


class Bench:
    """A device with six pages, a pool on its node, a pool on another; every page holds its own number."""

    def __init__(self, attempts: int = 1, faults: Faults | None = None):
        rng = np.random.default_rng(0)
        transports = [
            CheckTransport("any", lambda a, b: True, faults or Faults(), FaultCounts(), rng),
        ]
        engine = TransferEngine(transports, NullRecorder(), 0.2, attempts)
        self.pages = ByteStore("a", Tier.HBM, 6, 4)
        self.pages.reserve(6)
        self.pages.buffer()[:] = np.arange(6, dtype=np.uint8)[:, None]
        engine.register(self.pages)
        self.nodes: list[Node] = []
        for name in ("a", "b"):
            store = ByteStore(name, Tier.DRAM, 8, 4)
            engine.register(store)
            pool = Pool(name, store, LRU(), StaticWatermark(), NullRecorder(), NS_PER_S)
            self.nodes.append(Node(name, pool, engine, NS_PER_S))
        self.arrived: list[tuple[int, int]] = []
        self.after: list[Piece] = []

    def stream(self, slots: int, target: int = 0, on_arrival: Callable[[Piece], None] | None = None) -> BlockStream:
        node = self.nodes[target]
        self.pin, self.reservation = node.pool.pin(1, BLOCKS), node.pool.reserve(1, slots)

        def note(piece: Piece) -> None:
            self.arrived.append((piece.first, len(piece.region.slots)))
            if on_arrival is not None:
                on_arrival(piece)

        return BlockStream(self.nodes[0], node, BLOCKS, self.reservation, self.pin, True, note)

    def onward(self, at_once: bool) -> BlockStream:
        """From the first node's pool to the second's, sent by `on_arrival` of another."""
        pool = self.nodes[1].pool
        self.there = pool.pin(2, BLOCKS), pool.reserve(2, 5)
        pin, reservation = self.there
        return BlockStream(
            self.nodes[0], self.nodes[1], BLOCKS, reservation, pin, False, self.after.append, at_once=at_once
        )

    def piece(self, first: int, count: int) -> Piece:
        return Piece(first, self.pages.regions(range(first, first + count)))

    def bytes_of(self, node: int, blocks: tuple[int, ...]) -> list[int]:
        pool = self.nodes[node].pool
        buffer: Any = pool.store.buffer()
        return [int(buffer[slot, 0]) for slot in pool.region(blocks).slots]

    def check(self) -> None:
        for node in self.nodes:
            node.pool.release(self.pin)
            node.pool.release(self.reservation)
            node.pool.check_integrity()
            node.pool.check_idle()


def virtual(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    VirtualLoop().run(main)


def test_pieces_arrive_in_order_while_more_are_produced() -> None:
    async def main() -> None:
        bench = Bench()
        stream = bench.stream(5)
        task = aio.spawn(stream.run(), "stream")
        stream.push(bench.piece(0, 2))
        stream.push(bench.piece(2, 1))
        await aio.sleep_ns(20 * MS)
        assert bench.arrived == [(0, 2), (2, 1)]
        assert len(bench.pin) == 3, "what has arrived is pinned, and may be matched"
        assert bench.nodes[0].pool.match(BLOCKS) == 3
        assert not task.done()
        stream.push(bench.piece(3, 2))  # the last block, and the tail behind it
        stream.close()
        await task
        assert bench.arrived[2:] == [(3, 2)]
        assert bench.bytes_of(0, BLOCKS) == [0, 1, 2, 3]
        assert len(bench.reservation) == 1, "the private tail is in the one slot that nobody can match"
        buffer: Any = bench.nodes[0].pool.store.buffer()
        assert int(buffer[bench.reservation.slots[0], 0]) == 4
        bench.check()

    virtual(main)


def test_streams_chain_from_device_to_own_pool_to_another_nodes() -> None:
    async def main() -> None:
        bench = Bench()
        pool = bench.nodes[1].pool
        pin, reservation = pool.pin(1, BLOCKS), pool.reserve(1, 4)
        onward = BlockStream(bench.nodes[0], bench.nodes[1], BLOCKS, reservation, pin, False)
        inward = bench.stream(4, on_arrival=onward.push)
        tasks = [aio.spawn(stream.run(), "stream") for stream in (inward, onward)]
        inward.push(bench.piece(0, 3))
        inward.push(bench.piece(3, 1))
        inward.close()
        await tasks[0]
        onward.close()
        await tasks[1]
        assert bench.bytes_of(1, BLOCKS) == [0, 1, 2, 3]
        assert pool.checksums(BLOCKS) == bench.nodes[0].pool.checksums(BLOCKS), "checksummed once, where it was made"
        assert all(pool.checksums(BLOCKS))
        pool.release(pin)
        pool.release(reservation)
        bench.check()

    virtual(main)


def test_closing_an_empty_stream_ends_it() -> None:
    async def main() -> None:
        bench = Bench()
        stream = bench.stream(0)
        stream.close()
        await stream.run()
        bench.check()

    virtual(main)


def test_a_lost_piece_is_an_error_and_nothing_behind_it_becomes_visible() -> None:
    async def main() -> None:
        bench = Bench(faults=Faults(lost=1.0))
        stream = bench.stream(4)
        for first in range(4):
            stream.push(bench.piece(first, 1))
        with pytest.raises(TransferError):
            await stream.run()
        assert bench.nodes[0].pool.match(BLOCKS) == 0
        assert bench.arrived == []
        await aio.sleep_ns(2 * NS_PER_S)
        bench.check()

    virtual(main)


def test_a_lost_lease_ends_the_stream_and_its_late_bytes_are_nobodys() -> None:
    async def main() -> None:
        bench = Bench()
        stream = bench.stream(4)
        stream.push(bench.piece(0, 4))
        task = aio.spawn(stream.run(), "stream")
        await aio.sleep_ns(1)
        bench.reservation.lost = True
        bench.nodes[0].pool.release(bench.reservation)  # as `expire` does
        with pytest.raises((LeaseLost, TransferError)):
            await task
        assert bench.nodes[0].pool.match(BLOCKS) == 0
        await aio.sleep_ns(NS_PER_S)
        bench.check()

    virtual(main)


def test_a_prefix_that_left_the_index_ends_the_stream() -> None:
    """Found corrupt meanwhile: what continues it could never be matched, and must not be kept as if it could."""

    async def main() -> None:
        bench = Bench()
        stream = bench.stream(4)
        stream.push(bench.piece(0, 2))
        task = aio.spawn(stream.run(), "stream")
        await aio.sleep_ns(20 * MS)
        bench.nodes[0].pool.drop(BLOCKS[1:2])
        stream.push(bench.piece(2, 2))
        with pytest.raises(TransferError, match="no longer resident"):
            await task
        assert bench.nodes[0].pool.match(BLOCKS) == 1
        bench.check()

    virtual(main)


def test_a_dead_target_is_an_error_at_once() -> None:
    async def main() -> None:
        bench = Bench()
        stream = bench.stream(4, target=1)
        stream.push(bench.piece(0, 2))
        task = aio.spawn(stream.run(), "stream")
        await aio.sleep_ns(1)
        bench.nodes[1].fail()
        with pytest.raises((InstanceDown, LeaseLost, TransferError)):
            await task
        assert bench.nodes[0].outgoing_bytes == 0

    virtual(main)


@pytest.mark.parametrize("after_ns", [0, 1, MS // 10, 5 * MS])
def test_a_cancelled_stream_leaves_nothing_behind(after_ns: int) -> None:
    async def main() -> None:
        bench = Bench()
        stream = bench.stream(4, target=1)
        for first in range(4):
            stream.push(bench.piece(first, 1))
        task = aio.spawn(stream.run(), "stream")
        await aio.sleep_ns(after_ns)
        await aio.settle(task)
        assert bench.nodes[0].outgoing_bytes == 0
        bench.nodes[1].pool.release(bench.pin)
        bench.nodes[1].pool.release(bench.reservation)
        await asyncio.sleep(0)
        await aio.sleep_ns(NS_PER_S)
        bench.check()

    virtual(main)


def test_at_once_nothing_leaves_before_the_end_and_then_in_one_copy() -> None:
    async def main() -> None:
        bench = Bench()
        onward = bench.onward(at_once=True)
        inward = bench.stream(5, on_arrival=onward.push)
        tasks = [aio.spawn(stream.run(), "stream") for stream in (inward, onward)]
        for first, count in ((0, 2), (2, 1), (3, 2)):
            inward.push(bench.piece(first, count))
        inward.close()
        await tasks[0]
        await aio.sleep_ns(50 * MS)
        assert len(bench.arrived) == 3
        assert not bench.after, "the prompt may still be computed"
        onward.close()
        await tasks[1]
        assert [(piece.first, len(piece.region.slots), len(piece.checksums)) for piece in bench.after] == [(0, 5, 5)]
        assert bench.bytes_of(1, BLOCKS) == [0, 1, 2, 3]
        for hold in bench.there:
            bench.nodes[1].pool.release(hold)
        bench.check()

    virtual(main)


def test_at_once_what_changed_hands_meanwhile_is_not_sent() -> None:
    async def main() -> None:
        bench = Bench()
        sender, target = bench.nodes
        pin, reservation = target.pool.pin(1, ()), target.pool.reserve(1, 2)
        stream = BlockStream(sender, target, BLOCKS, reservation, pin, False, at_once=True)
        task = aio.spawn(stream.run(), "stream")
        stream.push(bench.piece(0, 1))
        bench.pages.free([0])
        stream.push(bench.piece(1, 1))
        stream.close()
        with pytest.raises(StaleRegion, match="before it was sent"):
            await task

    virtual(main)
