"""What every instance has, whatever its role: a step loop, pages, a node, and a load that it reports."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from collections.abc import Sequence as PySequence

import numpy as np

from mcjax import aio
from mcjax.engine.base import Executor, Kind, StepItem
from mcjax.engine.loop import StepLoop
from mcjax.engine.node import Node
from mcjax.engine.prefix import Pages, PrefixFetcher, load
from mcjax.engine.sequence import End, Sequence
from mcjax.engine.stream import BlockStream, Piece
from mcjax.errors import InstanceDown, PoolFull, RequestTooLarge, TransferError
from mcjax.kvpool.base import BlockStore
from mcjax.kvpool.holds import Pin, Reservation
from mcjax.kvpool.keys import BlockNamer
from mcjax.sched.base import Batching, Tenancy
from mcjax.sched.conductor import Conductor
from mcjax.sched.job import Job, Placement
from mcjax.sched.reports import ReportBus
from mcjax.transfer.base import Copy
from mcjax.types import Recorder, Role, Tokens


class Instance:
    """Base of the three roles. A role is a procedure over these parts; the parts know nothing of roles."""

    role: Role

    def __init__(
        self,
        name: str,
        node: Node,
        nodes: Mapping[str, Node],
        executor: Executor,
        page_store: BlockStore,
        conductor: Conductor,
        bus: ReportBus,
        namer: BlockNamer,
        recorder: Recorder,
        batching: Batching,
        tenancy: Tenancy,
        share_decoded: bool,
        headroom_tokens: int | None = None,
        max_steps: int | None = None,
    ):
        self.name = name
        self.number = bus.join()
        self.node = node
        self.nodes = nodes
        self.executor = executor
        self.capacity = executor.capacity()
        self.pages = Pages(page_store, name)
        self.down: asyncio.Future[None] = aio.new_future()
        self.loop = StepLoop(name, executor, batching, tenancy, recorder, self.publish, self.pages.more, max_steps)
        self.pages.on_space = self.loop.feed
        self.jobs = 0
        """Jobs in the house."""
        self._accepted = 0
        self._decoded = 0
        self._queue_ns = 0
        self._bus = bus
        self._recorder = recorder
        self._namer = namer
        self._share_decoded = share_decoded
        self._headroom_tokens = headroom_tokens
        self._fetcher = PrefixFetcher(node, nodes, conductor, recorder)
        self.publish()

    # Load, as reported

    def accept(self, queue_ns: int) -> int:
        """A job has come, with so much prompt work; returns its number here."""
        self.jobs += 1
        self._accepted += 1
        self._queue_ns += queue_ns
        self.publish()
        return self._accepted

    def done(self, queue_ns: int) -> None:
        """A job has gone, with so much of its prompt work undone."""
        self.jobs -= 1
        self._queue_ns -= queue_ns
        self.publish()

    def publish(self) -> None:
        loop, store = self.loop, self.pages.store
        self._bus.load(
            self.number,
            (
                self._accepted,
                self._queue_ns,
                len(loop.decodes) + len(loop.waiting_decodes),
                loop.context_tokens,
                store.free_slots * self.capacity.page_tokens,
                self.node.outgoing_bytes,
            ),
            loop.growth,
        )

    # Pieces of the procedures

    def pages_for(self, job: Job, tokens: int) -> int:
        """Pages that `tokens` need. Raises `RequestTooLarge` if the instance could never hold them."""
        capacity = self.capacity
        count = -(-tokens // capacity.page_tokens)
        if tokens > capacity.max_context_tokens or count > capacity.pages:
            limit = min(capacity.max_context_tokens, capacity.pages * capacity.page_tokens)
            raise RequestTooLarge(job.request_id, f"needs {tokens} tokens of context, {self.name} holds {limit}")
        return count

    def pages_to_decode(self, job: Job) -> int:
        """Pages to begin decoding with: prompt and headroom. Raises `RequestTooLarge` if the output could never fit."""
        request = job.request
        whole = self.pages_for(job, request.prompt_tokens + request.max_tokens)
        if self._headroom_tokens is None:
            return whole
        ahead = max(self._headroom_tokens, job.produced)
        return min(whole, self.pages_for(job, request.prompt_tokens + max(1, ahead)))

    async def load_prefix(self, job: Job, pin: Pin, pages: list[int]) -> int:
        """Load the pinned prefix into pages; returns the position from which to compute (the last token always is)."""
        if len(pin):
            pool = self.node.pool
            target = self.pages.store.regions(pages[: len(pin)])
            await load(
                self.node, pool, pool.region(pin.blocks), pool.checksums(pin.blocks), pin.blocks, target, job.request_id
            )
        return min(len(pin) * self.capacity.page_tokens, job.request.prompt_tokens - 1)

    async def compute_prompt(
        self,
        job: Job,
        pages: list[int],
        start: int,
        cached_blocks: int,
        stream: BlockStream,
        tasks: PySequence[asyncio.Task[None]],
        placement: Placement,
        store_tail: bool,
    ) -> End:
        """Compute the prompt from `start`; blocks beyond `cached_blocks` go into `stream` chunk by chunk.

        A prompt whose prefix took time to fetch keeps its place (`placement.order`) among those that wait.

        Gives up as soon as one of `tasks` (the streams at work) has failed: what is computed could not be delivered.
        The client gets the first token when it is there.
        """
        request, page_tokens = job.request, self.capacity.page_tokens
        full = len(job.blocks)
        sent = cached_blocks
        item = StepItem(request.request_id, Kind.PREFILL, start, 0, pages, request.sampling)
        done: asyncio.Future[End] = aio.new_future()
        sequence = Sequence(request, item, done, end=request.prompt_tokens, order=placement.order)
        left_ns, tokens_left = placement.prefill_estimate_ns, request.prompt_tokens - start

        def on_chunk(begin: int, end: int, start_ns: int) -> None:
            nonlocal sent, left_ns, tokens_left
            if job.row.prefill_start_ns < 0:
                job.row.prefill_start_ns = start_ns
            worked_ns = left_ns * (end - begin) // tokens_left if tokens_left else 0
            left_ns -= worked_ns
            tokens_left -= end - begin
            self._queue_ns -= worked_ns
            ready = min(end // page_tokens, full)
            if end == request.prompt_tokens and end > full * page_tokens and store_tail:
                ready = full + 1
            if ready > sent:
                stream.push(Piece(sent, self.pages.store.regions(pages[sent:ready])))
                sent = ready
            if end == request.prompt_tokens:
                stream.close()

        def on_failure(task: asyncio.Task[None]) -> None:
            problem = None if task.cancelled() else task.exception()
            if problem is not None and not done.done():
                done.set_exception(problem)

        sequence.on_chunk = on_chunk
        for task in tasks:
            task.add_done_callback(on_failure)
        self.loop.add_prefill(sequence)
        try:
            end = await done
        finally:
            self._queue_ns -= left_ns
            await self.loop.leave(sequence)
        tokens = None if end.token is None else np.array([end.token], np.int32)
        job.emit(0, tokens, np.array([end.end_ns], np.int64))
        return end

    async def generate(self, job: Job, pages: list[int], first_token: int | None) -> None:
        """Decode until the output ends. Tokens that the client already has are fed again, not sampled."""
        request, prompt_tokens = job.request, job.request.prompt_tokens
        if job.produced >= request.max_tokens:
            return
        tokens: Tokens | None = None
        if first_token is not None:
            known = job.output if job.output else [first_token]
            tokens = np.array(known, np.int32)
        item = StepItem(
            request.request_id,
            Kind.DECODE,
            prompt_tokens,
            1,
            pages,
            request.sampling,
            tokens,
            generated=1,
            forced=max(0, job.produced - 1),
        )
        self._decoded += 1
        order = self._decoded
        while True:
            end = await self._decode(job, item, order)
            if not end.preempted:
                return

    async def _decode(self, job: Job, item: StepItem, order: int) -> End:
        """Decode to the end, or until preempted; then the pages have been out, and are back when this returns."""
        done: asyncio.Future[End] = aio.new_future()
        limit = job.request.max_tokens
        sequence = Sequence(
            job.request, item, done, limit=limit, order=order, on_tokens=job.emit, streams=job.listener is not None
        )
        self.loop.add_decode(sequence)
        try:
            end = await done
            if end.preempted:
                await self._swap(job, item, sequence)
            return end
        finally:
            self.loop.made_room(sequence)
            await self.loop.leave(sequence)

    async def _swap(self, job: Job, item: StepItem, sequence: Sequence) -> None:
        """Move the sequence's pages to the node's DRAM, wait for pages, and move them back, checksums verified.

        Raises `PoolFull` when there is no room in DRAM: the conductor then has the prompt computed again, and what was
        decoded is replayed.
        """
        pages, pool = item.pages, self.node.pool
        used = self.pages_for(job, item.start)
        slots = pool.reserve(job.request_id, used)
        try:
            held = pool.store.regions(slots.slots)
            source = self.pages.store.regions(pages[:used])
            checksums = await self.node.move(Copy(source, held, job.request_id, checksum=True))
            given, pages[:] = pages[:], []  # the caller gives back what is in its list at the end
            self.pages.give_back(given)
            self.loop.made_room(sequence)
            self.publish()
            pages.extend(await self.pages.take(max(used, self.pages_for(job, item.start + 1))))
            target = self.pages.store.regions(pages[:used])
            await load(self.node, pool, held, checksums, (), target, job.request_id)
        finally:
            pool.release(slots)

    async def write_back(self, job: Job, pages: list[int]) -> None:
        """Put the full blocks that decode filled into the node's pool, for the session's next turn.

        Only where a block's name does not depend on which program made its bits; a pool without room is left alone.
        """
        request = job.request
        if not self._share_decoded or request.tokens is None or not job.output:
            return
        history = np.concatenate([request.tokens, np.array(job.output[:-1], np.int32)])
        blocks = self._namer.from_tokens(request.tenant, history)
        pool, first = self.node.pool, len(job.blocks)
        pin = pool.pin(request.request_id, blocks)
        reservation: Reservation | None = None
        try:
            new = len(blocks) - len(pin)
            if len(pin) < first or new <= 0:
                return
            first = len(pin)
            reservation = pool.reserve(request.request_id, new)
            target = pool.store.regions(reservation.slots)
            source = self.pages.store.regions(pages[first : first + new])
            checksums = await self.node.move(Copy(source, target, request.request_id, blocks[first], checksum=True))
            pool.commit(reservation, blocks[first:], blocks[first - 1] if first else None, checksums)
        except (PoolFull, TransferError) as problem:  # the output is complete: only a later hit is lost
            self._recorder.event(aio.now_ns(), "write_back_failed", job.request_id, self.name, detail=str(problem))
        finally:
            pool.release(pin)
            if reservation is not None:
                pool.release(reservation)

    # Dying

    def kill(self) -> None:
        """The instance's process is gone: nothing here moves or answers again, and its node's memory is lost."""
        self.loop.kill(InstanceDown(self.name))
        self.node.fail()
        self.pages.store.wipe()
