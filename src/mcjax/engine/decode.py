"""A decode instance: takes a finished prompt's blocks from its node's pool, and produces the rest of the output.

It never computes a prompt: what it cannot find or verify goes back to the conductor.
"""

from __future__ import annotations

from mcjax.engine.instance import Instance
from mcjax.engine.pages import Held
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
        pages: Held | None = None
        try:
            self._verify(job, record)
            untouched = self.decoder.untouched(job)
            count = self.decoder.pages_to_begin(job)
            accepts_lossy = job.request.accepts_lossy
            pages = await self.pages.take(job.request_id, count, untouched, len(untouched), accepts_lossy)
            job.lossy = job.lossy or pages.lossy
            await self._load(job, record, pages)
            self.keep(job, pages, untouched)
            await self.decoder.generate(job, pages, record.sampler)
        finally:
            self.let_go(job, pages)
            self.done(0)

    def _verify(self, job: Job, record: CompletionRecord) -> None:
        request = job.request
        if record.request_id != request.request_id or record.prompt_tokens != request.prompt_tokens:
            problem = f"the record is of {record.prompt_tokens} tokens of request {record.request_id}"
            raise RecordMismatch(request.request_id, problem)
        if record.layout != self.layout:
            raise RecordMismatch(request.request_id, f"its blocks are laid out as {record.layout}, not {self.layout}")
        if record.blocks != job.blocks or record.pin.blocks != job.blocks:
            raise RecordMismatch(request.request_id, "its blocks are not those of the prompt")
        if len(record.checksums) != len(record.blocks):
            problem = f"it has {len(record.checksums)} checksums for {len(record.blocks)} blocks"
            raise RecordMismatch(request.request_id, problem)
        tail = request.prompt_tokens - len(record.blocks) * self.capacity.page_tokens
        if len(record.tail) != (tail > 0):
            raise RecordMismatch(request.request_id, f"{len(record.tail)} slots for a tail of {tail} tokens")
        sampler, output = record.sampler, job.first
        expected = (request.sampling.seed, request.prompt_tokens + output.produced, output.produced)
        if (sampler.seed, sampler.position, sampler.produced) != expected:
            raise RecordMismatch(request.request_id, f"its sampler is at {sampler.position} of seed {sampler.seed}")
        if output.tokens and sampler.first_token != output.tokens[0]:
            raise RecordMismatch(request.request_id, f"its first token is {sampler.first_token}, not the client's")
        self.node.adopt(record.pin)
        self.node.adopt(record.tail)

    async def _load(self, job: Job, record: CompletionRecord, held: Held) -> None:
        """What the device does not have is in the node's memory."""
        pool, first = self.node.pool, held.cached
        blocks = record.blocks[first:]
        slots = [*pool.region(blocks).slots, *record.tail.slots]
        if slots:
            self.note_lossy(job, blocks)
        # Where decode shares its blocks, or encodings round, this pool may have had another rendering of one, equal but
        # for rounding, and what prefill sent did not replace it: a block is what it was committed as.
        own = pool.checksums(blocks) if self.decoder.shares or job.lossy else record.checksums[first:]
        checksums = (*own, record.tail_checksum)
        if slots:
            target = self.pages.store.regions(held.pages[first : first + len(slots)])
            await load(self.node, pool, pool.store.regions(slots), checksums, blocks, target, job.request_id)
        pool.release(record.pin)
        pool.release(record.tail)
