"""Getting a prompt's cached prefix: pin what the node has, pull what else the conductor expected, load it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mcjax import aio
from mcjax.engine.node import Node
from mcjax.errors import BlockCorrupt, InstanceDown, IntegrityError, LeaseLost, PoolFull, TransferError
from mcjax.kvpool.base import BlockStore
from mcjax.kvpool.holds import Pin
from mcjax.kvpool.pool import Pool
from mcjax.sched.base import Replica
from mcjax.sched.conductor import Conductor
from mcjax.sched.job import Job, Placement
from mcjax.transfer.base import Copy, Region
from mcjax.types import NS_PER_S, Decision, Recorder


@dataclass(frozen=True, slots=True, eq=False)
class PrefixFetcher:
    """Brings prefixes into one node's pool."""

    node: Node
    nodes: Mapping[str, Node]
    conductor: Conductor
    recorder: Recorder

    async def fetch(self, job: Job, placement: Placement) -> Pin:
        """A pin on the longest prefix that could be had, at least what the node itself holds.

        The span that the placement expected and this node lacks is pulled from the placement's source; if that fails,
        from wherever the fetch strategy says, unless it says to recompute.
        """
        block_tokens = self.conductor.state.block_tokens
        pin = self.node.pool.pin(job.request_id, job.blocks)
        try:
            local = len(pin)
            expected = placement.reused_tokens // block_tokens
            source = placement.source_node
            tried = [self.node.name]
            while len(pin) < expected:
                if source is None:
                    source = self._locate(job, job.blocks[len(pin) : expected], len(pin), tried)
                    if source is None:
                        break
                if source not in tried and source in self.nodes:
                    await self._pull(job, self.nodes[source], pin, expected)
                tried.append(source)
                source = None
            if job.row.attempts == 1:
                job.row.local_tokens = min(local * block_tokens, job.request.prompt_tokens)
                job.row.remote_tokens = (len(pin) - local) * block_tokens
                self.node.pool.note_hits(len(pin) * block_tokens / job.request.prompt_tokens)
            return pin
        except BaseException:
            self.node.pool.release(pin)
            raise

    def _locate(self, job: Job, blocks: tuple[int, ...], have: int, tried: list[str]) -> str | None:
        answer = self.conductor.locate(job, blocks, have, tried)
        return answer.node if isinstance(answer, Replica) else None

    async def _pull(self, job: Job, other: Node, pin: Pin, expected: int) -> None:
        """Copy blocks `len(pin) .. expected` from another node's pool and deepen the pin, unless that fails."""
        node, pool, state = self.node, self.node.pool, self.conductor.state
        start_ns, first = aio.now_ns(), len(pin)
        reservation = lease = None
        decision: Decision | None = None
        try:
            lease = node.pin_at(other, job.request_id, job.blocks[:expected])
            span = job.blocks[first : len(lease)]
            if not span:
                return
            checksums = other.pool.checksums(span)
            source = other.pool.region(span)
            reservation = pool.reserve(job.request_id, len(span))
            nbytes = len(span) * state.block_tokens * state.bytes_per_token
            expected_s = state.link.latency_s + (nbytes + other.outgoing_bytes) / state.link.bytes_per_s
            decision = self.recorder.decision(
                Decision(start_ns, job.request_id, "transfer", "pull", node.name, other.name, expected_s=expected_s)
            )
            target = pool.store.regions(reservation.slots)
            await other.move(Copy(source, target, job.request_id, span[0]))
            lease.check()  # the copy is only worth something if the lease held to its end
            decision.outcome_s = (aio.now_ns() - start_ns) / NS_PER_S
            decision.outcome = "moved"
            if pool.commit(reservation, span, job.blocks[first - 1] if first else None, checksums) is not None:
                pool.deepen(pin, job.blocks[: first + len(span)])
        except (TransferError, LeaseLost, InstanceDown, PoolFull) as problem:
            if decision is not None:
                decision.outcome = type(problem).__name__
            wanted = job.blocks[first:expected]
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
    """Copy blocks from the node's pool into device pages, and verify each against its checksum on the way.

    `checksums` may be one longer than `blocks`: the private tail behind them. Where `blocks` is empty, all is private,
    and `first_block` says in the log what it is a copy of.

    Raises:
        BlockCorrupt: some block's bytes are not what was written; it has left the pool's index.
        TransferError: the copy failed.
    """
    read = await node.move(Copy(source, target, owner, blocks[0] if blocks else first_block, checksum=True))
    for index, (found, recorded) in enumerate(zip(read, checksums, strict=False)):
        if recorded and found != recorded:
            if index < len(blocks):
                pool.drop(blocks[index : index + 1], owner)
            raise BlockCorrupt("checksum differs", owner, blocks[index] if index < len(blocks) else -1)


class Pages:
    """Device pages of one instance: as many at once as a request needs to begin, in order of arrival; then one by one.

    `on_space` hears of free pages before those who wait to begin.
    """

    def __init__(self, store: BlockStore, name: str):
        self.store = store
        self.on_space: Callable[[], None] = lambda: None
        self._queue = aio.WaitQueue(f"{name}.pages")
        store.on_space = self._space

    async def take(self, count: int) -> list[int]:
        """Wait for `count` pages. The caller has made sure that the instance has so many at all."""
        found: list[int] = []

        def attempt() -> bool:
            if self.store.free_slots < count:
                return False
            found.extend(self.store.reserve(count))
            return True

        try:
            await self._queue.until(attempt)
        except BaseException:
            self.give_back(found)
            raise
        return found

    def more(self, count: int) -> list[int]:
        """`count` pages now, for somebody who is at work; none if there are fewer."""
        return self.store.reserve(count) if self.store.free_slots >= count else []

    def give_back(self, pages: list[int]) -> None:
        self.store.free(pages)
        self._space()

    def _space(self) -> None:
        self.on_space()
        self._queue.notify()

    def check_idle(self) -> None:
        """Raise `IntegrityError` unless every page is free and no transfer holds one."""
        self.store.check_idle()
        if self.store.free_slots != self.store.capacity:
            taken = self.store.capacity - self.store.free_slots
            raise IntegrityError(f"{self.store.name}: {taken} pages are still taken")
