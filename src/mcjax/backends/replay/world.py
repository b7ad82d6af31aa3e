"""A real run's mechanisms, played from its log: each answers at the time, and with the words, that were recorded.

On the virtual loop the procedures then meet the same wake-ups in the same order as they did for real.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mcjax import aio
from mcjax.backends.progress import decode_progress
from mcjax.backends.virtual import VirtualLoop
from mcjax.cost.base import CostModel
from mcjax.cost.padded import Padded
from mcjax.engine.base import Capacity, InstanceParts, OnStep, Progress, StepPlan
from mcjax.errors import RunError
from mcjax.kvpool.stores.slots import SlotStore
from mcjax.transfer.base import Copy, FutureHandle, Memory, Transport, TransportStats
from mcjax.transfer.transports.threaded import decode_results
from mcjax.types import KVFormat, KVGroup, Recorder, Role, Tier

T = TypeVar("T")


class Log:
    """The outcomes of a run, by mechanism and call."""

    def __init__(self, rows: Sequence[tuple[int, str, int, str]]):
        self._rows = {(mechanism, call): (time_ns, payload) for time_ns, mechanism, call, payload in rows}
        self._answered: dict[tuple[str, int], None] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def answer(self, mechanism: str, call: int) -> tuple[int, dict[str, Any]] | None:
        """`(time_ns, payload)`, or None if the run ended before this call was answered."""
        found = self._rows.get((mechanism, call))
        if found is None:
            return None
        self._answered[mechanism, call] = None
        return found[0], json.loads(found[1])

    def setting(self, mechanism: str) -> dict[str, Any]:
        """What was measured or fixed before the run's time began. Raises `RunError` if the log has none."""
        found = self.answer(mechanism, 0)
        if found is None:
            raise RunError(
                f"the run's outcomes hold no {mechanism!r}: it was not a run of the real engine, or of another version"
            )
        return found[1]

    def unanswered(self) -> int:
        """Logged answers that nobody has asked for: the replay took another way."""
        return len(self._rows) - len(self._answered)


class ReplayExecutor:
    """Answers its n-th plan with the n-th logged progress."""

    def __init__(self, name: str, capacity: Capacity, log: Log):
        self.name = name
        self._capacity = capacity
        self._log = log
        self._calls = 0
        self._busy_ns = 0

    def capacity(self) -> Capacity:
        return self._capacity

    def busy_ns(self) -> int:
        return self._busy_ns

    def step_ends_ns(self) -> NDArray[np.int64]:
        return np.zeros(0, np.int64)  # as the real one, it learns of steps when the plan is done

    def interrupt(self) -> None:
        pass  # what it led to is in the log

    async def run(self, plan: StepPlan, max_steps: int, on_step: OnStep | None = None) -> Progress:
        found = self._log.answer(self.name, self._calls)
        self._calls += 1
        if found is None:
            await aio.new_future()
            raise AssertionError("unreachable")
        await aio.sleep_until_ns(found[0])
        progress = decode_progress(found[1])
        if len(progress.tokens) != len(plan.items):
            raise RunError(
                f"{self.name}: the log answers a plan of {len(progress.tokens)} items, not of {len(plan.items)}"
            )
        self._busy_ns += int(progress.ends_ns[-1]) - progress.start_ns
        return progress


class ReplayTransport:
    """Answers its n-th batch with the n-th logged results; moves nothing."""

    def __init__(self, name: str, reaches: Callable[[Memory, Memory], bool], log: Log):
        self.name = name
        self._reaches = reaches
        self._log = log
        self._calls = 0
        self._stats = TransportStats()

    def register(self, memory: Memory) -> None:
        pass

    def deregister(self, memory: Memory) -> None:
        pass

    def reaches(self, source: Memory, target: Memory) -> bool:
        return self._reaches(source, target)

    def stats(self) -> TransportStats:
        return self._stats

    def submit(self, copies: list[Copy], priority: int = 0) -> FutureHandle:
        handle = FutureHandle(aio.new_future())
        found = self._log.answer(self.name, self._calls)
        self._calls += 1
        self._stats.pending_bytes += sum(copy.source.nbytes for copy in copies)
        if found is not None:
            aio.clock().call_at_ns(found[0], self._deliver, copies, found[1], handle)
        return handle

    def _deliver(self, copies: list[Copy], payload: dict[str, Any], handle: FutureHandle) -> None:
        results = decode_results(payload, copies)
        for copy, result in zip(copies, results, strict=True):
            self._stats.pending_bytes -= copy.source.nbytes
            if result.error is None:
                self._stats.bytes_moved += copy.source.nbytes
        if not handle.future.done():
            handle.future.set_result(results)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the real world's mechanisms looked like (its own outcome, `world`)."""

    fingerprint: str
    bytes_per_token: int
    page_tokens: int
    pages: int
    pool_blocks: int
    max_batch: int
    chunk_tokens: int
    max_context_tokens: int
    shares_decoded: bool


class ReplayWorld:
    """Stands in for the world of a logged run."""

    name = "replay"
    virtual = True
    keeps_tokens = True

    def __init__(self, log: Log, recorder: Recorder):
        self.log = log
        self._recorder = recorder
        self._shape = Shape(**log.setting("world"))
        self.shares_decoded = self._shape.shares_decoded
        self._cost = Padded(**log.setting("calibration"))
        self._link = log.setting("link")
        self._transports: list[Transport] = [
            ReplayTransport("device", lambda a, b: a.node == b.node, log),
            ReplayTransport("local", lambda a, b: True, log),
        ]

    def run(self, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return VirtualLoop().run(main)

    def devices(self) -> list[str]:
        return ["a log"]

    def kv_format(self) -> KVFormat:
        shape = self._shape
        return KVFormat(shape.fingerprint, shape.page_tokens, (KVGroup(bytes_per_token=shape.bytes_per_token),))

    def cost(self) -> CostModel:
        return self._cost

    def link(self) -> tuple[float, float]:
        return self._link["bytes_per_s"], self._link["latency_s"]

    async def prepare(self, instances: list[tuple[str, Role]], report: Callable[[str, float], None]) -> None:
        """Programs that were compiled in mid-run left an event each, which no procedure makes."""
        for call in itertools.count():
            found = self.log.answer("compile", call)
            if found is None:
                return
            time_ns, late = found
            aio.clock().call_at_ns(time_ns, self._compiled, time_ns, late["place"], late["what"])

    def _compiled(self, time_ns: int, place: str, what: str) -> None:
        self._recorder.event(time_ns, "compile", -1, place, detail=what)

    def instance(self, name: str, node: str, role: Role) -> InstanceParts:
        shape = self._shape
        block_bytes = shape.bytes_per_token * shape.page_tokens
        capacity = Capacity(
            shape.pages, shape.page_tokens, block_bytes, shape.max_batch, shape.chunk_tokens, shape.max_context_tokens
        )
        pages = SlotStore(node, Tier.HBM, shape.pages, block_bytes, f"{name}.hbm")
        return InstanceParts(ReplayExecutor(name, capacity, self.log), pages)

    def pool_store(self, node: str) -> SlotStore:
        shape = self._shape
        return SlotStore(node, Tier.DRAM, shape.pool_blocks, shape.bytes_per_token * shape.page_tokens)

    def transports(self) -> list[Transport]:
        return self._transports

    async def remove(self, instance: str) -> None:
        pass

    def figures(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        pass
