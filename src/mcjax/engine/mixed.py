"""A mixed instance: the same loop and the same procedures on one executor, the colocated baseline."""

from __future__ import annotations

from mcjax import aio
from mcjax.engine.instance import Instance
from mcjax.engine.pages import Held
from mcjax.engine.stream import BlockStream
from mcjax.errors import BrokenOutput
from mcjax.kvpool.holds import Pin, Reservation
from mcjax.sched.job import Job, Placement, SamplerState
from mcjax.types import Role


class MixedInstance(Instance):
    """`serve` is the whole life of a request here; its pages never move."""

    role = Role.MIXED

    async def serve(self, job: Job, placement: Placement) -> None:
        """Compute the prompt, storing its blocks in the own pool, and decode on the same pages."""
        placement.order = self.accept(placement.prefill_estimate_ns)
        undone_ns = placement.prefill_estimate_ns
        pages: Held | None = None
        pin: Pin | None = None
        own: Reservation | None = None
        pool = self.node.pool
        try:
            page_count = self.decoder.pages_to_begin(job)
            pin, lookup = await self.fetch(job, placement)
            missing = len(job.blocks) - len(pin)
            own = await self.node.reserve_at(self.node, job.request_id, missing, job.request.tenant)
            pages = await self.take_pages(job, page_count, lookup)
            start = await self.load_prefix(job, pin, pages)
            undone_ns = 0  # from here on the loop counts it down
            state = await self._compute(job, placement, pin, own, pages, start)
            pool.release(own)
            pool.release(pin)
            if not job.complete:
                await self.decoder.generate(job, pages, state)
        finally:
            self.let_go(job, pages)
            for hold in (own, pin):
                if hold is not None:
                    pool.release(hold)
            self.done(undone_ns)

    async def _compute(
        self, job: Job, placement: Placement, pin: Pin, own: Reservation, pages: Held, start: int
    ) -> SamplerState:
        stream = BlockStream(self.node, self.node, job.blocks, own, pin, checksum=True, lossy=job.lossy)
        cached = len(pin)
        task = aio.spawn(stream.run(), f"{self.name}.store.{job.request_id}")
        try:
            state = await self.compute_prompt(job, pages, start, cached, stream, (task,), placement, store_tail=False)
            await task
            self.keep(job, pages, self.decoder.untouched(job))
            return state
        except BrokenOutput:
            self.node.pool.drop(job.blocks[cached:], job.request_id)  # nobody may match what may be no numbers
            raise
        finally:
            await aio.settle(task)
