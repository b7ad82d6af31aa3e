"""What an instance does with a prompt that is computed: decodes its outputs, makes room and comes back, writes back.

With `n > 1` the outputs are branches on one instance. They read the same full pages of the prompt; each has a copy of
the page with the prompt's last token, and its own pages from there on. Branches live inside this procedure, so what
they share needs no counting: it is the caller's, and outlives them. So are pages that hold blocks of the device tier.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mcjax import aio
from mcjax.engine.base import Capacity, Kind, StepItem
from mcjax.engine.loop import StepLoop
from mcjax.engine.node import Node
from mcjax.engine.pages import Held, Pages
from mcjax.engine.prefix import load
from mcjax.engine.sequence import STOP_STRING_STEPS, End, Sequence
from mcjax.errors import ConfigError, PoolFull, Preempted, RequestTooLarge, TransferError
from mcjax.kvpool.holds import Reservation
from mcjax.kvpool.keys import BlockNamer
from mcjax.sched.job import Job, SamplerState
from mcjax.sched.output import LENGTH, Output
from mcjax.transfer.base import Copy
from mcjax.types import BlockId, Recorder

Preemption = Literal["swap", "recompute"]


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """How an instance decodes.

    `headroom_tokens`: output tokens that pages are taken for before decoding (None: `max_tokens`).
    `preemption`: who makes room goes to the node's DRAM, or gives its pages back at once and is computed again.
    `share_decoded`: blocks that decode filled may be matched by other requests.
    """

    headroom_tokens: int | None = None
    preemption: Preemption = "swap"
    share_decoded: bool = False

    def __post_init__(self) -> None:
        if self.preemption not in ("swap", "recompute"):
            raise ConfigError("engine.preemption", self.preemption, "is no way to make room", ("swap", "recompute"))


@dataclass(slots=True, eq=False)
class Strand:
    """An output being decoded here. Of its pages the first `shared` are its job's (`held`), the others its own."""

    output: Output
    item: StepItem
    held: Held
    shared: int
    family: list[Strand]
    """All of its job's."""
    active: bool = True
    """At work or about to be; False when swapped out, or ended."""
    holds: bool = True
    """Whether its own pages are its own still. Their numbers stay in the item: a dead executor may yet look at them."""
    given_up: asyncio.Future[None] | None = None
    """While it waits for pages again: done when nobody of its job is at work any more."""

    @property
    def own(self) -> list[int]:
        return self.item.pages[self.shared :]

    @property
    def idles(self) -> bool:
        """Whether its job would keep pages from others while nobody of it is at work. One output alone does not: all
        its pages go."""
        return len(self.family) > 1 and self.shared > 0 and not any(strand.active for strand in self.family)


class Decoder:
    """One an instance."""

    def __init__(
        self,
        name: str,
        node: Node,
        loop: StepLoop,
        pages: Pages,
        capacity: Capacity,
        namer: BlockNamer,
        recorder: Recorder,
        settings: DecodeSettings,
        publish: Callable[[], None],
    ):
        self._name = name
        self._node = node
        self._loop = loop
        self._pages = pages
        self._capacity = capacity
        self._namer = namer
        self._recorder = recorder
        self._settings = settings
        self.shares = settings.share_decoded
        self._publish = publish

    # Pages

    def pages_for(self, job: Job, tokens: int) -> int:
        """Pages that `tokens` need. Raises `RequestTooLarge` if the instance could never hold them."""
        capacity = self._capacity
        count = -(-tokens // capacity.page_tokens)
        if tokens > capacity.max_context_tokens or count > capacity.pages:
            limit = min(capacity.max_context_tokens, capacity.pages * capacity.page_tokens)
            raise RequestTooLarge(job.request_id, f"needs {tokens} tokens of context, {self._name} holds {limit}")
        return count

    def pages_to_begin(self, job: Job) -> int:
        """Pages to begin decoding with: of the prompt, and for each output those that it alone needs.

        Raises `RequestTooLarge` if the whole output, or all of them together, could never fit.
        """
        whole = self.pages_for(job, job.request.prompt_tokens + job.request.max_tokens)
        shared = self._shared(job)
        most = shared + (whole - shared) * len(job.outputs)
        if most > self._capacity.pages:
            held = f"{self._name} holds {self._capacity.pages}"
            raise RequestTooLarge(job.request_id, f"needs {most} pages for {len(job.outputs)} outputs, {held}")
        return shared + sum([self._own_pages(job, output) for output in job.outputs])

    def _shared(self, job: Job) -> int:
        """Full pages of the prompt that no output writes into."""
        return (job.request.prompt_tokens - 1) // self._capacity.page_tokens if len(job.outputs) > 1 else 0

    def _own_pages(self, job: Job, output: Output) -> int:
        prompt_tokens, ahead = job.request.prompt_tokens, job.request.max_tokens
        if self._settings.headroom_tokens is not None:
            ahead = min(ahead, max(1, self._settings.headroom_tokens, output.produced))
        return self.pages_for(job, prompt_tokens + ahead) - self._shared(job)

    # Decoding

    def untouched(self, job: Job) -> tuple[BlockId, ...]:
        """The blocks of the prompt that no output writes into."""
        return job.blocks if len(job.outputs) == 1 else job.blocks[: self._shared(job)]

    async def generate(self, job: Job, held: Held, state: SamplerState) -> None:
        """Decode every output to its end. Tokens that the client already has are fed again, not sampled.

        Takes pages over, but for those that all outputs share and those that are the device tier's: they stay held.
        """
        strands = self._strands(job, held, state)
        try:
            if len(strands) == 1:
                await self._to_end(job, strands[0])
            else:
                await self._together(job, strands)
        finally:
            for strand in strands:
                self._give_back(strand)

    def _strands(self, job: Job, held: Held, state: SamplerState) -> list[Strand]:
        family = self._shared(job)
        shared = max(family, held.shared)
        whole, held.pages = held.pages, held.pages[:shared]
        strands: list[Strand] = []
        at = shared
        for output in job.outputs:
            own = self._own_pages(job, output) + family - shared
            item = self._item(job, output, [*whole[:shared], *whole[at : at + own]], state)
            strands.append(Strand(output, item, held, shared, strands))
            at += own
        return strands

    def _item(self, job: Job, output: Output, pages: list[int], state: SamplerState) -> StepItem:
        """Output 0 goes on after its first token; a branch feeds the prompt's last token again, and samples its own."""
        request, first = job.request, output.index == 0
        known = list(output.tokens or ([] if not first or state.first_token is None else [state.first_token]))
        if not first and request.tokens is not None:
            tokens = np.array([request.tokens[-1], *known], np.int32)
        else:
            tokens = np.array(known, np.int32) if known else None
        begun = known[:1] if first else []
        return StepItem(
            request.request_id,
            Kind.DECODE,
            request.prompt_tokens - (not first),
            1,
            pages,
            output.sampling,
            tokens,
            generated=int(first),
            forced=max(0, output.produced - first),
            prompt=request.tokens if output.sampling.penalises else None,
            output=begun if output.sampling.penalises else [],
        )

    async def _together(self, job: Job, strands: list[Strand]) -> None:
        """All outputs at once; the failure of one ends the others."""
        await self._copy_tail(job, strands)
        async with aio.Scope(f"{self._name}.outputs.{job.request_id}") as scope:
            tasks = [
                scope.spawn(self._to_end(job, strand), f"{self._name}.output.{job.request_id}.{at}")
                for at, strand in enumerate(strands)
            ]

            async def all_ended() -> None:
                for task in tasks:
                    await task

            await scope.run(all_ended())

    async def _copy_tail(self, job: Job, strands: list[Strand]) -> None:
        """Copy on write: each branch gets a page of its own for the one that it would write into first."""
        (first, *branches), regions = strands, self._pages.store.regions
        targets = [branch.own[0] for branch in branches if not branch.output.finish_reason]
        if targets:
            await self._node.move(Copy(regions(first.own[:1] * len(targets)), regions(targets), job.request_id))

    async def _to_end(self, job: Job, strand: Strand) -> None:
        """One output, through as many preemptions as there may be; then its pages are free."""
        output = strand.output
        filled: tuple[BlockId, ...] = ()
        try:
            if output.produced >= output.max_tokens:
                output.end(LENGTH)
            if not output.finish_reason:
                if output.since is None:
                    output.since = (aio.now_ns(), job.request_id, output.index)
                while True:
                    end = await self._decode(job, strand)
                    if not end.preempted:
                        break
                output.end(end.finish_reason)
            if output.index == 0:
                blocks = self._filled(job)
                await self._write_back(job, blocks, strand.item.pages)
                filled = blocks
        finally:
            strand.active = False
            self._give_back(strand, filled, job.lossy)
        if strand.idles:
            for other in strand.family:
                if other.given_up is not None and not other.given_up.done():
                    other.given_up.set_result(None)

    async def _decode(self, job: Job, strand: Strand) -> End:
        """Decode to the end, or until preempted; then the pages have been out, and are back when this returns."""
        done: asyncio.Future[End] = aio.new_future()
        output = strand.output
        assert output.since is not None
        sequence = Sequence(
            job.request,
            strand.item,
            done,
            limit=output.max_tokens,
            since=output.since,
            on_tokens=output.emit,
            streams=output.streams,
            most_steps=STOP_STRING_STEPS if output.sampling.stop_strings else 1 << 30,
        )
        self._loop.add_decode(sequence)
        try:
            end = await done
            if end.preempted:
                await self._make_room(job, strand, sequence)
            return end
        finally:
            self._loop.made_room(sequence)
            await self._loop.leave(sequence)

    # Making room

    async def _make_room(self, job: Job, strand: Strand, sequence: Sequence) -> None:
        """Out to the node's DRAM and back; or `Preempted`, and the job is computed again.

        A job that only waits must not keep others waiting: while branches of it are out, one is at work, or what they
        share is given up too.
        """
        strand.active = False
        if self._settings.preemption == "recompute" or strand.idles:
            raise Preempted(job.request_id, self._name)
        await self._swap(job, strand, sequence)

    async def _swap(self, job: Job, strand: Strand, sequence: Sequence) -> None:
        """Move the strand's own pages to the node's DRAM, wait for pages, and move them back, checksums verified.

        One output alone moves all its pages, so that it keeps none from others meanwhile; of those that were blocks of
        the device tier, what is still there when it comes back is not moved again. Where DRAM has no room, or would
        round what the request wants exact, the prompt is computed again, and what was decoded is replayed.
        """
        item, pool, store = strand.item, self._node.pool, self._pages.store
        if pool.store.lossy and not job.request.accepts_lossy:
            raise Preempted(job.request_id, self._name)
        alone = len(strand.family) == 1
        first, used = 0 if alone else strand.shared, self.pages_for(job, item.start)
        blocks = job.blocks[: strand.shared] if alone else ()
        try:
            slots = await self._node.reserve_saved(job.request_id, used - first, job.request.tenant)
        except PoolFull as full:
            raise Preempted(job.request_id, self._name) from full
        try:
            held = pool.store.regions(slots.slots)
            source = store.regions(item.pages[first:used])
            moved = await self._node.perform(Copy(source, held, job.request_id, _name(job, first), checksum=True))
            self._give_back(strand)
            if alone:
                self._pages.release(strand.held)
            del item.pages[first:]
            self._loop.made_room(sequence)
            self._publish()
            again = await self._pages_again(job, strand, self.pages_for(job, item.start + 1) - first, blocks)
            item.pages.extend(again.pages)
            strand.holds = True
            if alone:
                strand.held.share(again)
                strand.shared = again.shared
            await self._load_back(job, item.pages[first:used], slots, moved.written, first, again.shared)
            job.lossy = job.lossy or pool.store.lossy
        finally:
            pool.release(slots)

    async def _load_back(
        self, job: Job, pages: list[int], slots: Reservation, checksums: tuple[bytes, ...], first: int, there: int
    ) -> None:
        """Into `pages` what was put into `slots`, but for the first `there`; the first page is of block `first`."""
        if there < len(pages):
            source = self._node.pool.store.regions(slots.slots[there:])
            target = self._pages.store.regions(pages[there:])
            name = _name(job, first + there)
            await load(self._node, self._node.pool, source, checksums[there:], (), target, job.request_id, name)

    async def _pages_again(self, job: Job, strand: Strand, count: int, blocks: tuple[BlockId, ...]) -> Held:
        def preempted() -> Preempted:
            return Preempted(job.request_id, self._name)

        if strand.idles:
            raise preempted()
        strand.given_up = given_up = aio.new_future()
        try:
            take = self._pages.take(job.request_id, count, blocks, len(blocks), job.request.accepts_lossy)
            again = await aio.unless(given_up, preempted, take, self._pages.release)
            job.lossy = job.lossy or again.lossy
            strand.active = True
            return again
        finally:
            strand.given_up = None

    def _give_back(self, strand: Strand, filled: tuple[BlockId, ...] = (), lossy: bool = False) -> None:
        """Its own pages are free; those that hold `filled` blocks may stay with the device tier."""
        if strand.holds:
            strand.holds = False
            self._pages.give_back(strand.own, strand.item.request_id, filled, strand.shared, lossy)

    # Writing back

    def _filled(self, job: Job) -> tuple[BlockId, ...]:
        """The full blocks that output 0 leaves: the prompt's, and those that it filled itself, where a block's name
        does not depend on which program made its bits."""
        request, output = job.request, job.first.tokens
        if not self.shares or request.tokens is None or not output:
            return job.blocks
        history = np.concatenate([request.tokens, np.array(output[:-1], np.int32)])
        return self._namer.from_tokens(request.tenant, history)

    async def _write_back(self, job: Job, blocks: tuple[BlockId, ...], pages: list[int]) -> None:
        """Put the full blocks that output 0 filled into the node's pool, for the session's next turn. A pool without
        room is left alone."""
        request, pool, first = job.request, self._node.pool, len(job.blocks)
        if len(blocks) == first:
            return
        pin = pool.pin(request.request_id, blocks, accepts_lossy=request.accepts_lossy)
        reservation: Reservation | None = None
        try:
            new = len(blocks) - len(pin)
            if len(pin) < first or new <= 0:
                return
            first = len(pin)
            reservation = await self._node.reserve_saved(request.request_id, new, request.tenant)
            target = pool.store.regions(reservation.slots)
            source = self._pages.store.regions(pages[first : first + new])
            moved = await self._node.perform(Copy(source, target, request.request_id, blocks[first], checksum=True))
            before = blocks[first - 1] if first else None
            pool.commit(reservation, blocks[first:], before, moved.written, job.lossy)
        except (PoolFull, TransferError) as problem:  # the output is complete: only a later hit is lost
            left = blocks[first:]
            self._recorder.event(
                aio.now_ns(),
                "write_back_failed",
                job.request_id,
                self._node.name,
                tier=pool.store.tier,
                first_block=left[0],
                blocks=len(left),
                nbytes=len(left) * pool.store.block_bytes,
                detail=str(problem),
            )
        finally:
            pool.release(pin)
            if reservation is not None:
                pool.release(reservation)


def _name(job: Job, block: int) -> BlockId:
    """What the log calls a span that begins with this block; -1 beyond the prompt's."""
    return job.blocks[block] if block < len(job.blocks) else -1
