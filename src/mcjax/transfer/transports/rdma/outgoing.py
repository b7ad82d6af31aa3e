"""A connection to one peer, from the side that reads and writes: control connection, queue pair, batches under way."""

from __future__ import annotations

import errno
import selectors
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from mcjax.errors import (
    AccessRefused,
    PeerLost,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from mcjax.transfer.transports.rdma.batch import Ask, Batch, Failure, Life
from mcjax.transfer.transports.rdma.completions import Cause, cause_of, status_name
from mcjax.transfer.transports.rdma.greeting import Calling
from mcjax.transfer.transports.rdma.loop import Loop
from mcjax.transfer.transports.rdma.plan import Request
from mcjax.transfer.transports.rdma.queue_pair import Card, CompletionQueue, Place, QueuePair
from mcjax.transfer.transports.rdma.steps import Known, is_tell, life
from mcjax.transfer.transports.rdma.wire import BrokenWire, Message, Wire, number
from mcjax.transfer.transports.secret import Secret

_CHAIN = 16
"""Requests that are handed to the card at once; only the last of them says when it is done."""
_MOST_BYTES = 32 << 20
"""Under way at a time: what comes later waits no longer than these take."""
_MOST_ATTEMPTS = 3
"""So often is a request posted again that others have taken down with them."""
_SEQUENCE_BITS = 40
_KEY_BYTES = 8

Error = Callable[[], TransferError]


class State(Enum):
    CONNECTING = "connecting"
    GREETING = "greeting"
    PAIRING = "pairing"
    READY = "ready"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Mailbox:
    """Where the peer wants the key of a region whose write carries a number: `slots` of 8 bytes, used in turn."""

    address: int
    key: int
    slots: int

    @classmethod
    def of(cls, message: Any) -> Mailbox:
        """Raises `BrokenWire`."""
        if not isinstance(message, dict):
            raise BrokenWire("not a mailbox")
        return cls(*(number(message, name) for name in ("address", "key", "slots")))  # pyright: ignore[reportUnknownArgumentType]


@dataclass(slots=True)
class _Posted:
    sequence: int
    batch: Batch
    request: Request
    nbytes: int


@dataclass(slots=True)
class Home:
    """What connections have of their endpoint. `answered(batch)`: before whoever waits is told."""

    card: Card
    secret: Secret
    loop: Loop
    answered: Callable[[Batch], object]
    gone: Callable[[Outgoing], object]


class Outgoing:
    """On the endpoint's thread only. Whatever happens, every batch that was submitted is answered."""

    def __init__(self, home: Home, address: str):
        self.address = address
        self.state = State.CONNECTING
        self.known: Known = {}
        self._home = home
        self._batches: dict[Batch, Life] = {}
        self._moving: deque[Batch] = deque()
        self._asked: dict[int, Batch] = {}
        self._questions = 0
        self._posted: deque[_Posted] = deque()
        self._posted_bytes = 0
        self._epoch = 0
        self._sequence = 0
        self._told = 0
        self._pair: QueuePair | None = None
        self._mailbox: Mailbox | None = None
        self._completions: CompletionQueue | None = None
        self._keys = np.zeros(home.card.depth, np.uint64)
        self._keys_registration: Any = None
        self._greeting = Calling(home.secret)
        self._wire = Wire(_connecting(address))
        home.loop.watch(self._wire.socket, selectors.EVENT_WRITE, self._on_wire)

    # --- what the endpoint calls

    def submit(self, batch: Batch) -> None:
        self._batches[batch] = life(batch, self.known, self._home.card.limits)
        if self.state in (State.PAIRING, State.READY):
            self._safely(lambda: self._step(batch))

    def expire(self, now_s: float) -> None:
        """Answer what is past its deadline. If the card still has requests of it, these end with their queue pair."""
        late = [batch for batch in self._batches if batch.deadline_s <= now_s]
        self._safely(lambda: self._give_up(late, lambda: TransferTimeout("not there by its deadline")))
        if not self._batches and self.state in (State.CONNECTING, State.GREETING):
            self.fail(lambda: PeerLost("no answer"))

    def withdraw(self, region: Any) -> None:
        """When this returns, the card does not touch the region for us any more."""
        mine = [batch for batch in self._batches if batch.local is region]
        self._safely(lambda: self._give_up(mine, lambda: AccessRefused("the local region was withdrawn")))

    def fail(self, error: Error) -> None:
        """The end of the connection: everything that waits is told."""
        if self.state is State.CLOSED:
            return
        self.state = State.CLOSED
        self._home.gone(self)
        self._home.loop.forget(self._wire.socket)
        self._wire.close()
        self._drop_pair()
        if self._completions is not None:
            self._home.loop.forget(self._completions.descriptor)
            self._completions.close()
        if self._keys_registration is not None:
            self._keys_registration.close()
        self._posted.clear()
        for batch in list(self._batches):
            batch.give_up(error)
            self._finish(batch, {})

    # --- control connection

    def _on_wire(self, events: int) -> None:
        self._safely(lambda: self._wire_ready(events))

    def _wire_ready(self, events: int) -> None:
        if self.state is State.CONNECTING:
            problem = self._wire.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if problem:
                raise BrokenWire(errno.errorcode.get(problem, str(problem)))
            self.state = State.GREETING
            self._greeting.begin(self._wire)
            self._watch()
            return
        if events & selectors.EVENT_WRITE:
            self._wire.flush()
            self._watch()
        if self.state is State.GREETING:
            self._greeting.go_on(self._wire)
            self._watch()
            if not self._greeting.done:
                return
            self._wire.trust()
            self._open()
        if events & selectors.EVENT_READ:
            for message in self._wire.receive():
                self._heard(message)
                if self.state is State.CLOSED:
                    return

    def _send(self, message: Message) -> None:
        self._wire.send(message)
        self._watch()

    def _watch(self) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._wire.has_unsent else 0)
        self._home.loop.watch(self._wire.socket, events, self._on_wire)

    def _heard(self, message: Message) -> None:
        if "paired" in message:
            self._paired(message)
        elif "forget" in message:
            key = number(message, "forget")
            for name in [name for name in self.known if name[0] == key]:
                del self.known[name]
        else:
            batch = self._asked.pop(number(message, "id"), None)
            if batch is not None and not batch.ended:
                self._step(batch, message)

    # --- queue pair

    def _open(self) -> None:
        card = self._home.card
        self._completions = CompletionQueue(card, 4 * card.depth)
        self._home.loop.watch(self._completions.descriptor, selectors.EVENT_READ, self._on_completions)
        access = int(card.verbs.enums.IBV_ACCESS_LOCAL_WRITE)
        self._keys_registration = card.verbs.mr.MR(
            card.domain, self._keys.nbytes, access, address=self._keys.ctypes.data
        )
        self._ask_for_pair()
        for batch in list(self._batches):
            self._step(batch)

    def _ask_for_pair(self) -> None:
        assert self._completions is not None
        self.state = State.PAIRING
        self._epoch += 1
        self._sequence = self._told = 0
        self._pair = QueuePair(self._home.card, self._completions, self._home.card.depth, 1)
        self._send({"do": "pair", "epoch": self._epoch, "place": self._pair.place.message()})

    def _paired(self, message: Message) -> None:
        if number(message, "paired") != self._epoch or self._pair is None:
            return
        if "refused" in message:
            raise TransferError(f"the peer says, {str(message['refused'])[:200]}")
        self._mailbox = Mailbox.of(message.get("mailbox"))
        self._pair.connect(Place.of(message.get("place")))
        self.state = State.READY
        self._pump()

    def _drop_pair(self) -> None:
        if self._pair is not None:
            self._pair.close()
            self._pair = None

    def _replace_pair(self, blame: bool) -> None:
        """A new queue pair here and there. What the card has not done goes to the front again (and `blame` counts)."""
        self._drop_pair()
        for posted in reversed(self._posted):
            batch = posted.batch
            batch.posted -= 1
            posted.request.attempts += blame
            batch.queue.appendleft(posted.request)
            if batch not in self._moving:
                self._moving.append(batch)
        self._posted.clear()
        self._posted_bytes = 0
        self._ask_for_pair()

    # --- batches

    def _step(self, batch: Batch, value: Any = None) -> None:
        """Let a batch go on with what it waited for, until it waits again or has ended."""
        steps = self._batches[batch]
        while True:
            batch.moving = False
            try:
                wanted = steps.send(value)
            except StopIteration as end:
                self._finish(batch, end.value)
                return
            if isinstance(wanted, Ask):
                self._questions += 1
                self._asked[self._questions] = batch
                self._send({"id": self._questions, **batch.question(wanted.what)})
                return
            batch.moving = True
            if batch.queue:
                self._moving.append(batch)
                self._pump()
                return
            value = None

    def _finish(self, batch: Batch, digests: dict[int, bytes]) -> None:
        self._batches.pop(batch).close()
        if batch in self._moving:
            self._moving.remove(batch)
        batch.ended = True
        batch.moving = False
        self._home.answered(batch)
        batch.answer(digests)

    def _give_up(self, batches: list[Batch], error: Error) -> None:
        if any(batch.posted for batch in batches):
            self._take(self._drained())
        batches = [batch for batch in batches if not batch.ended]
        for batch in batches:
            batch.give_up(error)
        if any(batch.posted for batch in batches):
            self._replace_pair(blame=False)
        for batch in batches:
            if not batch.ended:
                batch.queue.clear()
                self._finish(batch, {})

    # --- requests

    def _pump(self) -> None:
        """Hand requests to the card, a chain of each batch in turn, as far as there is room."""
        card = self._home.card
        while self.state is State.READY and self._moving:
            room = card.depth - len(self._posted)
            if not room or self._posted_bytes >= _MOST_BYTES:
                return
            batch = self._moving.popleft()
            if batch.pending.abandoned:
                batch.give_up(lambda: TransferCancelled("given up before it began"))
            self._post(batch, min(room, _CHAIN))
            if batch.queue:
                self._moving.append(batch)
            elif not batch.posted:
                self._step(batch)

    def _post(self, batch: Batch, most: int) -> None:
        chosen: list[Request] = []
        nbytes = 0
        while batch.queue and len(chosen) < most and (not nbytes or self._posted_bytes + nbytes < _MOST_BYTES):
            request = batch.queue.popleft()
            if request.attempts >= _MOST_ATTEMPTS:
                why = f"its queue pair broke {_MOST_ATTEMPTS} times"
                batch.fail(range(request.first, request.last + 1), lambda why=why: PeerLost(why))
                continue
            chosen.append(request)
            nbytes += request.nbytes
        if not chosen:
            return
        for request in chosen:
            self._sequence += 1
            self._posted.append(_Posted(self._sequence, batch, request, request.nbytes))
        # Linked from the last to the first, since each is made with the one that follows it.
        chain: list[Any] = []
        for index in reversed(range(len(chosen))):
            sequence = self._sequence - (len(chosen) - 1 - index)
            chain.append(self._work(batch, chosen[index], sequence, chain[-1] if chain else None))
        batch.posted += len(chosen)
        self._posted_bytes += nbytes
        assert self._pair is not None
        self._pair.post(chain[::-1])

    def _work(self, batch: Batch, request: Request, sequence: int, following: Any) -> Any:
        verbs = self._home.card.verbs
        enums, wr = verbs.enums, verbs.wr
        assert batch.shown is not None
        assert self._pair is not None
        assert self._mailbox is not None
        flags = 0 if following is not None else int(enums.IBV_SEND_SIGNALED)
        number_along = 0
        if is_tell(request):
            row = sequence % len(self._keys)
            self._keys[row] = batch.remote.key
            pieces = [wr.SGE(self._keys[row:].ctypes.data, _KEY_BYTES, self._keys_registration.lkey)]
            nbytes, operation = _KEY_BYTES, enums.IBV_WR_RDMA_WRITE_WITH_IMM
            number_along = batch.notify or 0
            key = self._mailbox.key
            address = self._mailbox.address + _KEY_BYTES * (self._told % self._mailbox.slots)
            self._told += 1
        else:
            base, local_key = batch.local.address, batch.local.local_key
            pieces = [wr.SGE(base + offset, size, local_key) for offset, size in request.pieces]
            nbytes, key, address = request.nbytes, batch.shown.key, batch.shown.address + request.remote
            operation = enums.IBV_WR_RDMA_WRITE if batch.write else enums.IBV_WR_RDMA_READ
        if batch.write and nbytes <= self._pair.inline_bytes:
            flags |= int(enums.IBV_SEND_INLINE)
        work = wr.SendWR(
            wr_id=self._epoch << _SEQUENCE_BITS | sequence,
            num_sge=len(pieces),
            sg=pieces,
            opcode=operation,
            send_flags=flags,
            imm_data=number_along,
            next_wr=following,
        )
        work.set_wr_rdma(key, address)
        return work

    # --- completions

    def _on_completions(self, events: int) -> None:
        self._safely(self._completions_ready)

    def _completions_ready(self) -> None:
        assert self._completions is not None
        self._completions.woken()
        self._take(self._drained())

    def _drained(self) -> list[Any]:
        return self._completions.drain() if self._completions is not None else []

    def _take(self, completions: list[Any]) -> None:
        """What the card says of requests of this queue pair; of earlier ones nobody wants to know any more."""
        success = int(self._home.card.verbs.enums.IBV_WC_SUCCESS)
        touched: dict[Batch, None] = {}
        broken: tuple[_Posted, str] | None = None
        for completion in completions:
            epoch, sequence = completion.wr_id >> _SEQUENCE_BITS, completion.wr_id & ((1 << _SEQUENCE_BITS) - 1)
            if epoch != self._epoch or broken is not None:
                continue
            good = int(completion.status) == success
            # One after the other: whatever was posted before is done.
            while self._posted and self._posted[0].sequence < sequence + good:
                posted = self._unpost()
                posted.batch.done(posted.request)
                touched[posted.batch] = None
            if not good and self._posted:
                broken = self._unpost(), status_name(self._home.card.verbs.enums, int(completion.status))
        if broken is not None:
            self._broke(*broken)
        for batch in touched:
            if batch.moving and not batch.queue and not batch.posted:
                self._step(batch)
        if self.state is State.READY:
            self._pump()

    def _unpost(self) -> _Posted:
        posted = self._posted.popleft()
        posted.batch.posted -= 1
        self._posted_bytes -= posted.nbytes
        return posted

    def _broke(self, failed: _Posted, status: str) -> None:
        """A request failed, and all that were posted after it failed along. It alone is told why."""
        cause = cause_of(status)
        batch = failed.batch
        if cause is Cause.FLUSHED:
            self._posted.appendleft(failed)
            batch.posted += 1
            self._replace_pair(blame=True)
            return
        self._replace_pair(blame=True)
        if batch in self._moving:
            self._moving.remove(batch)
        self._step(batch, Failure(failed.request, status))

    def _safely(self, function: Callable[[], object]) -> None:
        """Whatever goes wrong with this connection ends it, and is told to those who wait for it."""
        try:
            function()
        except BrokenWire as problem:
            why = str(problem)
            self.fail(lambda: PeerLost(f"{self.address}: {why}"))
        except TransferError as problem:
            kind, why = type(problem), problem.problem
            self.fail(lambda: kind(f"{self.address}: {why}"))
        except Exception as problem:
            why = f"{type(problem).__name__}: {problem}"
            self.fail(lambda: TransferError(f"{self.address}: {why}"))


def _connecting(address: str) -> socket.socket:
    """A socket that is about to be connected. Raises `PeerLost` for an address that is none."""
    host, _, port = address.rpartition(":")
    try:
        # Numbers only: the thread may not wait for a name server.
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        family, kind, protocol, _, place = found[0]
        connection = socket.socket(family, kind, protocol)
    except (OSError, ValueError, OverflowError) as problem:
        raise PeerLost(f"no such address, {address} ({problem})") from None
    connection.setblocking(False)
    connection.connect_ex(place)
    return connection
