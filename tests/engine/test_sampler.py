"""The sampler looks at fixed ticks of run time, and notices a run that does not get on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from engine_fixtures import MS, CheckBench

from mcjax import aio
from mcjax.engine.sampler import Sampler
from mcjax.engine.service import Service
from mcjax.errors import Deadlock
from mcjax.types import NS_PER_S, NullRecorder


class Gauges(NullRecorder):
    def __init__(self) -> None:
        self.rows: list[tuple[int, str, str, float]] = []

    def samples(self, time_ns: int, sources: Sequence[str], metric: str, values: Sequence[float]) -> None:
        self.rows += [(time_ns, source, metric, value) for source, value in zip(sources, values, strict=True)]


def test_every_gauge_of_every_instance_and_node_at_every_tick() -> None:
    bench, gauges, ticks = CheckBench("1p1d"), Gauges(), list[int]()

    async def main(service: Service) -> None:
        sampler = aio.spawn(Sampler(service, gauges, 0.01, 60.0, ticks.append).run(), "sampler")
        await service.frontend.submit(bench.request(1, range(1, 30), 9)).task
        await aio.sleep_until_ns(100 * MS)
        await aio.settle(sampler)

    bench.run(main)
    assert ticks == [10 * MS * tick for tick in range(1, 11)][: len(ticks)]
    assert len(ticks) >= 9
    metrics = {(source, metric) for _, source, metric, _ in gauges.rows}
    for instance in ("p0", "d0"):
        assert {(instance, name) for name in ("queue_prompts", "batch", "page_fill")} <= metrics
        assert {(f"node-{instance}", name) for name in ("pool_fill", "outgoing_bytes")} <= metrics
        assert {("device", "pending_bytes"), ("network", "moved_bytes")} <= metrics
    fills = [value for _, _, metric, value in gauges.rows if metric.endswith("_fill")]
    assert all(0.0 <= value <= 1.0 for value in fills)
    assert any(value > 0.0 for value in fills)
    last = [value for time_ns, _, metric, value in gauges.rows if time_ns == ticks[-1] and metric == "outgoing_bytes"]
    assert last == [0.0, 0.0]
    assert max(value for _, source, metric, value in gauges.rows if (source, metric) == ("network", "moved_bytes")) > 0


def test_a_run_that_does_not_get_on_is_given_up_with_a_list_of_who_waits() -> None:
    bench = CheckBench("1p1d")

    async def main(service: Service) -> None:
        for instance in service.cluster.instances.values():
            instance.executor.run = never  # pyright: ignore[reportAttributeAccessIssue]
        service.frontend.submit(bench.request(7, range(1, 30), 9))
        await Sampler(service, NullRecorder(), 0.5, 3.0, who_waits=lambda: "p0 waits").run()

    async def never(plan: object, max_steps: int, on_step: object) -> None:
        await aio.sleep_ns(1000 * NS_PER_S)

    with pytest.raises(Deadlock, match=r"no request has ended for 3 s; requests \[7\] are running\np0 waits"):
        bench.run(main)


def test_an_idle_service_is_not_stalled() -> None:
    bench = CheckBench("1p1d")

    async def main(service: Service) -> None:
        sampler = aio.spawn(Sampler(service, NullRecorder(), 0.5, 3.0).run(), "sampler")
        await aio.sleep_ns(20 * NS_PER_S)
        await service.frontend.submit(bench.request(1, range(1, 30), 9)).task
        assert not sampler.done()
        await aio.settle(sampler)

    bench.run(main)
