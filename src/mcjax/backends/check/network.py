"""The checking network between nodes that have several NICs: what crosses one that is down, or goes down, is lost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mcjax import aio
from mcjax.backends.check.faults import FaultCounts, Faults
from mcjax.backends.check.transport import LATENCY_S, CheckTransport
from mcjax.errors import PeerLost
from mcjax.transfer.base import Copy, CopyResult, FutureHandle, Memory, Rail
from mcjax.transfer.topology import Nic, Topology
from mcjax.types import NS_PER_S


class CheckNetwork(CheckTransport):
    """Between nodes, by rails. `outages_ns`: until when each NIC (`node/nic0`) is down."""

    def __init__(self, nics: int, faults: Faults, counts: FaultCounts, rng: np.random.Generator):
        super().__init__("network", lambda a, b: a.node != b.node, faults, counts, rng)
        self.topology = Topology(tuple(Nic(f"nic{index}", 0, 1e6) for index in range(nics)))
        self.nic_outages_ns: dict[str, int] = {}
        self._rails: dict[FutureHandle, Rail] = {}

    def rails(self, source: Memory, target: Memory) -> Sequence[Rail]:
        return self.topology.rails(source.node, target.node)

    def submit(self, copies: list[Copy], priority: int = 0, rail: Rail | None = None) -> FutureHandle:
        """Start a batch on `rail`; None: on the first there is."""
        first = copies[0]
        rail = rail or self.rails(first.source.memory, first.target.memory)[0]
        if self._is_down(rail):
            handle = FutureHandle(aio.new_future())
            when_ns = aio.now_ns() + round(LATENCY_S[0] * NS_PER_S)
            aio.clock().call_at_ns(when_ns, self._answer, handle, self._lost(copies, rail))
            return handle
        handle = super().submit(copies, priority)
        self._rails[handle] = rail
        handle.future.add_done_callback(lambda _: self._rails.pop(handle, None))
        return handle

    def _arrive(self, copies: list[Copy], handle: FutureHandle | None) -> None:
        rail = None if handle is None else self._rails.get(handle)
        if rail is not None and self._is_down(rail):
            assert handle is not None
            self._answer(handle, self._lost(copies, rail))
            return
        super()._arrive(copies, handle)

    def _is_down(self, rail: Rail) -> bool:
        return any(aio.now_ns() < self.nic_outages_ns.get(nic, 0) for nic in (rail.local, rail.remote))

    def _lost(self, copies: list[Copy], rail: Rail) -> list[CopyResult]:
        problem = f"{rail.local} or {rail.remote} is down"
        return [CopyResult(PeerLost(problem, copy.request_id, copy.first_block)) for copy in copies]
