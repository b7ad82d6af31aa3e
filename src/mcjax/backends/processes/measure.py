"""What estimates need to know of workers: the cost of their steps, and how fast one reads from another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from mcjax.backends.processes.member import Member
from mcjax.backends.processes.stores import RemoteStore
from mcjax.backends.processes.transports import OrderedTransport
from mcjax.cost.padded import Padded
from mcjax.errors import StoreError
from mcjax.transfer.base import Copy
from mcjax.types import Role

LINK_BYTES, REPEATS = 16 << 20, 3


async def calibrate(members: Sequence[Member]) -> Padded:
    """Time chunks and steps on one worker of each kind, one after the other: side by side they would be in each
    other's way."""
    prefill = next(member for member in members if member.role is not Role.DECODE)
    decode = next(member for member in members if member.role is not Role.PREFILL)
    chunk_ns = await prefill.ask("measure")
    return Padded(**await decode.ask("measure", {"chunk_ns": chunk_ns}))


async def read_speed(quiet: OrderedTransport, source: RemoteStore, target: RemoteStore) -> tuple[float, float]:
    """Bytes a second of many blocks that go from store to store, and seconds that one takes beyond that. Nobody owns a
    slot of either yet.

    Raises `StoreError` if they do not arrive.
    """
    for store in (source, target):
        quiet.register(store)
    count = max(1, min(source.capacity, target.capacity, LINK_BYTES // source.block_bytes))
    slots = source.reserve(count), target.reserve(count)

    async def seconds(blocks: int) -> float:
        best = float("inf")
        for _ in range(REPEATS):
            copy = Copy(source.regions(slots[0][:blocks]), target.regions(slots[1][:blocks]))
            start_s = time.perf_counter()
            answered: asyncio.Future[Any] = quiet.submit([copy]).future
            (result,) = await answered
            if result.error is not None:
                problem = f"{target.node} cannot read from {source.node} by {quiet.name}: {result.error.problem}"
                raise StoreError(f"{problem}; check launcher.transport, launcher.host and launcher.command")
            best = min(best, time.perf_counter() - start_s)
        return best

    whole_s, one_s = await seconds(count), await seconds(1)
    for store, own in zip((source, target), slots, strict=True):
        store.free(own)
    bytes_per_s = count * source.block_bytes / whole_s
    return bytes_per_s, max(0.0, one_s - source.block_bytes / bytes_per_s)
