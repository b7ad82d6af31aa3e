"""What transports share whose copies run on another thread: checks, checksums, answers through the clock, the log.

A batch is accepted on the loop's thread, performed on another, and answered by a wake-up of the loop that submitted it.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from mcjax import aio
from mcjax.errors import (
    AccessRefused,
    BlockCorrupt,
    HandshakeRefused,
    PeerLost,
    StaleRegion,
    TierUnavailable,
    TransferCancelled,
    TransferError,
    TransferTimeout,
    Unencodable,
)
from mcjax.transfer.base import Copy, CopyResult, FutureHandle, Memory, TransportStats
from mcjax.types import Recorder

Move = Callable[[Copy], CopyResult]
"""Moves one copy's bytes, on the mechanism's thread; the result has a checksum a block if the copy asks for them."""

_KINDS: dict[str, type[TransferError]] = {
    kind.__name__: kind
    for kind in (
        *(TransferError, StaleRegion, BlockCorrupt, TierUnavailable, Unencodable),
        *(PeerLost, AccessRefused, HandshakeRefused, TransferTimeout, TransferCancelled),
    )
}


def checksum(block: NDArray[Any]) -> bytes:
    """XXH3-128 of a block's bytes (contiguous), 16 bytes."""
    return xxhash.xxh3_128(block).digest()  # pyright: ignore[reportArgumentType]


def convert(block: NDArray[np.uint8], source: Memory, target: Memory) -> NDArray[np.uint8]:
    """What `target` keeps of a block that rests in `source`: `[source.block_bytes]` to `[target.block_bytes]`, the same
    array where both have one encoding. Raises `Unencodable`."""
    if source.packer.name == target.packer.name:
        return block
    return target.packer.pack(source.packer.unpack(block))


def encode_results(results: Sequence[CopyResult]) -> dict[str, Any]:
    """Results as plain JSON values, for the outcome log."""
    return {
        "results": [
            {
                "error": None if result.error is None else result.error.problem,
                "kind": None if result.error is None else type(result.error).__name__,
                "checksums": [digest.hex() for digest in result.checksums],
                **({"converted": [digest.hex() for digest in result.converted]} if result.converted else {}),
            }
            for result in results
        ]
    }


def decode_results(payload: dict[str, Any], copies: Sequence[Copy]) -> list[CopyResult]:
    """The inverse of `encode_results`, for the same copies. Raises `ValueError` if their number differs."""
    rows = payload["results"]
    if len(rows) != len(copies):
        raise ValueError(f"{len(rows)} results were logged for a batch of {len(copies)} copies")
    results: list[CopyResult] = []
    for row, copy in zip(rows, copies, strict=True):
        error = None
        if row["error"] is not None:
            error = _KINDS.get(row["kind"], TransferError)(row["error"], copy.request_id, copy.first_block)
        read, written = row["checksums"], row.get("converted", ())
        results.append(CopyResult(error, tuple(map(bytes.fromhex, read)), tuple(map(bytes.fromhex, written))))
    return results


def failure(copy: Copy, problem: str, kind: type[TransferError] = TransferError) -> CopyResult:
    """A result that says why `copy` did not arrive."""
    return CopyResult(kind(problem, copy.request_id, copy.first_block))


@dataclass(slots=True, eq=False)
class Batch:
    """One submitted batch on its way. `results` is filled in, in order, by the thread that performs it."""

    call: int
    copies: list[Copy]
    refused: list[CopyResult | None]
    handle: FutureHandle
    clock: aio.Clock
    nbytes: int
    results: list[CopyResult]


class ThreadedTransport(ABC):
    """A transport that answers from another thread. A subclass says what it reaches and performs batches."""

    def __init__(self, name: str, recorder: Recorder):
        self.name = name
        self._recorder = recorder
        self._calls = 0
        self._stats = TransportStats()
        self._memories: dict[str, Memory] = {}

    def register(self, memory: Memory) -> None:
        """Make `memory` known. Raises `ValueError` if another one bears its name."""
        if self._memories.setdefault(memory.name, memory) is not memory:
            raise ValueError(f"{self.name}: another memory is registered as {memory.name}")

    def deregister(self, memory: Memory) -> None:
        """Forget `memory`; copies submitted from now on are refused, those under way end as they would."""
        if self.knows(memory):
            del self._memories[memory.name]

    def knows(self, memory: Memory) -> bool:
        """Whether this very memory is registered."""
        return self._memories.get(memory.name) is memory

    def stats(self) -> TransportStats:
        """Counters as of the last answer that reached the loop."""
        return self._stats

    @abstractmethod
    def reaches(self, source: Memory, target: Memory) -> bool: ...

    @abstractmethod
    def _start(self, batch: Batch) -> None:
        """Hand the batch to the thread that performs it (called on the loop's thread)."""

    def submit(self, copies: list[Copy], priority: int = 0) -> FutureHandle:
        """Start a batch. Batches go first come, first served: `priority` is the transfer engine's business."""
        handle = self._new_handle()
        nbytes = sum(copy.source.nbytes for copy in copies)
        refused = [self._check(copy) for copy in copies]
        batch = Batch(self._calls, list(copies), refused, handle, aio.clock(), nbytes, [])
        self._start(batch)
        self._calls += 1
        self._stats.pending_bytes += nbytes
        return handle

    def _new_handle(self) -> FutureHandle:
        return FutureHandle(aio.new_future())

    def _check(self, copy: Copy) -> CopyResult | None:
        """Why a copy cannot be, or None."""
        for memory, slots in ((copy.source.memory, copy.source.slots), (copy.target.memory, copy.target.slots)):
            if not self.knows(memory):
                return failure(copy, f"{memory.name} is not registered with {self.name}")
            outside = [slot for slot in slots if not 0 <= slot < memory.capacity]
            if outside:
                return failure(copy, f"slots {outside[:5]} lie outside {memory.name} (capacity {memory.capacity})")
        source, target = copy.source.memory, copy.target.memory
        if not self.reaches(source, target):
            return failure(copy, f"{self.name} does not reach from {source.name} to {target.name}")
        whole, wanted = source.packer.block_bytes, target.packer.block_bytes
        if whole != wanted:
            return failure(copy, f"blocks of {whole} bytes do not fit slots of {wanted}")
        if len(copy.source.slots) != len(copy.target.slots):
            return failure(copy, f"{len(copy.source.slots)} source slots, {len(copy.target.slots)} target slots")
        return None

    def _perform(self, batch: Batch, index: int, move: Move) -> None:
        """Copy number `index` of the batch, on the mechanism's thread; its result is appended."""
        batch.results.append(batch.refused[index] or _guarded(batch, batch.copies[index], move))

    def _answer(self, batch: Batch) -> None:
        """Tell the loop. Thread-safe; called once, when every copy has its result."""
        # A closed loop refuses the post: then nobody is left to be told.
        with contextlib.suppress(RuntimeError):
            batch.clock.post(self._deliver, batch)

    def _deliver(self, batch: Batch) -> None:
        stats = self._stats
        stats.pending_bytes -= batch.nbytes
        for copy, result in zip(batch.copies, batch.results, strict=True):
            stats.copies += 1
            if result.error is None:
                stats.bytes_moved += copy.source.nbytes
            else:
                stats.errors += 1
        self._recorder.outcome(batch.clock.now_ns(), self.name, batch.call, encode_results(batch.results))
        if not batch.handle.future.done():
            batch.handle.future.set_result(batch.results)


def _guarded(batch: Batch, copy: Copy, move: Move) -> CopyResult:
    """Move one copy between two looks at the generations of both sides."""
    if batch.handle.cancelled:
        return failure(copy, "cancelled before it began")
    changed = stale(copy)
    if changed:
        return failure(copy, f"{changed} changed hands before the copy", StaleRegion)
    try:
        result = move(copy)
    except Unencodable as problem:  # whose block it was is known here
        return failure(copy, problem.problem, Unencodable)
    except TransferError as problem:
        return CopyResult(problem)
    except Exception as problem:  # whatever went wrong must reach whoever waits, as a typed error
        return failure(copy, f"{type(problem).__name__}: {problem}")
    changed = stale(copy)
    if changed:
        return failure(copy, f"{changed} changed hands during the copy; what arrived must not be used", StaleRegion)
    return result


def stale(copy: Copy) -> str:
    """Name of the memory whose slots have a new owner, or nothing."""
    for region in (copy.source, copy.target):
        if not region.is_current():
            return region.memory.name
    return ""
