"""Bytes between processes: an endpoint shows regions of its memory to peers, and reads and writes theirs.

Below the transfer engine's slots and copies, and without an event loop: spans of bytes, answered from any thread.
Each way to move bytes between processes (`shm`, `tcp`, `rdma`, ...) is an `Endpoint`; what it cannot do it says in
its `Capabilities`. One suite of tests holds all of them to what is written here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import AccessRefused, TransferError

Guard = Callable[[int, int, int], bool]
"""`(offset, nbytes, epoch) -> whether the bytes are still what they were in that epoch`. Asked from any thread, before
and after they are touched. A region with a guard takes descriptors of epochs later than its own, too: what knows the
epochs of the bytes (a store) counts further, and whoever speaks for it puts its epoch into the descriptor."""

Notice = Callable[[int, int], object]
"""`(key of the region, the number that came along)`: a peer's write is there. Called from any thread."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a way to move bytes can do. The config is held against it at start; `docs/transfer.md` lists it."""

    read: bool = True
    write: bool = True
    notify: bool = False
    """A write can carry a number that the peer is told of when the bytes are there."""
    checksums: bool = True
    """Gives an XXH3-128 of each span, of the bytes as they arrived."""
    stale: bool = True
    """Refuses a descriptor of an earlier epoch, before and after the copy."""
    guards: bool = True
    """A region can have a guard, which is asked before and after the copy."""
    bounds: bool = True
    """Keys, offsets and lengths are checked before a byte is touched, whatever the descriptor claims."""
    one_sided: bool = False
    """Who reads checks them itself, by what the owner told it, and needs no answer of the owner's: quicker, a stopped
    peer is still read, and a peer that knows the secret is trusted to keep to it."""
    views: bool = False
    """A peer's bytes can be looked at in place (`view`)."""
    abandon: bool = True
    """What was given up and has not begun is not moved."""
    death: bool = True
    """The death of the peer ends what waits for it long before the deadline."""
    stopped: bool = True
    """A peer that stands still (SIGSTOP) costs its caller the deadline, no more."""
    secret: bool = True
    """A peer proves that it knows the secret, or who it is, before it may touch anything."""
    versioned: bool = True
    """Refuses a peer that speaks another version, by name."""
    other_host: bool = True
    process: bool = True
    """Leads to other processes."""
    largest_span_bytes: int = 1 << 40


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """A batch of spans between one local and one remote region: `local`, `remote`: offsets in bytes; `nbytes`. All
    `[n]` int64."""

    local: NDArray[np.int64]
    remote: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, int]]) -> Spans:
        """From `(local offset, remote offset, nbytes)` each."""
        table = np.array(list(rows), np.int64).reshape(-1, 3)
        return cls(*(np.ascontiguousarray(column) for column in table.T))

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum()) if len(self.nbytes) != 1 else self.nbytes.item()

    def outside(self, local_bytes: int, remote_bytes: int) -> NDArray[np.int64]:
        """Indices of spans that are not inside both regions: `[k]`, ascending. Never overflows, whatever they say."""
        bad = (self.nbytes < 1) | (self.local < 0) | (self.remote < 0)
        bad |= (self.local > local_bytes - self.nbytes) | (self.remote > remote_bytes - self.nbytes)
        return np.flatnonzero(bad)


@dataclass(slots=True)
class SpanResults:
    """How each span ended: those that failed by index, and a checksum each where asked (empty for the failed)."""

    errors: dict[int, TransferError] = field(default_factory=dict[int, TransferError])
    checksums: tuple[bytes, ...] = ()


class Pending(Future[SpanResults]):
    """A batch on its way. It is always answered, by results, never by an exception; the latest at its deadline (plus
    what it takes to notice). Until then the mechanism may touch the local region."""

    abandoned = False

    def abandon(self) -> None:
        """Give the batch up: what has not begun ends in `TransferCancelled`."""
        self.abandoned = True


@dataclass(frozen=True, slots=True)
class RegionDescriptor:
    """What a peer must know of a region to read or write it. Plain values: it travels as JSON, over a channel that is
    trusted (it carries the key)."""

    address: str
    """Of the endpoint that shows it."""
    key: int
    """64 random bits: knowing one region's tells nothing of another's."""
    nbytes: int
    epoch: int
    writable: bool = True
    detail: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What one kind of endpoint needs beside (an RDMA key, say)."""
    layout: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """How blocks lie in it (`transfer.layout`), where they are blocks."""

    def to_json(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def from_json(cls, text: str | bytes) -> RegionDescriptor:
        """Raises `AccessRefused` for anything that is not one."""
        try:
            values = json.loads(text)
            kinds = {"address": str, "key": int, "nbytes": int, "epoch": int, "writable": bool}
            kinds |= {"detail": dict, "layout": dict}
            if set(values) != set(kinds) or any(type(values[name]) is not kind for name, kind in kinds.items()):
                raise ValueError("fields are missing, too many, or of another type")
            if values["nbytes"] < 0 or not 0 <= values["key"] < 1 << 64 or values["epoch"] < 0:
                raise ValueError("a negative size or epoch, or a key of more than 64 bits")
        except (ValueError, TypeError, RecursionError) as problem:
            raise AccessRefused(f"not a region descriptor: {problem}") from None
        return cls(**values)


class Exposed(Protocol):
    """A region of this process's memory that an endpoint knows."""

    key: int
    nbytes: int
    buffer: NDArray[np.uint8]
    """`[nbytes]`, contiguous; any alignment."""

    def descriptor(self) -> RegionDescriptor:
        """For peers, as of now."""
        ...

    def advance(self) -> None:
        """What lies here belongs to somebody else now: descriptors given out before are stale."""
        ...


@dataclass(slots=True)
class EndpointStats:
    """Counters since the endpoint was made, of what it asked for itself; `refused` of what peers wrongly asked."""

    bytes_read: int = 0
    bytes_written: int = 0
    spans: int = 0
    errors: int = 0
    refused: int = 0
    in_flight_bytes: int = 0


class Endpoint(Protocol):
    """One process's end of one way to move bytes. Thread-safe; owns its threads; `close` leaves nothing behind."""

    name: str
    """`shm`, `tcp`, ..."""
    capabilities: Capabilities
    address: str
    """What peers connect to; a region's descriptor carries it."""

    def expose(
        self,
        buffer: NDArray[np.uint8],
        *,
        writable: bool = True,
        guard: Guard | None = None,
        layout: Mapping[str, Any] | None = None,
    ) -> Exposed:
        """Make a contiguous buffer known, for own transfers and for peers that are given its descriptor.

        Raises `AccessRefused` for one that this kind of endpoint cannot show.
        """
        ...

    def withdraw(self, exposed: Exposed) -> None:
        """Take a region back. When this returns, nothing touches its buffer any more; what was under way has failed."""
        ...

    def read(
        self,
        local: Exposed,
        remote: RegionDescriptor,
        spans: Spans,
        *,
        deadline_s: float = 60.0,
        checksums: bool = False,
    ) -> Pending:
        """Bring spans of a peer's region into `local`. Answered with `StaleRegion`, `AccessRefused`, `PeerLost`,
        `HandshakeRefused`, `TransferTimeout`, `TransferCancelled`, `TransferError` for each span that failed."""
        ...

    def write(
        self,
        local: Exposed,
        remote: RegionDescriptor,
        spans: Spans,
        *,
        deadline_s: float = 60.0,
        checksums: bool = False,
        notify: int | None = None,
    ) -> Pending:
        """Bring spans of `local` into a peer's region; answered when they are there. `notify` (32 bits): the peer's
        `on_notice` is told, after the last byte."""
        ...

    def on_notice(self, notice: Notice | None) -> None:
        """Whom to tell of peers' writes that carry a number."""
        ...

    def stats(self) -> EndpointStats: ...

    def close(self) -> None:
        """Answer all that is pending, let go of every peer, end every thread. May be called twice."""
        ...


def failed(pending: Pending, count: int, error: Callable[[], TransferError]) -> Pending:
    """Answer a batch of `count` spans that failed as a whole."""
    pending.set_result(SpanResults({index: error() for index in range(count)}, (b"",) * count))
    return pending
