"""Instances that join take the role that policy gives them; a drained one leaves only when nobody counts on it."""

from __future__ import annotations

import dataclasses

import pytest
from engine_fixtures import MS, CheckBench

from mcjax import aio
from mcjax.engine.cluster_spec import InstanceSpec, parse_cluster
from mcjax.engine.decode import DecodeInstance
from mcjax.engine.service import Service
from mcjax.errors import ConfigError
from mcjax.transfer.layout.describe import whole
from mcjax.types import RequestState, Role


class ToDecode:
    """Whoever joins late shall decode."""

    def assign(self, instance, proposed, view):
        return Role.DECODE if instance == "late" else proposed


def test_an_instance_becomes_what_policy_says() -> None:
    bench = CheckBench("1p1d")

    async def main(service: Service) -> None:
        conductor = service.conductor
        conductor._strategies = dataclasses.replace(conductor._strategies, roles=ToDecode())
        joined = service.cluster.join(InstanceSpec("late", Role.PREFILL))
        assert isinstance(joined, DecodeInstance)
        assert conductor.state.members["late"].role is Role.DECODE

    bench.run(main)


@pytest.mark.parametrize("drained", ["p0", "d0"])
@pytest.mark.parametrize("after_ms", [0, 1, 3, 6, 9, 12, 20])
def test_draining_waits_for_jobs_on_their_way(drained: str, after_ms: int) -> None:
    """Also for one that was placed on the instance but has not reached it: no prompt is computed twice."""
    bench = CheckBench("2p2d")

    async def main(service: Service) -> None:
        tickets = [service.frontend.submit(bench.request(n, range(n, n + 23), 6)) for n in range(4)]
        await aio.sleep_ns(after_ms * MS)
        await service.cluster.drain(drained)
        assert drained not in service.cluster.instances
        rows = [await ticket.task for ticket in tickets]
        assert [row.state for row in rows] == [RequestState.COMPLETED] * 4
        assert [row.attempts for row in rows] == [1] * 4

    bench.run(main)


@pytest.mark.parametrize(
    ("text", "names"),
    [("1p1d", "p0 d0"), ("2m", "m0 m1"), ("2p1d+1m", "p0 p1 d0 m0"), ({"prefill": 1, "decode": 2}, "p0 d0 d1")],
)
def test_clusters_are_read(text: object, names: str) -> None:
    assert [spec.name for spec in parse_cluster(text)] == names.split()


def test_nodes_fail_alone_unless_they_are_put_together() -> None:
    assert [spec.fault_domain for spec in parse_cluster("1p2d")] == ["", "", ""]
    racks = [spec.fault_domain for spec in parse_cluster({"prefill": 1, "decode": 2, "per_domain": 2})]
    assert racks == ["domain-0", "domain-0", "domain-1"]
    for wrong in (0, -1, True, "2"):
        with pytest.raises(ConfigError, match=r"cluster\.per_domain"):
            parse_cluster({"mixed": 2, "per_domain": wrong})


@pytest.mark.parametrize(
    "text", ["", "8", "8p", "3d", "0m", "p1d1", "1x", "1p1d-1m", {"decode": 1}, {"prefil": 1}, {"mixed": -1}]
)
def test_clusters_that_cannot_serve_are_refused(text: object) -> None:
    with pytest.raises(ConfigError, match="cluster"):
        parse_cluster(text)


def test_a_memory_whose_blocks_lie_otherwise_is_refused_when_it_joins() -> None:
    bench = CheckBench("1p1d")
    mine = whole("weights", 2, 4, 8, 4, "bfloat16")

    async def main(service: Service) -> None:
        store_of = bench.world.pool_store

        def pool_store(node: str):
            store = store_of(node)
            store.layout = dataclasses.replace(mine, fingerprint="other") if node == "node-d3" else mine
            return store

        bench.world.pool_store = pool_store
        for name in ("d1", "d2"):
            service.cluster.join(InstanceSpec(name, Role.DECODE))
        with pytest.raises(ConfigError, match=r"node-d3\.dram: its blocks do not lie as those of node-d1\.dram do"):
            service.cluster.join(InstanceSpec("d3", Role.DECODE))
        assert "d3" not in service.cluster.instances

    bench.run(main)
