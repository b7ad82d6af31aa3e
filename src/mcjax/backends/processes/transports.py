"""Copies between memories that lie in workers: each is an order to the worker that it happens in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mcjax.backends.processes.channel import Channel
from mcjax.backends.processes.frames import Message
from mcjax.backends.processes.stores import RemoteStore
from mcjax.errors import PeerLost, StaleRegion
from mcjax.transfer.base import Copy, CopyResult, FutureHandle, Memory, Rail
from mcjax.transfer.transports.local import PACING
from mcjax.transfer.transports.threaded import Batch, ThreadedTransport, decode_results, failure, stale
from mcjax.types import Recorder, Tier

Reaches = Callable[[Memory, Memory], bool]


def inside_a_node(source: Memory, target: Memory) -> bool:
    """Between the pages of an instance and its node's host memory, or from page to page."""
    return source.node == target.node and Tier.HBM in (source.tier, target.tier)


def between_hosts(source: Memory, target: Memory) -> bool:
    """From the host memory of one node to that of another."""
    return source.tier is Tier.DRAM is target.tier


class OrderedTransport(ThreadedTransport):
    """The *receiving* node's worker moves the bytes: it reads where they lie, and writes to its own memory only.

    A copy is answered when that worker has answered, or is gone; until then the slots of both sides are held. What a
    dead worker had been about to write is gone with its memory.
    """

    def __init__(self, name: str, recorder: Recorder, channels: Mapping[str, Channel], reaches: Reaches):
        """`channels`: to the workers, by node; it may grow."""
        super().__init__(name, recorder)
        self._channels = channels
        self._reaches = reaches

    def reaches(self, source: Memory, target: Memory) -> bool:
        known = self.knows(source) and self.knows(target)
        ours = isinstance(source, RemoteStore) and isinstance(target, RemoteStore)
        return known and ours and self._reaches(source, target)

    def _start(self, batch: Batch) -> None:
        gathered = _Gathered(batch, self._answer)
        for index, copy in enumerate(batch.copies):
            refused = batch.refused[index]
            changed = "" if refused is not None else stale(copy)
            if refused is None and changed:
                refused = failure(copy, f"{changed} changed hands before the copy", StaleRegion)
            if refused is not None:
                gathered.put(index, refused)
                continue
            channel = self._channels[copy.target.memory.node]
            channel.ask("copy", _order(copy), partial(_answered, gathered, index, copy))
        gathered.put(-1, None)


class BetweenNodes(OrderedTransport):
    """From the host memory of one node to that of another. Copies wait in the engine, by class; those to each node for
    themselves, so that a worker that stands still holds up nobody else's."""

    pacing = PACING

    def __init__(self, name: str, recorder: Recorder, channels: Mapping[str, Channel]):
        super().__init__(name, recorder, channels, between_hosts)

    def rails(self, source: Memory, target: Memory) -> Sequence[Rail]:
        """See `RailedTransport`."""
        return (Rail(remote=target.node),)

    def submit(self, copies: list[Copy], priority: int = 0, rail: Rail | None = None) -> FutureHandle:
        """Start a batch; there is one rail only."""
        return super().submit(copies, priority)


def _order(copy: Copy) -> dict[str, Any]:
    return {
        "source": [copy.source.memory.node, copy.source.memory.tier.value, list(copy.source.slots)],
        "target": [copy.target.memory.tier.value, list(copy.target.slots)],
        "checksum": copy.checksum,
    }


def _answered(gathered: _Gathered, index: int, copy: Copy, message: Message | None) -> None:
    """On the channel's thread."""
    if message is None:
        gathered.put(index, failure(copy, f"the worker of {copy.target.memory.node} is gone", PeerLost))
        return
    (result,) = decode_results(dict(message.values["answer"]), [copy])
    changed = "" if result.error is not None else stale(copy)
    if changed:
        result = failure(copy, f"{changed} changed hands during the copy; what arrived must not be used", StaleRegion)
    gathered.put(index, result)


class _Gathered:
    """Results of one batch, from several threads; the last one answers it."""

    def __init__(self, batch: Batch, answer: Callable[[Batch], None]):
        self._batch = batch
        self._answer = answer
        self._lock = threading.Lock()
        self._results: dict[int, CopyResult] = {}
        self._started = False

    def put(self, index: int, result: CopyResult | None) -> None:
        """The result of a copy; None says that all are on their way."""
        with self._lock:
            if result is None:
                self._started = True
            else:
                self._results[index] = result
            if not self._started or len(self._results) < len(self._batch.copies):
                return
            self._batch.results.extend(self._results[place] for place in range(len(self._batch.copies)))
        self._answer(self._batch)
