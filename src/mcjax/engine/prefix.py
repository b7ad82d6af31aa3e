"""Getting a prompt's cached prefix: pin what the node has, pull what else the conductor expected, load it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mcjax import aio
from mcjax.engine.lookup import Lookup
from mcjax.engine.node import Node
from mcjax.engine.promotion import NO_ROOM
from mcjax.errors import BlockCorrupt, InstanceDown, LeaseLost, PoolFull, TransferError
from mcjax.kvpool.holds import Pin
from mcjax.kvpool.pool import Pool
from mcjax.sched.base import Replica
from mcjax.sched.conductor import Conductor
from mcjax.sched.job import Computed, Job, Placement
from mcjax.transfer.base import Copy, Region
from mcjax.types import NS_PER_S, Decision, Recorder, Tier


@dataclass(frozen=True, slots=True, eq=False)
class PrefixFetcher:
    """Brings prefixes into one node's pool."""

    node: Node
    nodes: Mapping[str, Node]
    conductor: Conductor
    recorder: Recorder

    async def fetch(self, job: Job, placement: Placement, on_device: int = 0) -> tuple[Pin, Lookup]:
        """A pin on the longest prefix that could be had, at least what the node's host memory holds; and an account.

        The span that the placement expected and this node lacks is pulled from the placement's source. What is missing
        then, of that or of what lies on the node's own SSD, comes from wherever the fetch strategy says, unless it says
        to recompute. Nothing is brought where the first `on_device` blocks, which the instance has in its pages, are as
        many.
        """
        block_tokens = self.conductor.state.block_tokens
        pin = self.node.pool.pin(job.request_id, job.blocks, accepts_lossy=job.request.accepts_lossy)
        try:
            lookup = Lookup(job, placement, block_tokens, local=len(pin))
            job.computed.clear()
            if not job.request.accepts_lossy:
                for pool in self.node.pools:
                    if pool.holds_lossy:
                        lookup.lossy(pool.match(job.blocks))
            expected = placement.reused_tokens // block_tokens
            source, tried = placement.source_node, [(self.node.name, Tier.DRAM)]
            if source is not None and max(on_device, len(pin)) < expected:
                await self._bring(job, Replica(source, 0.0), pin, expected, lookup)
                tried.append((source, Tier.DRAM))
            promotion = self.node.promotion
            below = 0 if promotion is None else promotion.reach(job.blocks, job.request.accepts_lossy)
            for end in dict.fromkeys((max(expected, below), min(expected, below))):
                if end <= on_device or await self._search(job, pin, end, tried, lookup):
                    break
            lookup.remote = len(pin) - lookup.local - lookup.ssd
            if job.row.attempts == 1:
                self.node.pool.note_hits(len(pin) * block_tokens / job.request.prompt_tokens)
            return pin, lookup
        except BaseException:
            self.node.pool.release(pin)
            raise

    async def _search(self, job: Job, pin: Pin, end: int, tried: list[tuple[str, Tier]], lookup: Lookup) -> bool:
        """Ask for blocks `len(pin) .. end`, place after place, until they are here, or shall be computed, or nobody is
        left who has them all: then False."""
        block_tokens = self.conductor.state.block_tokens
        while (had := len(pin)) < end:
            blocks, start_ns = job.blocks[had:end], aio.now_ns()
            located = self.conductor.locate(job, blocks, had, tried)
            replica = located.replica
            if replica is None:
                first, last = (min(at * block_tokens, job.request.prompt_tokens) for at in (had, end))
                job.computed.append(Computed(located.decision, first, last))
                if located.declined:
                    lookup.skipped(end, located.decision.choice)
                return located.declined
            await self._bring(job, replica, pin, end, lookup)
            located.note("moved" if len(pin) > had else "failed", (aio.now_ns() - start_ns) / NS_PER_S)
            tried.append((replica.node, replica.tier))
        return True

    async def _bring(self, job: Job, replica: Replica, pin: Pin, end: int, lookup: Lookup) -> None:
        """Deepen the pin by what a replica has of blocks `len(pin) .. end`; it stays as it is where that fails."""
        other = self.nodes.get(replica.node)
        if other is None:
            return
        if other is not self.node:
            await self._pull(job, other, replica.tier, pin, end, lookup)
        elif replica.tier is Tier.SSD and self.node.promotion is not None:
            had = len(pin)
            problem = await self.node.promotion.promote(job.request_id, pin, job.blocks[:end], job.request.tenant)
            lookup.ssd += len(pin) - had
            _note_stop(lookup, end, problem)

    async def _pull(self, job: Job, other: Node, tier: Tier, pin: Pin, end: int, lookup: Lookup) -> None:
        """Copy blocks `len(pin) .. end` from another node's host memory, where it brings them first if its SSD has
        them, and deepen the pin; unless that fails."""
        node, pool, state = self.node, self.node.pool, self.conductor.state
        start_ns, first = aio.now_ns(), len(pin)
        reservation = lease = None
        decision: Decision | None = None
        try:
            lease = node.pin_at(other, job.request_id, job.blocks[:end], job.request.accepts_lossy)
            there = len(lease)
            if tier is Tier.SSD and other.promotion is not None:
                problem = await other.promotion.promote(job.request_id, lease, job.blocks[:end], job.request.tenant)
                _note_stop(lookup, end, problem)
            span = job.blocks[first : len(lease)]
            if not span:
                return
            checksums, lossy = other.pool.checksums(span), other.pool.is_lossy(span)
            source = other.pool.region(span)
            reservation = await node.reserve_saved(job.request_id, len(span), tenant=job.request.tenant)
            nbytes = len(span) * state.block_tokens * state.bytes_per_token
            expected_s = state.link.latency_s + (nbytes + other.outgoing_bytes) / state.link.bytes_per_s
            decision = self.recorder.decision(
                Decision(start_ns, job.request_id, "transfer", "pull", node.name, other.name, expected_s=expected_s)
            )
            target = pool.store.regions(reservation.slots)
            again = job.row.attempts > 1  # what was corrupt when it was used may have been so where it came from
            read = await other.move(Copy(source, target, job.request_id, span[0], checksum=again))
            verify(other.pool, read, checksums, span, job.request_id)
            lease.check()  # the copy is only worth something if the lease held to its end
            decision.outcome_s = (aio.now_ns() - start_ns) / NS_PER_S
            decision.outcome = "moved"
            before = job.blocks[first - 1] if first else None
            if pool.commit(reservation, span, before, checksums, lossy) is not None:
                pool.deepen(pin, job.blocks[: first + len(span)])
                lookup.ssd += max(0, len(lease) - max(there, first))
        except (TransferError, LeaseLost, InstanceDown, PoolFull) as problem:
            if decision is not None:
                decision.outcome = type(problem).__name__
            if isinstance(problem, PoolFull):
                lookup.skipped(end, NO_ROOM)
            else:
                lookup.failed(end)
            wanted = job.blocks[first:end]
            self.recorder.event(
                aio.now_ns(),
                "pull_failed",
                job.request_id,
                node.name,
                tier=pool.store.tier,
                first_block=wanted[0] if wanted else -1,
                blocks=len(wanted),
                nbytes=len(wanted) * pool.store.block_bytes,
                detail=f"{other.name}: {problem}",
            )
        finally:
            if reservation is not None:
                pool.release(reservation)
            if lease is not None:
                node.give_back(other, lease)


def _note_stop(lookup: Lookup, end: int, problem: str) -> None:
    """Why a promotion stopped short of what the SSD had, if it did."""
    if problem == NO_ROOM:
        lookup.skipped(end, problem)
    elif problem:
        lookup.failed(end)


async def load(
    node: Node,
    pool: Pool,
    source: Region,
    checksums: tuple[bytes, ...],
    blocks: tuple[int, ...],
    target: Region,
    owner: int,
    first_block: int = -1,
) -> None:
    """Copy blocks from the node's pool into device pages, and verify each against its checksum on the way. `target` is
    stale afterwards: nothing more may come to pages that are about to be read, written into, and shared.

    `checksums` may be one longer than `blocks`: the private tail behind them. Where `blocks` is empty, all is private,
    and `first_block` says in the log what it is a copy of.

    Raises:
        BlockCorrupt: some block's bytes are not what was written; it has left the pool's index.
        TransferError: the copy failed.
    """
    read = await node.move(Copy(source, target, owner, blocks[0] if blocks else first_block, checksum=True))
    verify(pool, read, checksums[: len(source.slots)], blocks, owner)
    target.memory.settle(target.slots)


def verify(
    pool: Pool, read: tuple[bytes, ...], checksums: tuple[bytes, ...], blocks: tuple[int, ...], owner: int
) -> None:
    """Compare what was read of `pool` with what it was committed as.

    Raises `BlockCorrupt` if some block's bytes are not what was written, it has left the pool's index; or if only some
    were read. In worlds without bytes nothing is read, and nothing compared.
    """
    if read and len(read) != len(checksums):
        raise BlockCorrupt(f"{len(checksums)} blocks were announced, {len(read)} came", owner)
    for index, (found, recorded) in enumerate(zip(read, checksums, strict=False)):
        if recorded and found != recorded:
            if index < len(blocks):
                pool.drop(blocks[index : index + 1], owner)
            raise BlockCorrupt("checksum differs", owner, blocks[index] if index < len(blocks) else -1)
