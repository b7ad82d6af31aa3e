"""The simulator's transport: times from links, errors by type, and nothing counted that did not arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from mcjax import aio
from mcjax.backends.sim.links import LinkModel
from mcjax.backends.sim.transport import (
    SimTransport,
    device_route,
    network_route,
    other_node,
    same_node,
)
from mcjax.backends.virtual import VirtualLoop
from mcjax.errors import StaleRegion, TransferError
from mcjax.kvpool.stores.slots import SlotStore
from mcjax.transfer.base import Copy, CopyResult, Region, Transport, TransportStats
from mcjax.types import Tier

GB = 1_000_000_000
BLOCK = 1_000


class Pair:
    """Nodes m and n, device and host memory on each, and the two transports of a simulated run."""

    def __init__(self) -> None:
        self.links = LinkModel()
        for node in ("m", "n"):
            self.links.add(f"pcie:{node}", 2 * GB, 5)
            self.links.add(f"out:{node}", GB, 10)
            self.links.add(f"in:{node}", GB, 20)
        self.hbm = {node: SlotStore(node, Tier.HBM, 8, BLOCK) for node in ("m", "n")}
        self.dram = {node: SlotStore(node, Tier.DRAM, 16, BLOCK) for node in ("m", "n")}
        self.device: Transport = SimTransport(self.links, device_route, "device", same_node)
        self.network: Transport = SimTransport(self.links, network_route, "network", other_node)
        for memory in [*self.hbm.values(), *self.dram.values()]:
            self.device.register(memory)
            self.network.register(memory)


def region(store: SlotStore, blocks: int) -> Region:
    return store.regions(store.reserve(blocks))


def in_virtual_time(main: Callable[[Pair], Coroutine[Any, Any, None]]) -> None:
    VirtualLoop().run(lambda: main(Pair()))


def errors(results: list[CopyResult]) -> list[type[TransferError] | None]:
    return [None if result.error is None else type(result.error) for result in results]


def test_a_batch_takes_the_time_of_its_bytes_on_each_route() -> None:
    async def main(pair: Pair) -> None:
        device = pair.device.submit([Copy(region(pair.hbm["m"], 4), region(pair.dram["m"], 4), checksum=True)])
        network = pair.network.submit(
            [Copy(region(pair.dram["m"], count), region(pair.dram["n"], count)) for count in (1, 2)]
        )
        assert pair.network.stats() == TransportStats(pending_bytes=3 * BLOCK)
        assert await device.future == [CopyResult()]  # no bytes, no checksum
        assert aio.now_ns() == 4 * BLOCK // 2 + 5
        # The two copies share the card until the smaller is done (2,000), which is under way for 30 more.
        await aio.sleep_until_ns(2 * BLOCK + 30)
        assert pair.network.stats() == TransportStats(bytes_moved=BLOCK, copies=1, pending_bytes=2 * BLOCK)
        assert await network.future == [CopyResult(), CopyResult()]
        assert aio.now_ns() == 3 * BLOCK + 30
        assert pair.network.stats() == TransportStats(bytes_moved=3 * BLOCK, copies=2)
        assert pair.links.carried_bytes("pcie:m") == 4 * BLOCK
        assert pair.links.carried_bytes("in:n") == 3 * BLOCK

    in_virtual_time(main)


def test_results_stand_in_the_order_of_the_copies() -> None:
    async def main(pair: Pair) -> None:
        stale = region(pair.dram["m"], 1)
        pair.dram["m"].free(stale.slots)
        copies = [
            Copy(region(pair.hbm["m"], 3), region(pair.dram["m"], 3)),
            Copy(stale, region(pair.hbm["m"], 1), request_id=7, first_block=3),
            Copy(region(pair.hbm["m"], 1), region(pair.dram["m"], 1)),
        ]
        results = await pair.device.submit(copies).future
        assert errors(results) == [None, StaleRegion, None]
        error = results[1].error
        assert error is not None
        assert (error.request_id, error.first_block) == (7, 3)

    in_virtual_time(main)


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_region_that_goes_stale_under_way_delivers_nothing(side: str) -> None:
    async def main(pair: Pair) -> None:
        copy = Copy(region(pair.dram["m"], 2), region(pair.dram["n"], 2))
        handle = pair.network.submit([copy])
        await aio.sleep_ns(100)
        gone = copy.source if side == "source" else copy.target
        store = pair.dram["m" if side == "source" else "n"]
        store.free(gone.slots[1:])
        store.reserve(1)
        assert errors(await handle.future) == [StaleRegion]
        assert aio.now_ns() == 2 * BLOCK + 30, "the bytes were sent all the same"
        assert pair.network.stats() == TransportStats(copies=1, errors=1)

    in_virtual_time(main)


def test_copies_that_cannot_be_made_are_refused_at_once() -> None:
    async def main(pair: Pair) -> None:
        strange = SlotStore("m", Tier.DRAM, 4, BLOCK, name="strange")
        small = SlotStore("m", Tier.DRAM, 4, BLOCK // 2, name="small")
        pair.device.register(small)
        hbm, dram, far = pair.hbm["m"], pair.dram["m"], pair.dram["n"]
        cases = {
            "not registered": Copy(region(strange, 1), region(hbm, 1)),
            "1 source slots, 2 target": Copy(region(hbm, 1), region(dram, 2)),
            "of 500 bytes": Copy(region(small, 1), region(dram, 1)),
            "no way": Copy(region(hbm, 1), region(far, 1)),
        }
        handle = pair.device.submit(list(cases.values()))
        assert handle.future.done()
        for problem, result in zip(cases, handle.future.result(), strict=True):
            with pytest.raises(TransferError, match=problem):
                raise result.error or AssertionError(f"{problem} was accepted")
        assert pair.device.stats() == TransportStats(copies=len(cases), errors=len(cases))
        assert pair.links.load("pcie:m") == (0, 0)

    in_virtual_time(main)


def test_a_memory_deregistered_under_way_gets_nothing() -> None:
    async def main(pair: Pair) -> None:
        handle = pair.network.submit([Copy(region(pair.dram["m"], 1), region(pair.dram["n"], 1))])
        await aio.sleep_ns(1)
        pair.network.deregister(pair.dram["n"])
        assert errors(await handle.future) == [TransferError]

    in_virtual_time(main)


def test_cancel_gives_the_links_back_and_tells_who_waits() -> None:
    async def main(pair: Pair) -> None:
        given_up = pair.network.submit([Copy(region(pair.dram["m"], 4), region(pair.dram["n"], 4)) for _ in range(2)])
        kept = pair.network.submit([Copy(region(pair.dram["m"], 1), region(pair.dram["n"], 1))])
        await aio.sleep_ns(300)
        given_up.cancel()
        assert errors(await given_up.future) == [TransferError, TransferError]
        assert aio.now_ns() == 300
        assert await kept.future == [CopyResult()]
        assert aio.now_ns() == 300 + 900 + 30
        given_up.cancel()
        assert pair.network.stats() == TransportStats(bytes_moved=BLOCK, copies=3, errors=2)

    in_virtual_time(main)


def test_whoever_stops_waiting_leaves_no_trace() -> None:
    async def main(pair: Pair) -> None:
        handle = pair.network.submit([Copy(region(pair.dram["m"], 1), region(pair.dram["n"], 1))])
        handle.future.cancel()
        await aio.sleep_ns(BLOCK + 31)
        assert pair.network.stats() == TransportStats(bytes_moved=BLOCK, copies=1)
        with pytest.raises(asyncio.CancelledError):
            await handle.future

    in_virtual_time(main)


def test_an_empty_batch_is_done_and_an_empty_copy_takes_the_latency() -> None:
    async def main(pair: Pair) -> None:
        assert await pair.device.submit([]).future == []
        assert await pair.device.submit([Copy(region(pair.hbm["m"], 0), region(pair.dram["m"], 0))]).future == [
            CopyResult()
        ]
        assert aio.now_ns() == 5

    in_virtual_time(main)


def test_what_each_transport_reaches() -> None:
    async def main(pair: Pair) -> None:
        assert pair.device.reaches(pair.hbm["m"], pair.dram["m"])
        assert not pair.device.reaches(pair.hbm["m"], pair.dram["n"])
        assert pair.network.reaches(pair.hbm["m"], pair.dram["n"])
        assert not pair.network.reaches(pair.dram["m"], pair.dram["m"])

    in_virtual_time(main)
