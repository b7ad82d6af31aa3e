"""A batch on its way to one peer: what is left of it, and what became of its spans."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import TransferError
from mcjax.transfer.transports.endpoint import Pending, RegionDescriptor, SpanResults, Spans
from mcjax.transfer.transports.rdma.memory import Region
from mcjax.transfer.transports.rdma.plan import Request
from mcjax.transfer.transports.rdma.wire import BrokenWire, Message, number


@dataclass(frozen=True, slots=True)
class Ask:
    """A question to the peer about the batch's region: `look`, `check` or `digest`, the latter two about its spans."""

    what: str


@dataclass(frozen=True, slots=True)
class Move:
    """Have the queued requests done. Answered with None, or with the `Failure` of one of them."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that the card gave up, and the name of the status."""

    request: Request
    status: str


Life = Generator[Ask | Move, Any, dict[int, bytes]]
"""What a batch waits for, step by step; in the end, checksums by span."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What the owner tells of a region: where it begins, the key for the card, and whether it has to be asked (a guard)
    before and after."""

    address: int
    key: int
    guarded: bool

    @classmethod
    def of(cls, message: Any) -> Shown:
        """Raises `BrokenWire`."""
        if not isinstance(message, dict):
            raise BrokenWire("not a region")
        values = cast(Message, message)
        return cls(number(values, "address"), number(values, "key", (1 << 32) - 1), values.get("guarded") is True)


@dataclass(slots=True, eq=False)
class Batch:
    """`left`: how many requests each span still waits for `[n]`; `deadline_s` as `time.monotonic` counts."""

    write: bool
    local: Region
    remote: RegionDescriptor
    spans: Spans
    pending: Pending
    deadline_s: float
    checksums: bool
    notify: int | None
    errors: dict[int, TransferError] = field(default_factory=dict[int, TransferError])
    queue: deque[Request] = field(default_factory=deque[Request])
    posted: int = 0
    """Requests that the card has."""
    moving: bool = False
    """Waits for its requests, those queued and those posted."""
    asked: list[int] = field(default_factory=list[int])
    """Indices of the spans that the last question was about."""
    attempts: int = 0
    shown: Shown | None = None
    ended: bool = False
    left: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.left = np.ones(len(self.spans), np.int64)

    def question(self, what: str) -> Message:
        """For the owner: which region, what it is taken for, and which spans of it."""
        remote, message = self.remote, {"do": what}
        about = {"key": remote.key, "nbytes": remote.nbytes, "epoch": remote.epoch, "write": self.write}
        if what != "look":
            self.asked = self.open_spans()
            rows = np.stack([self.spans.remote, self.spans.nbytes], 1)[self.asked]
            about["spans"] = rows.tolist()
        return message | about

    def open_spans(self) -> list[int]:
        """Indices of spans that have not failed, ascending."""
        return [index for index in range(len(self.spans)) if index not in self.errors]

    def fail(self, indices: Iterable[int], error: Callable[[], TransferError]) -> None:
        """Only the first error of a span counts."""
        for index in indices:
            if index not in self.errors:
                self.errors[index] = error()

    def fail_all(self, error: Callable[[], TransferError]) -> None:
        self.queue.clear()
        self.fail(range(len(self.spans)), error)

    def give_up(self, error: Callable[[], TransferError]) -> None:
        """Nothing more will be moved, asked or told: spans that are there already stay good, if nothing but their bytes
        was asked for."""
        plain = not self.checksums and self.notify is None and not (self.shown is not None and self.shown.guarded)
        if plain:
            self.queue.clear()
            self.fail([int(index) for index in np.flatnonzero(self.left)], error)
        else:
            self.fail_all(error)

    def done(self, request: Request) -> None:
        """The request completed."""
        self.left[request.first : request.last + 1] -= 1

    def moved_bytes(self) -> int:
        """Of the spans that have not failed."""
        return int(self.spans.nbytes[self.open_spans()].sum())

    def answer(self, digests: dict[int, bytes]) -> None:
        sums: tuple[bytes, ...] = ()
        if self.checksums:
            sums = tuple(b"" if i in self.errors else digests.get(i, b"") for i in range(len(self.spans)))
        self.pending.set_result(SpanResults(self.errors, sums))
