"""Replicas of spans in different fault domains: made, kept, restored after a loss, and let go.

Which spans are worth it is somebody else's decision (`want`, `forget`). One copy is under way at a time, that of the
most urgent span. It goes in pieces, so that a more urgent one need not wait long, and what has arrived stays when a
node is lost in the middle.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mcjax import aio
from mcjax.engine.node import Node
from mcjax.errors import BlockCorrupt, ConfigError, InstanceDown, LeaseLost, PoolFull, TransferError
from mcjax.kvpool.holds import Pin
from mcjax.sched.conductor import Conductor
from mcjax.sched.replicas import Site, elsewhere, least_loaded, surplus
from mcjax.transfer.base import Copy
from mcjax.types import NS_PER_S, BlockId, Recorder

OWNER = -1
"""Replicas are held for no request."""

PRIORITY = -1
"""Of their copies: behind those that requests wait for."""


@dataclass(frozen=True, slots=True)
class ReplicationSettings:
    """Bounds of the procedure."""

    bytes_per_s: float | None = None  # what all copies together may take of the network; None: no bound
    piece_blocks: int = 16  # blocks that are copied at once
    retry_s: float = 0.1  # pause before a copy that failed is tried again
    look_s: float = 1.0  # how often replicas are looked after, for what was lost without a death

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "piece_blocks", "retry_s", "look_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"replication.{name}", value, "must be more than 0")


class Shortfall(enum.StrEnum):
    """Why a span has fewer replicas than wanted, and nothing can be done about it now."""

    NO_SOURCE = "nobody holds it"
    NO_DOMAIN = "there is no further fault domain"
    NO_ROOM = "no pool of a further fault domain has room"
    FAILING = "copies fail"


@dataclass(frozen=True, slots=True)
class Standing:
    """How a span stands: replicas wanted, the nodes that have whole ones, and what is in the way of more.

    Without a shortfall there are enough, or a copy is under way.
    """

    wanted: int
    nodes: tuple[str, ...]
    shortfall: Shortfall | None = None


@dataclass(slots=True, eq=False)
class _Replica:
    """The first `blocks` of a span on a node, pinned there."""

    node: Node
    made: bool
    """Copied by us; else it was there."""
    pin: Pin | None = None
    blocks: int = 0

    @property
    def sound(self) -> bool:
        """False once the node, or a block, is lost."""
        if not self.node.alive:
            return False
        pin = self.pin
        return pin is None or not (pin.lost or pin.released or (pin.deepest is not None and pin.deepest.detached))


@dataclass(slots=True, eq=False)
class _Want:
    span: tuple[BlockId, ...]
    copies: int
    priority: int
    replicas: dict[str, _Replica] = field(default_factory=dict[str, _Replica])
    shortfall: Shortfall | None = None
    due_ns: int = 0
    """When to look at it again."""
    full_ns: dict[str, int] = field(default_factory=dict[str, int])
    """Nodes that had no room, until when they are left alone."""

    def whole(self) -> list[_Replica]:
        return [replica for replica in self.replicas.values() if replica.blocks == len(self.span)]

    def enough(self, live: Sequence[str]) -> bool:
        """Whether just what is wanted is there, on nodes that stay."""
        whole = [replica for replica in self.whole() if replica.node.name in live]
        return len(whole) == len(self.replicas) == self.copies


class Replicator:
    """One a cluster. It pins what it keeps, so replicas are not evicted."""

    def __init__(
        self,
        nodes: Mapping[str, Node],
        conductor: Conductor,
        recorder: Recorder,
        scope: aio.Scope,
        settings: ReplicationSettings = ReplicationSettings(),
    ):
        self._nodes = nodes
        self._conductor = conductor
        self._recorder = recorder
        self._scope = scope
        self._settings = settings
        self._bucket = aio.TokenBucket(settings.bytes_per_s)
        self._wants: dict[BlockId, _Want] = {}
        """By the last block, which names the whole chain."""
        self._changed = aio.Signal("replication")
        self._running = False

    # What others ask

    def want(self, span: Sequence[BlockId], copies: int, priority: int = 0) -> None:
        """Keep `copies` replicas of a chain (from its start), each in a fault domain of its own. Asking again changes
        number and priority; fewer copies drop what is too many at once.

        Raises `ValueError` for an empty chain or less than one copy.
        """
        if not span or copies < 1:
            raise ValueError(f"{copies} replicas of {len(span)} blocks")
        want = self._wants.get(span[-1])
        if want is None:
            want = self._wants[span[-1]] = _Want(tuple(span), copies, priority)
        want.copies, want.priority = copies, priority
        self._review(want)
        self.changed()
        if not self._running:
            self._running = True
            self._scope.spawn(self._run(), "replication")

    def forget(self, span: Sequence[BlockId]) -> None:
        """Keep no replicas any more: those that were made go, but for one where none was there before; that one, and
        what was there, stays like any other block until it is evicted."""
        want = self._wants.pop(span[-1], None)
        if want is None:
            return
        whole = want.whole()
        last = whole[0] if whole and all(replica.made for replica in whole) else None
        for replica in list(want.replicas.values()):
            self._drop(want, replica, keep=replica is last)

    def drop(self, span: Sequence[BlockId], node: str) -> None:
        """Let the replica on `node` go, if there is one; while more are wanted than are left, another is made."""
        want = self._wants.get(span[-1])
        if want is not None and node in want.replicas:
            self._drop(want, want.replicas[node])
            want.full_ns[node] = aio.now_ns() + round(self._settings.look_s * NS_PER_S)  # it is to be made elsewhere
            want.due_ns = 0
            self._changed.set()

    def standing(self, span: Sequence[BlockId]) -> Standing:
        """How a span that is wanted stands now. Raises `KeyError` for another."""
        want = self._wants[span[-1]]
        nodes = tuple(replica.node.name for replica in want.whole() if replica.sound)
        return Standing(want.copies, nodes, None if want.enough(self._live()) else want.shortfall)

    def source(self, span: Sequence[BlockId]) -> str | None:
        """The node to read a span from: the replica with the least queued to send. None if there is none."""
        want = self._wants.get(span[-1])
        best = None if want is None else least_loaded([_site(one.node) for one in want.whole() if one.sound])
        return None if best is None else best.node

    def changed(self) -> None:
        """Nodes have come or gone, or are about to go: look at everything again."""
        for want in self._wants.values():
            want.due_ns = 0
            want.full_ns.clear()
        self._changed.set()

    def close(self) -> None:
        """Let go of everything, and drop nothing."""
        for want in self._wants.values():
            for replica in list(want.replicas.values()):
                self._drop(want, replica, keep=True)
        self._wants.clear()

    # The procedure

    async def _run(self) -> None:
        while True:
            want = self._next()
            if want is None:
                await self._changed.wait(self._next_look_ns())
            else:
                await self._advance(want)

    def _next(self) -> _Want | None:
        now_ns = aio.now_ns()
        due = [want for want in self._wants.values() if want.due_ns <= now_ns]
        return max(due, key=lambda want: want.priority, default=None)  # ties: who was wanted first

    def _next_look_ns(self) -> int | None:
        return min((want.due_ns for want in self._wants.values()), default=None)

    async def _advance(self, want: _Want) -> None:
        """One piece of one copy, or find that none is needed, or possible."""
        self._review(want)
        settings, now_ns = self._settings, aio.now_ns()
        want.due_ns = now_ns + round(settings.look_s * NS_PER_S)
        if want.enough(self._live()):
            want.shortfall = None
            return
        source, target = self._source(want), self._target(want)
        if source is None or target is None:
            if source is None:
                want.shortfall = Shortfall.NO_SOURCE
            else:
                want.shortfall = Shortfall.NO_ROOM if want.full_ns else Shortfall.NO_DOMAIN
            self._leave_the_leaving(want)
            return
        try:
            if target.blocks < len(want.span):  # or it was there, and no report had said so yet
                await self._copy(want, source, target)
        except PoolFull:
            want.full_ns[target.node.name] = now_ns + round(settings.look_s * NS_PER_S)
            want.due_ns = now_ns  # perhaps another has room
            self._drop(want, target)
        except (TransferError, LeaseLost, InstanceDown):
            want.shortfall = Shortfall.FAILING
            want.due_ns = aio.now_ns() + round(settings.retry_s * NS_PER_S)
        else:
            want.shortfall = None
            want.due_ns = 0

    def _review(self, want: _Want) -> None:
        """Forget what is lost, adopt what is there, drop what is too many."""
        for replica in list(want.replicas.values()):
            if not replica.sound:
                self._drop(want, replica, keep=True)
        live = self._live()
        staying = [replica for replica in want.whole() if replica.node.name in live]
        if len(staying) < want.copies:
            self._adopt(want, live)
            staying = [replica for replica in want.whole() if replica.node.name in live]
        if len(staying) >= want.copies:
            gone = [site.node for site in surplus([_site(one.node, one.made) for one in staying], want.copies)]
            kept = [replica for replica in staying if replica.node.name not in gone]
            for replica in list(want.replicas.values()):
                if replica not in kept:
                    self._drop(want, replica)

    def _adopt(self, want: _Want, live: Sequence[str]) -> None:
        """Take whole replicas that lie about in further fault domains for ours; none twice in one."""
        self._conductor.refresh()
        for node, tier in self._conductor.state.replicas(want.span):
            there = self._nodes[node]
            if tier is not there.pool.store.tier or node not in live or not there.alive or node in want.replicas:
                continue
            if there.domain in [replica.node.domain for replica in want.replicas.values()]:
                continue
            if there.pool.match(want.span) == len(want.span):
                pin = there.pool.stand_on(OWNER, want.span[-1])
                want.replicas[node] = _Replica(there, False, pin, len(want.span))

    def _source(self, want: _Want) -> _Replica | None:
        whole = {replica.node.name: replica for replica in want.whole()}
        best = least_loaded([_site(replica.node) for replica in whole.values()])
        return None if best is None else whole[best.node]

    def _target(self, want: _Want) -> _Replica | None:
        """The replica that is under way, else a new one where it is worth something."""
        live, now_ns = self._live(), aio.now_ns()
        want.full_ns = {node: until_ns for node, until_ns in want.full_ns.items() if until_ns > now_ns}
        for replica in want.replicas.values():
            if replica.blocks < len(want.span) and replica.node.name in live:
                return replica
        holders = [_site(replica.node) for replica in want.replicas.values() if replica.node.name in live]
        sites = [_site(self._nodes[node]) for node in live if node not in want.full_ns and node not in want.replicas]
        for site in elsewhere(holders, sites):
            replica = want.replicas[site.node] = _Replica(self._nodes[site.node], True)
            self._have(want, replica, replica.node.pool.match(want.span))
            return replica
        return None

    async def _copy(self, want: _Want, source: _Replica, target: _Replica) -> None:
        """The next piece. Cancelled or failed, it leaves what earlier pieces brought."""
        start_ns, first, there, here = aio.now_ns(), target.blocks, source.node.pool, target.node.pool
        piece = want.span[first : first + self._settings.piece_blocks]
        await self._bucket.take(len(piece) * here.store.block_bytes)
        if not (source.sound and target.sound and self._wants.get(want.span[-1]) is want):
            return  # while it waited
        checksums = there.checksums(piece)
        reservation = here.reserve(OWNER, len(piece))
        try:
            region = here.store.regions(reservation.slots)
            copy = Copy(there.region(piece), region, OWNER, piece[0], checksum=True, priority=PRIORITY)
            read = await source.node.move(copy)
            for block, found, recorded in zip(piece, read, checksums):
                if recorded and found != recorded:
                    there.drop((block,), OWNER)
                    raise BlockCorrupt("checksum differs", OWNER, block)
            if want.replicas.get(target.node.name) is not target or not target.sound:
                return  # dropped, or lost, meanwhile
            before = want.span[first - 1] if first else None
            if here.commit(reservation, piece, before, checksums) is not None:
                self._have(want, target, here.match(want.span))
        finally:
            here.release(reservation)
        if target.blocks == len(want.span):
            self._note("replicate", want, target, source.node.name, start_ns)

    def _have(self, want: _Want, replica: _Replica, count: int) -> None:
        """The first `count` blocks are there: hold them."""
        if count <= replica.blocks:
            return
        pool, before = replica.node.pool, replica.pin
        replica.pin, replica.blocks = pool.stand_on(OWNER, want.span[count - 1]), count
        if before is not None:
            pool.release(before)

    def _drop(self, want: _Want, replica: _Replica, keep: bool = False) -> None:
        """Hold a replica no more. Unless it is to be kept, its blocks leave, as far as nobody else has use for them."""
        del want.replicas[replica.node.name]
        if replica.pin is not None:
            replica.node.pool.release(replica.pin)
        if replica.made and not keep and replica.node.alive:
            replica.node.pool.shed(want.span[: replica.blocks], OWNER)
            self._note("unreplicate", want, replica, "", aio.now_ns())

    def _leave_the_leaving(self, want: _Want) -> None:
        """Nodes that are to go wait until nobody holds anything there, and no other place can be found."""
        live = self._live()
        for replica in list(want.replicas.values()):
            if replica.node.name not in live:
                self._drop(want, replica, keep=True)

    def _live(self) -> list[str]:
        """Nodes that the conductor counts on, in order of joining."""
        staying = [member.node for member in self._conductor.state.members.values() if not member.draining]
        return [node for node in dict.fromkeys(staying) if self._nodes[node].alive]

    def _note(self, kind: str, want: _Want, replica: _Replica, detail: str, start_ns: int) -> None:
        store = replica.node.pool.store
        self._recorder.event(
            aio.now_ns(),
            kind,
            OWNER,
            replica.node.name,
            tier=store.tier,
            first_block=want.span[0],
            blocks=len(want.span),
            nbytes=len(want.span) * store.block_bytes,
            start_ns=start_ns,
            detail=detail,
        )


def _site(node: Node, made: bool = False) -> Site:
    return Site(node.name, node.domain, node.pool.store.free_slots, node.outgoing_bytes, made)
