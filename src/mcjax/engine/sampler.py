"""Looks at the cluster at fixed ticks of run time, for the record, never for policy; notices when a run stalls."""

from __future__ import annotations

from collections.abc import Callable

from mcjax import aio
from mcjax.engine.service import Service
from mcjax.errors import Deadlock
from mcjax.transfer.paths.figures import figures_of
from mcjax.types import NS_PER_S, Recorder


class Sampler:
    """Gauges of every instance and node, every `period_s`.

    Raises `Deadlock` out of `run` when requests are running and none has ended for `stall_s`.
    """

    def __init__(
        self,
        service: Service,
        recorder: Recorder,
        period_s: float,
        stall_s: float,
        on_tick: Callable[[int], None] = lambda now_ns: None,
        who_waits: Callable[[], str] = lambda: "",
    ):
        self._service = service
        self._recorder = recorder
        self._period_ns = max(1, round(period_s * NS_PER_S))
        self._stall_ns = round(stall_s * NS_PER_S)
        self._on_tick = on_tick
        self._who_waits = who_waits
        self._ended = 0
        self._moved_ns = 0

    async def run(self) -> None:
        tick = 0
        while True:
            tick += 1
            await aio.sleep_until_ns(tick * self._period_ns)
            now_ns = aio.now_ns()
            self._sample(now_ns)
            self._on_tick(now_ns)
            self._check_progress(now_ns)

    def _sample(self, now_ns: int) -> None:
        """A call a gauge rather than a row: a tick of a thousand instances has seven thousand rows."""
        record = self._recorder.samples
        instances = list(self._service.cluster.instances.values())
        names, loops = [each.name for each in instances], [each.loop for each in instances]
        pages = [each.pages for each in instances]
        record(now_ns, names, "queue_prompts", [len(loop.prefills) for loop in loops])
        record(now_ns, names, "batch", [len(loop.decodes) for loop in loops])
        record(now_ns, names, "page_fill", [1.0 - each.available / each.store.capacity for each in pages])
        nodes = [each.node for each in instances]
        places, pools = [node.name for node in nodes], [node.pool for node in nodes]
        record(now_ns, places, "pool_fill", [len(pool) / pool.store.capacity for pool in pools])
        record(now_ns, places, "outgoing_bytes", [node.outgoing_bytes for node in nodes])
        transports = self._service.engine.transports
        links, stats = [transport.name for transport in transports], [transport.stats() for transport in transports]
        record(now_ns, links, "pending_bytes", [each.pending_bytes for each in stats])
        record(now_ns, links, "moved_bytes", [each.bytes_moved for each in stats])
        self._sample_paths(now_ns)

    def _sample_paths(self, now_ns: int) -> None:
        """Of transports with several ways, or whose copies wait in the engine; of others, `moved_bytes` says it all."""
        paths = [path for path in self._service.engine.paths.values() if path.has_choice or path.pacing is not None]
        groups = figures_of(paths)
        if not groups:
            return
        record, names, found = self._recorder.samples, list(groups), list(groups.values())
        record(now_ns, names, "path_waiting", [each.waiting for each in found])
        record(now_ns, names, "path_waiting_bytes", [each.waiting_bytes for each in found])
        record(now_ns, names, "path_in_flight_bytes", [each.in_flight_bytes for each in found])
        record(now_ns, names, "path_moved_bytes", [each.moved_bytes for each in found])
        record(now_ns, names, "path_expected_bytes_per_s", [each.bytes_per_s for each in found])

    def _check_progress(self, now_ns: int) -> None:
        frontend = self._service.frontend
        if frontend.ended != self._ended or not frontend.running:
            self._ended, self._moved_ns = frontend.ended, now_ns
        elif now_ns - self._moved_ns > self._stall_ns:
            stuck = list(frontend.running)[:10]
            problem = f"no request has ended for {self._stall_ns / 1e9:g} s; requests {stuck} are running"
            raise Deadlock(f"{problem}\n{self._who_waits()}")
