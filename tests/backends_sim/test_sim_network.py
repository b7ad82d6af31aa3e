"""Simulated nodes whose NICs are told apart: striping, a NIC that goes down and comes back, and the spine."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from mcjax import aio
from mcjax.backends.sim.links import LinkModel
from mcjax.backends.sim.network import SimNetwork, add_nics
from mcjax.backends.sim.transport import SPINE
from mcjax.backends.virtual import VirtualLoop
from mcjax.cost.catalogue import hardware
from mcjax.kvpool.stores.null import NullStore
from mcjax.transfer.base import Copy
from mcjax.transfer.engine import TransferEngine
from mcjax.transfer.paths.base import PathChoice
from mcjax.transfer.paths.health import Patience
from mcjax.transfer.paths.least_queued import LeastQueued
from mcjax.transfer.paths.nearest import Nearest
from mcjax.transfer.paths.path import PathSettings
from mcjax.transfer.paths.striped import Striped
from mcjax.transfer.topology import read_topology
from mcjax.types import NS_PER_S, NullRecorder, Tier

MACHINE = hardware("a800x8")
BLOCK_BYTES = 1 << 20
RATE = MACHINE.nic_bytes_per_s


class Bench:
    """Nodes a, b and c of the A800 kind: four NICs each."""

    def __init__(
        self,
        topology: object = "nics",
        choice: PathChoice | None = None,
        spine_bytes_per_s: float | None = None,
        attempts: int = 5,
    ):
        self.links = LinkModel()
        found = read_topology(topology, MACHINE)
        assert found is not None
        if spine_bytes_per_s is not None:
            self.links.add(SPINE, spine_bytes_per_s)
        self.network = SimNetwork(self.links, found, spine_bytes_per_s is not None)
        path_settings = PathSettings(
            link=(RATE, MACHINE.nic_latency_ns / NS_PER_S), patience=Patience(2, NS_PER_S // 10, NS_PER_S)
        )
        self.engine = TransferEngine([self.network], NullRecorder(), 60.0, attempts, choice, path_settings)
        self.stores = {node: NullStore(node, Tier.DRAM, 45_000, BLOCK_BYTES) for node in "abc"}
        for node, store in self.stores.items():
            self.engine.register(store)
            add_nics(self.links, node, found, MACHINE)

    def copy(self, blocks: int, source: str = "a", target: str = "b") -> Copy:
        here, there = self.stores[source], self.stores[target]
        return Copy(here.regions(here.reserve(blocks)), there.regions(there.reserve(blocks)))

    async def move(self, blocks: int, source: str = "a", target: str = "b") -> float:
        """Seconds that it took."""
        copy, start_ns = self.copy(blocks, source, target), aio.now_ns()
        await self.engine.perform(copy)
        copy.source.memory.free(copy.source.slots)  # pyright: ignore
        copy.target.memory.free(copy.target.slots)  # pyright: ignore
        return (aio.now_ns() - start_ns) / NS_PER_S

    def out(self, node: str = "a") -> list[int]:
        return [self.links.carried_bytes(f"out:{node}/nic{index}") for index in range(4)]

    def check_idle(self) -> None:
        assert self.engine.in_flight == 0
        assert not self.network.under_way
        for store in self.stores.values():
            store.check_integrity()
            store.check_idle()


def virtual(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    VirtualLoop().run(main)


@pytest.mark.parametrize("choice", [Striped(), LeastQueued()])
def test_a_big_copy_takes_all_nics_alike(choice: PathChoice) -> None:
    async def main() -> None:
        bench = Bench(choice=choice)
        took_s = await bench.move(40_000)
        assert took_s == pytest.approx(40_000 * BLOCK_BYTES / RATE, rel=0.001)
        assert max(bench.out()) - min(bench.out()) <= BLOCK_BYTES
        bench.check_idle()

    virtual(main)


def test_one_nic_a_copy_is_a_quarter_of_the_speed_and_copies_spread() -> None:
    async def main() -> None:
        bench = Bench(choice=Nearest())
        assert await bench.move(1000) == pytest.approx(4 * 1000 * BLOCK_BYTES / RATE, rel=0.01)
        before = bench.out()
        tasks = [aio.spawn(bench.move(1000), f"{index}") for index in range(8)]
        for task in tasks:
            await task
        assert [after - was for after, was in zip(bench.out(), before, strict=True)] == [2000 * BLOCK_BYTES] * 4
        bench.check_idle()

    virtual(main)


@pytest.mark.parametrize("choice", [Nearest(), Striped(), LeastQueued()])
def test_a_nic_that_goes_down_in_mid_copy_is_gone_around_and_used_again_later(choice: PathChoice) -> None:
    """Field failures, row 28, in the link model."""

    async def main() -> None:
        bench = Bench(choice=choice)
        copy = aio.spawn(bench.move(4000), "copy")
        await aio.sleep_ns(NS_PER_S // 1000)
        bench.network.set_down("a/nic0", True)
        bench.network.set_down("b/nic2", True)
        await copy
        await bench.move(4000)
        down = bench.out()
        await bench.move(4000)
        assert bench.out()[0] == down[0]
        assert bench.out()[2] == down[2], "its partner at the other end is down"
        bench.network.set_down("a/nic0", False)
        bench.network.set_down("b/nic2", False)
        await aio.sleep_ns(2 * NS_PER_S)
        for _ in range(8):
            await bench.move(4000)
        assert bench.out()[0] > down[0]
        assert bench.out()[2] > down[2]
        bench.check_idle()

    virtual(main)


def test_spares_lead_around_two_ends_that_do_not_fit() -> None:
    async def main() -> None:
        bench = Bench({"nics": 2}, Striped())
        bench.network.set_down("a/nic0", True)
        bench.network.set_down("b/nic1", True)
        for _ in range(4):
            await bench.move(100)
        assert bench.links.carried_bytes("out:a/nic1") == 400 * BLOCK_BYTES
        assert bench.links.carried_bytes("in:b/nic0") == 400 * BLOCK_BYTES
        bench.check_idle()

    virtual(main)


@pytest.mark.parametrize("choice", [Nearest(), Striped(), LeastQueued()])
def test_with_a_switch_for_each_number_nothing_crosses_the_spine_until_it_must(choice: PathChoice) -> None:
    async def main() -> None:
        bench = Bench("rails", choice, spine_bytes_per_s=1e9, attempts=20)
        for target in "bcb":
            await bench.move(400, target=target)
        assert bench.links.carried_bytes(SPINE) == 0
        for index in range(4):
            bench.network.set_down(f"a/nic{index}", index < 3)
            bench.network.set_down(f"b/nic{index}", index > 0)
        for _ in range(6):
            await bench.move(8)
        assert bench.links.carried_bytes(SPINE) >= 6 * 8 * BLOCK_BYTES
        bench.check_idle()

    virtual(main)


def test_between_domains_the_spine_is_the_bottleneck_and_inside_it_is_not() -> None:
    async def main() -> None:
        bench = Bench({"domains": {"a": "x", "b": "x", "c": "y"}}, spine_bytes_per_s=RATE / 10)
        inside_s, across_s = await bench.move(4000, target="b"), await bench.move(4000, target="c")
        assert across_s == pytest.approx(10 * inside_s, rel=0.01)
        bench.check_idle()

    virtual(main)


def test_estimates_follow_a_network_that_others_use_too() -> None:
    async def main() -> None:
        bench = Bench()
        a, b = bench.stores["a"], bench.stores["b"]
        assert bench.engine.estimate(4 << 30, a, b) == pytest.approx((4 << 30) / RATE, rel=0.01)
        for _ in range(60):  # two at a time into b: half for each
            both = [aio.spawn(bench.move(400, source), source) for source in "ac"]
            for task in both:
                await task
        assert bench.engine.estimate(400 << 20, a, b) == pytest.approx(2 * (400 << 20) / RATE, rel=0.1)
        bench.check_idle()

    virtual(main)
