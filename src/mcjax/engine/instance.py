"""What every instance has, whatever its role: a step loop, pages, a node, and a load that it reports."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from collections.abc import Sequence as PySequence

import numpy as np

from mcjax import aio
from mcjax.engine.base import Executor, Kind, StepItem
from mcjax.engine.decoder import Decoder, DecodeSettings
from mcjax.engine.lookup import Lookup
from mcjax.engine.loop import StepLoop
from mcjax.engine.node import Node
from mcjax.engine.pages import Held, Pages
from mcjax.engine.prefix import PrefixFetcher, load
from mcjax.engine.sequence import End, Sequence
from mcjax.engine.stream import BlockStream, Piece
from mcjax.errors import InstanceDown, StaleRegion
from mcjax.kvpool.holds import Pin
from mcjax.kvpool.keys import BlockNamer
from mcjax.sched.base import Batching, Tenancy
from mcjax.sched.conductor import Conductor
from mcjax.sched.job import Job, Placement, SamplerState
from mcjax.sched.output import LENGTH
from mcjax.sched.reports import ReportBus
from mcjax.transfer.base import Copy
from mcjax.types import NS_PER_S, BlockId, Recorder, Role


class Instance:
    """Base of the three roles. A role is a procedure over these parts; the parts know nothing of roles."""

    role: Role

    def __init__(
        self,
        name: str,
        node: Node,
        nodes: Mapping[str, Node],
        executor: Executor,
        pages: Pages,
        conductor: Conductor,
        bus: ReportBus,
        namer: BlockNamer,
        recorder: Recorder,
        batching: Batching,
        tenancy: Tenancy,
        settings: DecodeSettings,
        max_steps: int | None = None,
        streaming: bool = True,
    ):
        self.streaming = streaming
        """Whether a prompt's blocks go to the receiving node as they are computed, not all at its end."""
        self.name = name
        self.number = bus.join()
        self.node = node
        self.nodes = nodes
        self.executor = executor
        self.capacity = executor.capacity()
        self.layout = namer.kv_format
        """Of the blocks it makes and takes."""
        self.pages = pages
        self.down: asyncio.Future[None] = aio.new_future()
        self.loop = StepLoop(name, executor, batching, tenancy, recorder, self.publish, self.pages.more, max_steps)
        self.pages.on_space = self.loop.feed
        self.jobs = 0
        """Jobs in the house."""
        self._accepted = 0
        self._queue_ns = 0
        self._bus = bus
        self._recorder = recorder
        self.decoder = Decoder(
            name, node, self.loop, self.pages, self.capacity, namer, recorder, settings, self.publish
        )
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
        loop = self.loop
        self._bus.load(
            self.number,
            (
                self._accepted,
                self._queue_ns,
                len(loop.decodes) + len(loop.waiting_decodes),
                loop.context_tokens,
                self.pages.available * self.capacity.page_tokens,
                self.node.outgoing_bytes,
            ),
            loop.growth,
        )

    # Pieces of the procedures

    def let_go(self, job: Job, held: Held | None) -> None:
        """Give the prompt's pages back, if it ever had any."""
        if held is not None:
            self.pages.release(held)
            count, store = len(job.blocks), self.pages.store
            self._recorder.event(
                aio.now_ns(),
                "release",
                job.request_id,
                self.node.name,
                tier=store.tier,
                first_block=job.blocks[0] if count else -1,
                blocks=count,
                nbytes=count * store.block_bytes,
                start_ns=held.taken_ns,
            )

    async def fetch(self, job: Job, placement: Placement) -> tuple[Pin, Lookup]:
        """Have the prompt's prefix brought into the node's memory, unless the device holds as much of it."""
        return await self._fetcher.fetch(job, placement, self.pages.match(job.blocks, job.request.accepts_lossy))

    async def take_pages(self, job: Job, count: int, lookup: Lookup) -> Held:
        """Pages to compute the prompt in. What the device has of it is read in place, but for the page that its last
        token is written into."""
        most = (job.request.prompt_tokens - 1) // self.capacity.page_tokens
        held = await self.pages.take(job.request_id, count, job.blocks, most, job.request.accepts_lossy)
        job.lossy = job.lossy or held.lossy
        lookup.on_device(held.cached)
        lookup.note(self.node.pool.gone)
        return held

    async def load_prefix(self, job: Job, pin: Pin, held: Held) -> int:
        """Get the cached prefix into pages: what the device has is there, or is copied from page to page; what only the
        node's memory has, by `pin`, is loaded. Returns the position from which to compute (the last token always is).
        """
        pool, on_device, regions = self.node.pool, held.cached, self.pages.store.regions
        if on_device > held.shared:
            last = job.blocks[held.shared : on_device]
            source, target = self.pages.pool.region(last), regions(held.pages[held.shared : on_device])
            await self.node.move(Copy(source, target, job.request_id, last[0]))
            self.pages.store.settle(target.slots)  # it is about to be written into: the copy must not come again
            self.pages.copied(held)
            self.publish()
        missing = pin.blocks[on_device:]
        if missing:
            self.note_lossy(job, missing)
            target = regions(held.pages[on_device : len(pin)])
            await load(self.node, pool, pool.region(missing), pool.checksums(missing), missing, target, job.request_id)
        return min(max(on_device, len(pin)) * self.capacity.page_tokens, job.request.prompt_tokens - 1)

    def keep(self, job: Job, held: Held, blocks: PySequence[BlockId]) -> None:
        """The first pages hold `blocks`, to the end: leave them on the device, for whoever comes."""
        if self.pages.caches:
            self.pages.keep(held, blocks, job.lossy)
            self.publish()

    def note_lossy(self, job: Job, blocks: PySequence[BlockId]) -> None:
        """The job is about to read these blocks of its node, or a tail of its own. Raises `StaleRegion` if they are
        lossy and it does not accept that: then they are not those that it pinned, but came in their place."""
        pool = self.node.pool
        if pool.store.lossy or pool.is_lossy(blocks):
            if not job.request.accepts_lossy:
                raise StaleRegion("only rounded numbers are here", job.request_id, blocks[0] if blocks else -1)
            job.lossy = True

    async def compute_prompt(
        self,
        job: Job,
        held: Held,
        start: int,
        cached_blocks: int,
        stream: BlockStream,
        tasks: PySequence[asyncio.Task[None]],
        placement: Placement,
        store_tail: bool,
    ) -> SamplerState:
        """Compute the prompt from `start`; blocks beyond `cached_blocks` go into `stream`, chunk by chunk, those that
        are there before at once.

        A prompt whose prefix took time to fetch keeps its place (`placement.order`) among those that wait.

        Gives up as soon as one of `tasks` (the streams at work) has failed: what is computed could not be delivered.
        The client gets the first token when it is there.
        """
        request, pages, page_tokens = job.request, held.pages, self.capacity.page_tokens
        full = len(job.blocks)
        sent = cached_blocks
        if held.shared > sent:
            stream.push(Piece(sent, self.pages.store.regions(pages[sent : held.shared])))
            sent = held.shared
        item = StepItem(request.request_id, Kind.PREFILL, start, 0, pages, request.sampling)
        item.prompt = request.tokens if request.sampling.penalises else None
        done: asyncio.Future[End] = aio.new_future()
        sequence = Sequence(request, item, done, end=request.prompt_tokens, blocks=job.blocks, order=placement.order)
        left_ns, tokens_left = placement.prefill_estimate_ns, request.prompt_tokens - start

        def on_chunk(begin: int, end: int, start_ns: int) -> None:
            nonlocal sent, left_ns, tokens_left
            if job.row.prefill_start_ns < 0:
                job.row.prefill_start_ns = start_ns
            for span in job.computed:
                span.chunk(begin, end, (aio.now_ns() - start_ns) / NS_PER_S)
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
        return self._first_token(job, end)

    @staticmethod
    def _first_token(job: Job, end: End) -> SamplerState:
        """Give the client its first token, unless it has it: then that one counts, not what was computed again."""
        output, request = job.first, job.request
        tokens = None if end.token is None else np.array([end.token], np.int32)
        output.emit(0, tokens, np.array([end.end_ns], np.int64), end.logprobs)
        if output.produced == 1 and end.finish_reason:
            output.end(end.finish_reason)
        elif output.produced >= request.max_tokens:
            output.end(LENGTH)
        return SamplerState(
            seed=request.sampling.seed,
            position=request.prompt_tokens + output.produced,
            produced=output.produced,
            first_token=output.tokens[0] if output.tokens else end.token,
            first_logprobs=end.logprobs,
        )

    # Dying

    def kill(self) -> None:
        """The instance's process is gone: nothing here moves or answers again, and its node's memory is lost."""
        self.loop.kill(InstanceDown(self.name))
        self.node.fail()
        self.pages.fail()
