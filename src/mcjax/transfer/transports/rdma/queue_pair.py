"""The card, completion queues and queue pairs: pyverbs' objects, in the order in which they must be made and closed."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from mcjax.errors import ConfigError, TransferError
from mcjax.transfer.transports.rdma import device as devices
from mcjax.transfer.transports.rdma.library import Verbs, device_names
from mcjax.transfer.transports.rdma.plan import Limits
from mcjax.transfer.transports.rdma.wire import BrokenWire, Message, number, text

_MOST_REQUESTS = 128
_MOST_PIECES = 16
_MOST_READS = 16
_INLINE_BYTES = 64
_RECEIVE_TIMER = 12  # 0.64 ms until a peer without a posted receive is tried again
_ACK_TIMEOUT = 16  # 4.096 us * 2^16 = 0.27 s
_RETRIES = 6  # soft-RoCE takes 7 for endlessly, which verbs say only of receives that are not posted
_ENDLESSLY = 7
_HOPS = 64
_SLICE_BYTES = 4 << 20

# pyverbs does not tell a channel's descriptor, so it is found among the new ones; two threads must not look at once.
_FINDING = threading.Lock()
_CHANNEL = "anon_inode:[infinibandevent]"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a queue pair can be reached, as its owner tells it: its number and first sequence number, the port's GID
    and LID (InfiniBand), the largest packet (verbs' number for it), and how many reads it answers at once."""

    number: int
    sequence: int
    gid: str
    lid: int
    mtu: int
    reads: int

    def message(self) -> Message:
        return asdict(self)

    @classmethod
    def of(cls, message: Any) -> Place:
        """Raises `BrokenWire` for what is none."""
        if not isinstance(message, dict):
            raise BrokenWire("not the place of a queue pair")
        values = cast(Message, message)
        try:
            gid = ipaddress.IPv6Address(text(values, "gid")).exploded
        except ValueError:
            raise BrokenWire("not a GID") from None
        short = {name: number(values, name, (1 << 24) - 1) for name in ("number", "sequence")}
        mtu = number(values, "mtu", 5)
        return cls(**short, gid=gid, lid=number(values, "lid", 0xFFFF), mtu=mtu, reads=number(values, "reads", 255))


class Card:
    """An opened device with one protection domain, and what it can."""

    def __init__(self, verbs: Verbs, device: str | None, gid_index: int | None, port: int):
        self.gid = devices.choose(device_names(verbs), device, gid_index, port)
        self.numa_node = devices.numa_node(self.gid.device)
        self.port = port
        self.verbs = verbs
        try:
            self.context = verbs.device.Context(name=self.gid.device)
        except verbs.error as problem:
            raise ConfigError("device", self.gid.device, f"cannot be opened ({problem})") from None
        self.domain = verbs.pd.PD(self.context)
        about = self.context.query_device()
        self._port_about = self.context.query_port(port)
        self.depth = min(_MOST_REQUESTS, about.max_qp_wr)
        self.reads_asked = min(_MOST_READS, about.max_qp_init_rd_atom)
        self.reads_answered = min(_MOST_READS, about.max_qp_rd_atom)
        pieces = min(_MOST_PIECES, about.max_sge, about.max_sge_rd or about.max_sge)
        self.limits = Limits(pieces, min(_SLICE_BYTES, self._port_about.max_msg_sz))

    @property
    def mtu(self) -> int:
        return int(self._port_about.active_mtu)

    @property
    def lid(self) -> int:
        return int(self._port_about.lid)

    def close(self) -> None:
        self.domain.close()
        self.context.close()


class CompletionQueue:
    """A queue with a channel of its own, whose `descriptor` is readable when completions are there."""

    def __init__(self, card: Card, entries: int):
        self._channel, self.descriptor = _channel(card)
        self.queue = card.verbs.cq.CQ(card.context, entries, None, self._channel, 0)
        self.queue.req_notify()

    def woken(self) -> None:
        """Take the event from the channel, and ask for the next one before looking, so that none is missed."""
        self._channel.get_cq_event(self.queue)
        self.queue.ack_events(1)
        self.queue.req_notify()

    def drain(self) -> list[Any]:
        """Work completions that are there, in order."""
        drained: list[Any] = []
        while True:
            count, some = self.queue.poll(32)
            drained += some
            if not count:
                return drained

    def close(self) -> None:
        self.queue.close()
        self._channel.close()


def _channel(card: Card) -> tuple[Any, int]:
    with _FINDING:
        for _ in range(100):
            before = _channels()
            channel = card.verbs.cq.CompChannel(card.context)
            new = _channels() - before
            if len(new) == 1:
                (descriptor,) = new
                os.set_blocking(descriptor, False)
                return channel, descriptor
            # Another library of this process made one at the same time.
            channel.close()
    raise TransferError("the completion channel's descriptor cannot be told from others")


def _channels() -> set[int]:
    found: set[int] = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == _CHANNEL:
                found.add(int(name))
    return found


class QueuePair:
    """A reliable connection's end. Made in the state in which it can be told to a peer; `connect` makes it work."""

    def __init__(self, card: Card, completions: CompletionQueue, sends: int, receives: int):
        verbs = card.verbs
        enums = verbs.enums
        self._card = card
        self.inline_bytes, self._pair = _created(card, completions, sends, receives)
        attributes = verbs.qp.QPAttr(port_num=card.port)
        attributes.pkey_index = 0
        attributes.qp_access_flags = int(enums.IBV_ACCESS_REMOTE_READ | enums.IBV_ACCESS_REMOTE_WRITE)
        self._pair.to_init(attributes)
        sequence = secrets.randbits(24)
        self.place = Place(self._pair.qp_num, sequence, card.gid.value, card.lid, card.mtu, card.reads_answered)

    def connect(self, other: Place) -> None:
        verbs, card = self._card.verbs, self._card
        route = verbs.addr.GlobalRoute(dgid=verbs.addr.GID(other.gid), sgid_index=card.gid.index, hop_limit=_HOPS)
        attributes = verbs.qp.QPAttr(port_num=card.port)
        attributes.ah_attr = verbs.addr.AHAttr(gr=route, is_global=1, port_num=card.port, dlid=other.lid)
        attributes.dest_qp_num = other.number
        attributes.path_mtu = min(card.mtu, other.mtu)
        attributes.rq_psn = other.sequence
        attributes.max_dest_rd_atomic = card.reads_answered
        attributes.min_rnr_timer = _RECEIVE_TIMER
        self._pair.to_rtr(attributes)
        attributes.sq_psn = self.place.sequence
        attributes.timeout = _ACK_TIMEOUT
        attributes.retry_cnt = _RETRIES
        attributes.rnr_retry = _ENDLESSLY
        attributes.max_rd_atomic = min(card.reads_asked, other.reads)
        self._pair.to_rts(attributes)

    def post(self, chain: Sequence[Any]) -> None:
        """Requests, linked first to last. pyverbs keeps no reference from one to the next: the caller's list does."""
        self._pair.post_send(chain[0])

    def receive(self, request: Any) -> None:
        self._pair.post_recv(request)

    def close(self) -> None:
        """When this returns, the card does nothing for it any more."""
        self._pair.close()


def _created(card: Card, completions: CompletionQueue, sends: int, receives: int) -> tuple[int, Any]:
    """How many bytes can go inline, and the pair. A card that takes no data inline gets none."""
    verbs = card.verbs
    for inline_bytes in (_INLINE_BYTES, 0):
        capacities = verbs.qp.QPCap(
            max_send_wr=sends,
            max_recv_wr=receives,
            max_send_sge=card.limits.pieces,
            max_recv_sge=1,
            max_inline_data=inline_bytes,
        )
        wanted = verbs.qp.QPInitAttr(
            qp_type=verbs.enums.IBV_QPT_RC, cap=capacities, scq=completions.queue, rcq=completions.queue, sq_sig_all=0
        )
        try:
            return inline_bytes, verbs.qp.QP(card.domain, wanted)
        except verbs.error as problem:
            refused = problem
    raise TransferError(f"the card makes no queue pair ({refused})")
