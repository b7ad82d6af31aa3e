"""The simulator's transport: times from links, errors by type, and nothing counted that did not arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from mcjax import aio
from mcjax.backends.sim.links import LinkModel
from mcjax.backends.sim.transport import (
    SPINE,
    SimTransport,
    device_route,
    network_route,
    other_node,
    same_node,
    spine_route,
)
from mcjax.backends.sim.world import SimWorld
from mcjax.backends.virtual import VirtualLoop
from mcjax.cost.catalogue import fitted, hardware, model
from mcjax.errors import ConfigError, StaleRegion, TransferError
from mcjax.kvpool.stores.slots import SlotStore
from mcjax.transfer.base import Copy, CopyResult, Handle, Region, Transport, TransportStats
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


def answer(handle: Handle) -> asyncio.Future[list[CopyResult]]:
    future: asyncio.Future[list[CopyResult]] = asyncio.get_running_loop().create_future()
    handle.when_answered(future.set_result)
    return future


def errors(results: list[CopyResult]) -> list[type[TransferError] | None]:
    return [None if result.error is None else type(result.error) for result in results]


def test_a_batch_takes_the_time_of_its_bytes_on_each_route() -> None:
    async def main(pair: Pair) -> None:
        device = pair.device.submit([Copy(region(pair.hbm["m"], 4), region(pair.dram["m"], 4), checksum=True)])
        network = pair.network.submit(
            [Copy(region(pair.dram["m"], count), region(pair.dram["n"], count)) for count in (1, 2)]
        )
        assert pair.network.stats() == TransportStats(pending_bytes=3 * BLOCK)
        assert await answer(device) == [CopyResult()]  # no bytes, no checksum
        assert aio.now_ns() == 4 * BLOCK // 2 + 5
        # The two copies share the card until the smaller is done (2,000), which is under way for 30 more.
        await aio.sleep_until_ns(2 * BLOCK + 30)
        assert pair.network.stats() == TransportStats(bytes_moved=BLOCK, copies=1, pending_bytes=2 * BLOCK)
        assert await answer(network) == [CopyResult(), CopyResult()]
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
        results = await answer(pair.device.submit(copies))
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
        assert errors(await answer(handle)) == [StaleRegion]
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
        assert answer(handle).done()
        for problem, result in zip(cases, answer(handle).result(), strict=True):
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
        assert errors(await answer(handle)) == [TransferError]

    in_virtual_time(main)


def test_cancel_gives_the_links_back_and_tells_who_waits() -> None:
    async def main(pair: Pair) -> None:
        given_up = pair.network.submit([Copy(region(pair.dram["m"], 4), region(pair.dram["n"], 4)) for _ in range(2)])
        kept = pair.network.submit([Copy(region(pair.dram["m"], 1), region(pair.dram["n"], 1))])
        await aio.sleep_ns(300)
        given_up.cancel()
        assert errors(await answer(given_up)) == [TransferError, TransferError]
        assert aio.now_ns() == 300
        assert await answer(kept) == [CopyResult()]
        assert aio.now_ns() == 300 + 900 + 30
        given_up.cancel()
        assert pair.network.stats() == TransportStats(bytes_moved=BLOCK, copies=3, errors=2)

    in_virtual_time(main)


def test_whoever_does_not_ask_leaves_no_trace_and_may_ask_late() -> None:
    async def main(pair: Pair) -> None:
        handle = pair.network.submit([Copy(region(pair.dram["m"], 1), region(pair.dram["n"], 1))])
        await aio.sleep_ns(BLOCK + 31)
        assert pair.network.stats() == TransportStats(bytes_moved=BLOCK, copies=1)
        assert await answer(handle) == [CopyResult()]
        assert aio.now_ns() == BLOCK + 31

    in_virtual_time(main)


def test_an_empty_batch_is_done_and_an_empty_copy_takes_the_latency() -> None:
    async def main(pair: Pair) -> None:
        assert await answer(pair.device.submit([])) == []
        assert await answer(pair.device.submit([Copy(region(pair.hbm["m"], 0), region(pair.dram["m"], 0))])) == [
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


# Links that nodes have beside PCIe and network cards.


class Rack:
    """Nodes m, n, o with SSDs of half a GB/s, cards of one, and a spine of one and a half for all of them."""

    def __init__(self) -> None:
        self.links = LinkModel()
        self.links.add(SPINE, 1.5 * GB)
        for node in ("m", "n", "o"):
            self.links.add(f"pcie:{node}", GB, 5)
            self.links.add(f"out:{node}", GB, 10)
            self.links.add(f"in:{node}", GB)
            self.links.add(f"ssd:{node}", GB // 2, 100)
        self.stores = {(node, tier): SlotStore(node, tier, 16, BLOCK) for node in ("m", "n", "o") for tier in (*Tier,)}
        self.device = SimTransport(self.links, device_route, "device", same_node)
        self.network = SimTransport(self.links, spine_route, "network", other_node)
        for store in self.stores.values():
            self.device.register(store)
            self.network.register(store)

    async def sent(self, *copies: tuple[str, str, int, int]) -> list[int]:
        """When each of `(from, to, blocks, priority)` has arrived, started together; a place is node and tier."""

        async def one(from_: str, to: str, blocks: int, priority: int) -> int:
            source, target = (self.stores[place.split(".")[0], Tier(place.split(".")[1])] for place in (from_, to))
            transport = self.device if source.node == target.node else self.network
            copy = Copy(region(source, blocks), region(target, blocks))
            assert await answer(transport.submit([copy], priority)) == [CopyResult()]
            return aio.now_ns()

        tasks = [aio.spawn(one(*copy), "copy") for copy in copies]
        return [await task for task in tasks]


CASES: dict[str, tuple[list[tuple[str, str, int, int]], list[int]]] = {
    "alone on the spine, the cards are the bound": ([("m.dram", "n.dram", 3, 0)], [3_010]),
    "three nodes share the spine": (
        [("m.dram", "n.dram", 3, 0), ("n.dram", "o.dram", 3, 0), ("o.dram", "m.dram", 3, 0)],
        [6_010, 6_010, 6_010],
    ),
    "an SSD is read at its own speed, and leaves PCIe to others": (
        [("m.ssd", "m.dram", 2, 0), ("m.hbm", "m.dram", 4, 0)],
        [4_100, 4_005],
    ),
    "a device reads an SSD over both links": (
        # PCIe: 0.5 each until the SSD's flow is done at 4,000; the other has 2,000 of its 3,000 bytes by then.
        [("m.ssd", "m.hbm", 2, 0), ("m.hbm", "m.dram", 3, 0)],
        [4_105, 5_005],
    ),
    "an SSD serves its node and another": (
        # A quarter each until the first is done at 4,000; the second has 1,000 left, at a half.
        [("m.ssd", "m.dram", 1, 0), ("m.ssd", "n.dram", 2, 0)],
        [4_100, 6_110],
    ),
    "SSDs at both ends": ([("m.ssd", "n.ssd", 1, 0)], [2_210]),
    "the more urgent first": (
        [("m.dram", "n.dram", 2, 0), ("m.dram", "o.dram", 3, 1)],
        [5_010, 3_010],
    ),
}


@pytest.mark.parametrize(("copies", "arrivals"), CASES.values(), ids=CASES)
def test_which_links_a_copy_crosses(copies: list[tuple[str, str, int, int]], arrivals: list[int]) -> None:
    async def main() -> None:
        assert await Rack().sent(*copies) == arrivals

    VirtualLoop().run(main)


def test_a_node_without_ssds_has_no_way_to_them() -> None:
    async def main(pair: Pair) -> None:
        ssd = SlotStore("m", Tier.SSD, 4, BLOCK)
        pair.device.register(ssd)
        with pytest.raises(ValueError, match="no link ssd:m"):
            pair.device.submit([Copy(region(ssd, 1), region(pair.dram["m"], 1))])

    in_virtual_time(main)


def world(spine_bytes_per_s: float | None, ssd_bytes_per_s: int = 0) -> SimWorld:
    node = replace(hardware("a800x8"), ssd_bytes_per_s=ssd_bytes_per_s)
    made = SimWorld(model("llama3-8b"), node, fitted(), {}, 512, spine_bytes_per_s=spine_bytes_per_s)  # type: ignore[arg-type]
    for name in ("m", "n"):
        made.pool_store(name)
    return made


def test_a_world_has_the_links_that_its_hardware_and_options_give() -> None:
    plain = ("pcie:m", "out:m", "in:m", "pcie:n", "out:n", "in:n")
    assert world(None).links.names == plain
    assert world(1e12).links.names == ("spine", *plain)
    assert [name for name in world(None, GB).links.names if name not in plain] == ["ssd:m", "ssd:n"]


@pytest.mark.parametrize("spine_bytes_per_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_spine_that_is_none_is_refused(spine_bytes_per_s: float) -> None:
    with pytest.raises(ConfigError, match=r"backend\.spine_bytes_per_s"):
        world(spine_bytes_per_s)


@pytest.mark.parametrize("spine_bytes_per_s", [None, 87e9])
def test_the_spine_of_a_world_is_crossed_between_nodes(spine_bytes_per_s: float | None) -> None:
    """Two nodes send to each other: each at its card's speed, or at half of a spine that is as fast as one card."""

    async def main() -> int:
        made = world(spine_bytes_per_s)
        one, two = (SlotStore(node, Tier.DRAM, 4, 87_000_000) for node in ("m", "n"))
        _, network = made.transports()
        network.register(one)
        network.register(two)
        handles = [network.submit([Copy(region(a, 1), region(b, 1))]) for a, b in ((one, two), (two, one))]
        for handle in handles:
            await answer(handle)
        return aio.now_ns()

    wanted_ns = 1_000_000 if spine_bytes_per_s is None else 2_000_000
    assert VirtualLoop().run(main) == wanted_ns + hardware("a800x8").nic_latency_ns
