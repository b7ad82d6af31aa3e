"""The frontend: where a client's request becomes a job, and where however it ended is written down, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from mcjax import aio
from mcjax.errors import McjaxError, Rejected, UserError
from mcjax.kvpool.keys import BlockNamer
from mcjax.sched.conductor import Conductor
from mcjax.sched.job import Job, Listener
from mcjax.types import SLO, Recorder, Request, RequestRow, RequestState


@dataclass(slots=True, eq=False)
class Ticket:
    """A submitted request. Awaiting `task` gives its row, however it ended."""

    task: asyncio.Task[RequestRow]
    started: bool = False
    cancelled: bool = False

    def cancel(self) -> None:
        """The client goes away: whatever the request holds anywhere is given back."""
        self.cancelled = True
        if self.started and not self.task.done():
            self.task.cancel()  # before its first step it would end without a row; `_life` looks at the flag instead


class Frontend:
    """Takes requests; `keeps_tokens` is False in worlds where token ids do not exist."""

    def __init__(
        self,
        conductor: Conductor,
        namer: BlockNamer,
        slo: Callable[[Request], SLO],
        recorder: Recorder,
        keeps_tokens: bool,
    ):
        self.submitted = 0
        self.ended = 0
        self.running: dict[int, Ticket] = {}
        self._conductor = conductor
        self._namer = namer
        self._slo = slo
        self._recorder = recorder
        self._keeps_tokens = keeps_tokens

    def submit(self, request: Request, listener: Listener | None = None) -> Ticket:
        """Start serving; `listener(tokens, ends_ns)` is called as output tokens arrive."""
        self.submitted += 1
        job = self._job(request, listener)
        ticket = Ticket(aio.spawn(self._life(job), f"request.{request.request_id}"))
        self.running[request.request_id] = ticket
        return ticket

    def _job(self, request: Request, listener: Listener | None) -> Job:
        blocks = self._blocks(request)
        slo = request.slo or self._slo(request)
        row = RequestRow(request, blocks, slo_ttft_s=slo.ttft_s, slo_tbt_s=slo.tbt_s)
        output: list[int] | None = [] if self._keeps_tokens and request.tokens is not None else None
        return Job(request, blocks, slo, row, output, listener=listener)

    def _blocks(self, request: Request) -> tuple[int, ...]:
        if request.tokens is not None:
            return self._namer.from_tokens(request.tenant, request.tokens)
        full = request.prompt_tokens // self._namer.kv_format.block_tokens
        return self._namer.from_trace_ids(request.tenant, request.trace_ids or (), full)

    async def _life(self, job: Job) -> RequestRow:
        row, request_id = job.row, job.request_id
        self._recorder.event(
            aio.now_ns(), "submit", request_id, "frontend", tokens=job.request.prompt_tokens, blocks=len(job.blocks)
        )
        ticket = self.running[request_id]
        ticket.started = True
        try:
            if ticket.cancelled:
                raise asyncio.CancelledError
            await self._conductor.serve(job)
            row.state = RequestState.COMPLETED
        except Rejected as problem:
            row.state, row.reason = RequestState.REJECTED, problem.reason
        except UserError:
            raise
        except McjaxError as problem:
            row.state, row.reason = RequestState.FAILED, str(problem)
        except asyncio.CancelledError:
            row.state, row.reason = RequestState.CANCELLED, "cancelled"
            if not ticket.cancelled:
                row.reason = "the run ended"
                raise
        finally:
            self._end(job)
        return row

    def _end(self, job: Job) -> None:
        row = job.row
        row.output, row.output_tokens = job.output, job.produced
        row.finish_ns = int(row.token_ends_ns[-1][-1]) if row.state is RequestState.COMPLETED else aio.now_ns()
        self.ended += 1
        del self.running[job.request_id]
        self._recorder.event(
            aio.now_ns(), row.state, job.request_id, "frontend", tokens=job.produced, detail=row.reason
        )
        self._recorder.request(row)
