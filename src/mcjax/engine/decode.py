"""A decode instance: takes a finished prompt's blocks from its node's pool, and produces the rest of the output.

It never computes a prompt: what it cannot find or verify goes back to the conductor.
"""

from __future__ import annotations

from mcjax import aio
from mcjax.engine.instance import Instance
from mcjax.engine.prefix import load
from mcjax.errors import RecordMismatch
from mcjax.sched.job import CompletionRecord, Job
from mcjax.types import Role


class DecodeInstance(Instance):
    """`decode` is the whole life of an output here."""

    role = Role.DECODE

    async def decode(self, job: Job, record: CompletionRecord) -> None:
        """Verify the record, load its blocks, decode to the end, and write back what was filled."""
        self.accept(0)
        pages: list[int] = []
        taken_ns = -1
        try:
            self._verify(job, record)
            pages = await self.pages.take(self.decoder.pages_to_begin(job))
            taken_ns = aio.now_ns()
            await self._load(job, record, pages)
            await self.decoder.generate(job, pages, record.sampler)
        finally:
            self.let_go(job, pages, taken_ns)
            self.done(0)

    def _verify(self, job: Job, record: CompletionRecord) -> None:
        request = job.request
        if record.request_id != request.request_id or record.prompt_tokens != request.prompt_tokens:
            raise RecordMismatch(request.request_id, f"the record is of request {record.request_id}")
        tail = request.prompt_tokens - len(record.blocks) * self.capacity.page_tokens
        if len(record.pin) != len(record.blocks) or len(record.tail) != (tail > 0):
            raise RecordMismatch(request.request_id, f"{len(record.pin)} of {len(record.blocks)} blocks are here")
        sampler, output = record.sampler, job.first
        expected = (request.sampling.seed, request.prompt_tokens + output.produced, output.produced)
        if (sampler.seed, sampler.position, sampler.produced) != expected:
            raise RecordMismatch(request.request_id, f"its sampler is at {sampler.position} of seed {sampler.seed}")
        if output.tokens and sampler.first_token != output.tokens[0]:
            raise RecordMismatch(request.request_id, f"its first token is {sampler.first_token}, not the client's")
        self.node.adopt(record.pin)
        self.node.adopt(record.tail)

    async def _load(self, job: Job, record: CompletionRecord, pages: list[int]) -> None:
        pool = self.node.pool
        slots = [*pool.region(record.blocks).slots, *record.tail.slots]
        # Where decode shares its blocks, this pool may have had another rendering of one, equal but for rounding, and
        # what prefill sent did not replace it: a block is what it was committed as.
        own = pool.checksums(record.blocks) if self.decoder.shares else record.checksums
        checksums = (*own, record.tail_checksum)
        target = self.pages.store.regions(pages[: len(slots)])
        await load(self.node, pool, pool.store.regions(slots), checksums, record.blocks, target, job.request_id)
        pool.release(record.pin)
        pool.release(record.tail)
