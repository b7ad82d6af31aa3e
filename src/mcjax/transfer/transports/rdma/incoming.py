"""A connection from one peer, from the side whose memory is read and written: it answers questions, and hears of writes
that carry a number. The reading and writing itself is between the peer's card and this one's."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from mcjax.errors import AccessRefused, HandshakeRefused, StaleRegion, TransferError
from mcjax.transfer.transports.endpoint import EndpointStats, Notice
from mcjax.transfer.transports.rdma.greeting import Called
from mcjax.transfer.transports.rdma.loop import Loop
from mcjax.transfer.transports.rdma.memory import Region
from mcjax.transfer.transports.rdma.queue_pair import Card, CompletionQueue, Place, QueuePair
from mcjax.transfer.transports.rdma.steps import KINDS
from mcjax.transfer.transports.rdma.wire import BrokenWire, Message, Wire, number
from mcjax.transfer.transports.secret import Secret
from mcjax.transfer.transports.threaded import checksum

_RECEIVES = 64
"""Writes with a number that may arrive before this thread has looked."""
_SLOTS = 2 * _RECEIVES
_SLOT_BYTES = 8
_EPOCH_BITS = 40
Span = tuple[int, int]


@dataclass(slots=True)
class Host:
    """What connections have of the endpoint that they came to."""

    card: Card
    secret: Secret
    loop: Loop
    regions: dict[int, Region]
    stats: EndpointStats
    notice: Callable[[], Notice | None]
    gone: Callable[[Incoming], object]


class Incoming:
    """On the endpoint's thread only. `deadline_s`: until when the peer must have proved that it knows the secret."""

    def __init__(self, host: Host, connection: socket.socket, deadline_s: float):
        self.deadline_s = deadline_s
        self._host = host
        self._greeting = Called(host.secret)
        self._wire = Wire(connection)
        self._pair: QueuePair | None = None
        self._epoch = 0
        self._told = 0
        self._completions: CompletionQueue | None = None
        self._mailbox = np.zeros(_SLOTS, np.uint64)
        self._mailbox_registration: Any = None
        self._closed = False
        host.loop.watch(connection, selectors.EVENT_READ, self._on_wire)

    @property
    def proved(self) -> bool:
        return self._greeting.done

    def forget(self, key: int) -> None:
        """The peer need not come with what it was told of this region any more."""
        if self.proved:
            self._safely(lambda: self._send({"forget": key}))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._host.gone(self)
        self._host.loop.forget(self._wire.socket)
        self._wire.close()
        if self._pair is not None:
            self._pair.close()
        if self._completions is not None:
            self._host.loop.forget(self._completions.descriptor)
            self._completions.close()
        if self._mailbox_registration is not None:
            self._mailbox_registration.close()

    # --- control connection

    def _on_wire(self, events: int) -> None:
        self._safely(lambda: self._wire_ready(events))

    def _wire_ready(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._wire.flush()
            self._watch()
        if not self.proved:
            self._greeting.go_on(self._wire)
            self._watch()
            if not self.proved:
                return
            self._wire.trust()
        if events & selectors.EVENT_READ:
            for message in self._wire.receive():
                if not self._closed:
                    self._heard(message)

    def _safely(self, function: Callable[[], object]) -> None:
        try:
            function()
        except Exception as problem:
            # Nobody waits here: the peer learns it by the end of the connection. Only lies are counted.
            self._host.stats.refused += isinstance(problem, HandshakeRefused | BrokenWire) and not self.proved
            self.close()

    def _send(self, message: Message) -> None:
        self._wire.send(message)
        self._watch()

    def _watch(self) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._wire.has_unsent else 0)
        self._host.loop.watch(self._wire.socket, events, self._on_wire)

    def _heard(self, message: Message) -> None:
        what = message.get("do")
        if what == "pair":
            self._send({"paired": number(message, "epoch"), **self._paired(message)})
        elif what in ("look", "check", "digest"):
            self._send({"id": number(message, "id"), **self._answer(what, message)})
        else:
            raise BrokenWire("an unknown question")

    # --- questions about regions

    def _answer(self, what: str, message: Message) -> Message:
        try:
            region, epoch, spans = self._examined(message)
            if what == "look":
                key = region.remote_key(epoch)
                shown = {"address": region.address, "key": key, "guarded": region.guard is not None}
                return {"shown": shown}
        except TransferError as problem:
            self._host.stats.refused += 1
            return {"refused": _refusal(problem)}
        errors: list[tuple[int, str, str]] = []
        digests: list[str] = []
        for position, (offset, nbytes) in enumerate(spans):
            try:
                _judge(region, epoch, offset, nbytes)
                if what == "digest":
                    digests.append(checksum(region.buffer[offset : offset + nbytes]).hex())
            except TransferError as problem:
                errors.append((position, *_refusal(problem)))
                digests.append("")
        self._host.stats.refused += len(errors)
        return {"errors": errors, "digests": digests} if what == "digest" else {"errors": errors}

    def _examined(self, message: Message) -> tuple[Region, int, list[Span]]:
        """Region, epoch and spans that a question is about. Raises `AccessRefused` or `StaleRegion` for what the peer
        may not touch, `BrokenWire` for what is no question."""
        region = self._host.regions.get(number(message, "key"))
        if region is None:
            raise AccessRefused("no region has this key")
        if number(message, "nbytes") != region.nbytes:
            raise AccessRefused("the region has another size")
        if message.get("write") is not False and not region.writable:
            raise AccessRefused("the region is not writable")
        epoch = number(message, "epoch")
        region.judge(epoch)
        return region, epoch, _spans(message.get("spans", []))

    # --- queue pair

    def _paired(self, message: Message) -> Message:
        """A queue pair for the peer's, instead of an earlier one. What that one had told is heard before."""
        card = self._host.card
        if self._completions is None:
            self._open()
        assert self._completions is not None
        self._hear_notices()
        if self._pair is not None:
            self._pair.close()
        self._epoch = number(message, "epoch", (1 << 24) - 1)
        self._told = 0
        other = Place.of(message.get("place"))
        self._pair = QueuePair(card, self._completions, 1, _RECEIVES)
        try:
            for _ in range(_RECEIVES):
                self._receive()
            self._pair.connect(other)
        except card.verbs.error as problem:
            return {"refused": f"the queue pair does not connect ({problem})"}
        address = self._mailbox.ctypes.data
        mailbox = {"address": address, "key": self._mailbox_registration.rkey, "slots": _SLOTS}
        return {"place": self._pair.place.message(), "mailbox": mailbox}

    def _open(self) -> None:
        card = self._host.card
        enums = card.verbs.enums
        self._completions = CompletionQueue(card, 4 * _RECEIVES)
        access = int(enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE)
        address, nbytes = self._mailbox.ctypes.data, self._mailbox.nbytes
        self._mailbox_registration = card.verbs.mr.MR(card.domain, nbytes, access, address=address)
        self._host.loop.watch(self._completions.descriptor, selectors.EVENT_READ, self._on_completions)

    def _receive(self) -> None:
        """A number brings no bytes, but pyverbs wants a place for some."""
        wr = self._host.card.verbs.wr
        place = wr.SGE(self._mailbox.ctypes.data, _SLOT_BYTES, self._mailbox_registration.lkey)
        assert self._pair is not None
        self._pair.receive(wr.RecvWR(wr_id=self._epoch << _EPOCH_BITS, num_sge=1, sg=[place]))

    def _on_completions(self, events: int) -> None:
        def ready() -> None:
            assert self._completions is not None
            self._completions.woken()
            self._hear_notices()

        self._safely(ready)

    def _hear_notices(self) -> None:
        assert self._completions is not None
        enums = self._host.card.verbs.enums
        for completion in self._completions.drain():
            if completion.wr_id >> _EPOCH_BITS != self._epoch or completion.status != enums.IBV_WC_SUCCESS:
                continue
            key = int(self._mailbox[self._told % _SLOTS])
            self._told += 1
            self._receive()
            if completion.opcode == enums.IBV_WC_RECV_RDMA_WITH_IMM:
                self._tell(key, int(completion.imm_data))

    def _tell(self, key: int, along: int) -> None:
        region = self._host.regions.get(key)
        if region is None or not region.writable:
            self._host.stats.refused += 1
            return
        notice = self._host.notice()
        if notice is not None:
            notice(key, along)


def _judge(region: Region, epoch: int, offset: int, nbytes: int) -> None:
    if nbytes < 1 or offset < 0 or offset + nbytes > region.nbytes:
        raise AccessRefused("outside the region")
    if region.guard is not None and not region.guard(offset, nbytes, epoch):
        raise StaleRegion("the bytes changed hands")


def _refusal(problem: TransferError) -> tuple[str, str]:
    kind = next((name for name, kind in KINDS.items() if isinstance(problem, kind)), "other")
    return kind, problem.problem


def _spans(rows: Any) -> list[Span]:
    """Offset and length each. Raises `BrokenWire` for anything else."""
    if not isinstance(rows, list):
        raise BrokenWire("not a list of spans")
    for row in cast("list[Any]", rows):
        if not isinstance(row, list) or [type(value) for value in cast("list[Any]", row)] != [int, int]:
            raise BrokenWire("not a span")
    return [(row[0], row[1]) for row in cast("list[list[int]]", rows)]
