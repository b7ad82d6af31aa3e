"""What every instance has, whatever its role: a step loop, pages, a node, and a load that it reports."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from collections.abc import Sequence as PySequence

import numpy as np

from mcjax import aio
from mcjax.engine.base import Executor, Kind, StepItem
from mcjax.engine.decoder import Decoder, DecodeSettings
from mcjax.engine.loop import StepLoop
from mcjax.engine.node import Node
from mcjax.engine.prefix import Pages, PrefixFetcher, load
from mcjax.engine.sequence import End, Sequence
from mcjax.engine.stream import BlockStream, Piece
from mcjax.errors import InstanceDown
from mcjax.kvpool.base import BlockStore
from mcjax.kvpool.holds import Pin
from mcjax.kvpool.keys import BlockNamer
from mcjax.sched.base import Batching, Tenancy
from mcjax.sched.conductor import Conductor
from mcjax.sched.job import Job, Placement, SamplerState
from mcjax.sched.output import LENGTH
from mcjax.sched.reports import ReportBus
from mcjax.types import Recorder, Role


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
        settings: DecodeSettings,
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

    def let_go(self, job: Job, pages: list[int], taken_ns: int) -> None:
        """Give pages back; `taken_ns` is since when the prompt has had room here, -1 if it never had."""
        self.pages.give_back(pages)
        if taken_ns >= 0:
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
                start_ns=taken_ns,
            )

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
    ) -> SamplerState:
        """Compute the prompt from `start`; blocks beyond `cached_blocks` go into `stream` chunk by chunk.

        A prompt whose prefix took time to fetch keeps its place (`placement.order`) among those that wait.

        Gives up as soon as one of `tasks` (the streams at work) has failed: what is computed could not be delivered.
        The client gets the first token when it is there.
        """
        request, page_tokens = job.request, self.capacity.page_tokens
        full = len(job.blocks)
        sent = cached_blocks
        item = StepItem(request.request_id, Kind.PREFILL, start, 0, pages, request.sampling)
        item.prompt = request.tokens if request.sampling.penalises else None
        done: asyncio.Future[End] = aio.new_future()
        sequence = Sequence(request, item, done, end=request.prompt_tokens, blocks=job.blocks, order=placement.order)
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
        self.pages.store.wipe()
