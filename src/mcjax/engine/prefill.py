"""A prefill instance: computes prompts, and writes their blocks to the pool node that the conductor named.

It knows the pool and the conductor, never the instance that will decode.
"""

from __future__ import annotations

from mcjax import aio
from mcjax.engine.instance import Instance
from mcjax.engine.node import Node
from mcjax.engine.pages import Held
from mcjax.engine.stream import BlockStream, Piece
from mcjax.errors import BrokenOutput, LossyOnly
from mcjax.kvpool.holds import Hold, Pin, Reservation
from mcjax.sched.job import CompletionRecord, Job, Placement
from mcjax.types import Role


class PrefillInstance(Instance):
    """`prefill` is the whole life of a prompt here."""

    role = Role.PREFILL

    async def prefill(self, job: Job, placement: Placement) -> CompletionRecord:
        """Compute the prompt, streaming each finished chunk to the receiving node; hand over by the record returned."""
        placement.order = self.accept(placement.prefill_estimate_ns)
        undone_ns = placement.prefill_estimate_ns
        receiver = self.nodes[placement.receiving_node]
        held: list[tuple[Node, Hold]] = []
        pages: Held | None = None
        handed_over = False
        try:
            if receiver.pool.store.lossy and not job.request.accepts_lossy:
                raise LossyOnly(job.request_id, f"on {receiver.name}, from where it would be decoded")
            page_count = self.decoder.pages_for(job, job.request.prompt_tokens)
            pin, lookup = await self.fetch(job, placement)
            held.append((self.node, pin))
            there, arriving = await self._receive(job, receiver, held)
            own = await self._reserve(job, self.node, len(job.blocks) - len(pin), held)
            pages = await self.take_pages(job, page_count, lookup)
            start = await self.load_prefix(job, pin, pages)
            undone_ns = 0  # from here on the loop counts it down
            record = await self._compute(job, placement, pin, own, pages, start, receiver, there, arriving)
            handed_over = True
            return record
        finally:
            self.let_go(job, pages)
            for node, hold in held:
                if not handed_over or node is self.node:
                    self.node.give_back(node, hold)
            self.done(undone_ns)

    async def _receive(self, job: Job, receiver: Node, held: list[tuple[Node, Hold]]) -> tuple[Pin, Reservation]:
        """All the room that the prompt will need at the receiving node, before anything is computed or sent."""
        there = self.node.pin_at(receiver, job.request_id, job.blocks, job.request.accepts_lossy)
        held.append((receiver, there))
        if job.row.attempts == 1 and job.blocks:
            receiver.pool.note_hits(len(there) / len(job.blocks))  # what need not be sent
        arriving = await self._reserve(job, receiver, len(job.blocks) - len(there), held)
        return there, arriving

    async def _reserve(self, job: Job, node: Node, blocks: int, held: list[tuple[Node, Hold]]) -> Reservation:
        tail = 1 if job.request.prompt_tokens > len(job.blocks) * self.capacity.page_tokens else 0
        reservation = await self.node.reserve_at(node, job.request_id, blocks + tail, job.request.tenant)
        held.append((node, reservation))
        return reservation

    async def _compute(
        self,
        job: Job,
        placement: Placement,
        pin: Pin,
        own: Reservation,
        pages: Held,
        start: int,
        receiver: Node,
        there: Pin,
        arriving: Reservation,
    ) -> CompletionRecord:
        """Three things at once: the loop computes, one stream fills the own pool, another the receiver's."""
        blocks, cached, present, on_device = job.blocks, len(pin), len(there), pages.cached
        full, store = len(blocks), self.node.pool.store
        checksums = list(self.node.pool.checksums(blocks[:cached]))

        def sent_on(piece: Piece) -> None:
            """What is in the own pool goes on to the receiver, less what is there already (never the tail)."""
            checksums.extend(piece.checksums or (b"",) * len(piece.region.slots))
            skip = max(0, min(present, full) - piece.first)
            slots = piece.region.slots[skip:]
            if slots:
                onward.push(Piece(piece.first + skip, store.regions(slots), piece.checksums[skip:]))

        onward = BlockStream(
            self.node, receiver, blocks, arriving, there, checksum=False, lossy=job.lossy, at_once=not self.streaming
        )
        inward = BlockStream(self.node, self.node, blocks, own, pin, checksum=True, lossy=job.lossy, on_arrival=sent_on)
        if cached > present:
            # What was loaded was verified then; what the device had already was not, and may have changed since.
            loaded = max(present, min(cached, on_device))
            for first, last in ((present, loaded), (loaded, cached)):
                if first < last:
                    span, pool = blocks[first:last], self.node.pool
                    onward.push(Piece(first, pool.region(span), pool.checksums(span), unverified=last <= on_device))
        first_task = aio.spawn(inward.run(), f"{self.name}.store.{job.request_id}")
        second_task = aio.spawn(onward.run(), f"{self.name}.send.{job.request_id}")
        try:
            sampler = await self.compute_prompt(
                job,
                pages,
                start,
                cached,
                inward,
                (first_task, second_task),
                placement,
                store_tail=True,
            )
            await first_task
            self.keep(job, pages, blocks)
            onward.close()
            await second_task
        except BrokenOutput:
            for node in (self.node, receiver):
                node.pool.drop(blocks[cached:], job.request_id)  # nobody may match what may be no numbers either
            raise
        finally:
            await aio.settle(first_task)
            await aio.settle(second_task)
        return CompletionRecord(
            request_id=job.request_id,
            blocks=blocks,
            checksums=tuple(checksums[:full]),
            prompt_tokens=job.request.prompt_tokens,
            sampler=sampler,
            pin=there,
            tail=arriving,
            tail_checksum=checksums[full] if len(checksums) > full else b"",
            layout=self.layout,
        )
