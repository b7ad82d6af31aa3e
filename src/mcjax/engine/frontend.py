"""The frontend: where a client's request becomes a job, and where however it ended is written down, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from mcjax import aio
from mcjax.engine.base import MOST_LOGPROBS, MOST_STOPS
from mcjax.engine.detokenize import TextStream
from mcjax.errors import ConfigError, McjaxError, Rejected, UnsupportedSampling, UserError
from mcjax.kvpool.keys import BlockNamer
from mcjax.sched.conductor import Conductor
from mcjax.sched.job import Job
from mcjax.sched.output import Listener, Output, TextListener, joined
from mcjax.types import NS_PER_S, SLO, Branch, Recorder, Request, RequestRow, RequestState, Sampling, Tokenizer

CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class Ticket:
    """A submitted request. Awaiting `task` gives its row, however it ended."""

    task: asyncio.Task[RequestRow]
    started: bool = False
    given_up: str = ""
    """Why it was ended before its time."""
    timer: aio.Timer | None = None

    def cancel(self) -> None:
        """The client goes away: whatever the request holds anywhere is given back."""
        self.give_up(CANCELLED)

    def give_up(self, why: str) -> None:
        """End it now. Of several reasons the first counts."""
        self.given_up = self.given_up or why
        if self.started and not self.task.done():
            self.task.cancel()  # before its first step it would end without a row; `_life` looks at the reason instead


class Frontend:
    """Takes requests; `keeps_tokens` is False in worlds where token ids do not exist.

    `tokenizer` is asked for when the first request wants text; None where nobody knows what text tokens stand for.
    `timeout_s` is for requests that have none of their own (None: no bound).
    """

    def __init__(
        self,
        conductor: Conductor,
        namer: BlockNamer,
        slo: Callable[[Request], SLO],
        recorder: Recorder,
        keeps_tokens: bool,
        tokenizer: Callable[[], Tokenizer] | None = None,
        timeout_s: float | None = None,
    ):
        self.submitted = 0
        self.ended = 0
        self.running: dict[int, Ticket] = {}
        self._conductor = conductor
        self._namer = namer
        self._slo = slo
        self._recorder = recorder
        self._keeps_tokens = keeps_tokens
        self._make_tokenizer = tokenizer
        self._tokenizer: Tokenizer | None = None
        self._timeout_s = timeout_s

    def submit(
        self, request: Request, listener: Listener | None = None, text_listener: TextListener | None = None
    ) -> Ticket:
        """Start serving. As output comes, `listener(tokens, ends_ns)` is called with tokens of output 0, and
        `text_listener(output, text)` with the text of every output.

        Raises `ConfigError` if text is asked for, or stop strings are given, where there is no tokenizer.
        """
        job = self._job(request, listener, text_listener)
        self.submitted += 1
        ticket = Ticket(aio.spawn(self._life(job), f"request.{request.request_id}"))
        timeout_s = self._timeout_s if request.timeout_s is None else request.timeout_s
        if timeout_s is not None:
            deadline_ns = aio.now_ns() + round(timeout_s * NS_PER_S)
            ticket.timer = aio.clock().call_at_ns(deadline_ns, ticket.give_up, f"timeout after {timeout_s:g} s")
        self.running[request.request_id] = ticket
        return ticket

    def _job(self, request: Request, listener: Listener | None, text_listener: TextListener | None) -> Job:
        blocks = self._blocks(request)
        slo = request.slo or self._slo(request)
        row = RequestRow(request, blocks, slo_ttft_s=slo.ttft_s, slo_tbt_s=slo.tbt_s)
        keeps = self._keeps_tokens and request.tokens is not None
        outputs = [Output.of(request, index, keeps) for index in range(request.sampling.n)]
        outputs[0].listener = listener
        # Where there are no tokens a script says when an output ends.
        if text_listener is not None or (request.sampling.stop_strings and keeps):
            for output in outputs:
                output.text, output.text_listener = self._text(request.sampling, keeps), text_listener
        row.token_ends_ns = outputs[0].ends_ns
        return Job(request, blocks, slo, row, outputs)

    def _text(self, sampling: Sampling, keeps_tokens: bool) -> TextStream:
        if self._make_tokenizer is None or not keeps_tokens:
            problem = "text needs a tokenizer and token ids, which this service has not"
            raise ConfigError("sampling.stop_strings", sampling.stop_strings, problem)
        self._tokenizer = self._tokenizer or self._make_tokenizer()
        return TextStream(self._tokenizer, sampling.stop_strings, sampling.min_tokens)

    def _blocks(self, request: Request) -> tuple[int, ...]:
        if request.tokens is not None:
            return self._namer.from_tokens(request.tenant, request.tokens)
        full = request.prompt_tokens // self._namer.kv_format.block_tokens
        return self._namer.from_trace_ids(request.tenant, request.trace_ids or (), full)

    async def _life(self, job: Job) -> RequestRow:
        row, request_id = job.row, job.request_id
        self._recorder.event(
            aio.now_ns(),
            "submit",
            request_id,
            "frontend",
            first_block=job.blocks[0] if job.blocks else -1,
            blocks=len(job.blocks),
            tokens=job.request.prompt_tokens,
        )
        ticket = self.running[request_id]
        ticket.started = True
        try:
            if ticket.given_up:
                raise asyncio.CancelledError
            check_sampling(job.request)
            await self._conductor.serve(job)
            row.state = RequestState.COMPLETED
        except Rejected as problem:
            row.state, row.reason = RequestState.REJECTED, problem.reason
        except UserError:
            raise
        except McjaxError as problem:
            row.state, row.reason = RequestState.FAILED, str(problem)
        except asyncio.CancelledError:
            row.state, row.reason = RequestState.CANCELLED, ticket.given_up or "the run ended"
            if not ticket.given_up:
                raise
            if ticket.given_up != CANCELLED:
                row.state = RequestState.FAILED
        finally:
            self._end(job)
        return row

    def _end(self, job: Job) -> None:
        row, first = job.row, job.first
        row.output, row.output_tokens = first.tokens, job.produced
        row.finish_reason, row.logprobs = first.finish_reason, joined(first.logprobs)
        row.branches = [
            Branch(output.tokens, output.produced, output.finish_reason, joined(output.logprobs))
            for output in job.outputs[1:]
        ]
        if first.produced:
            row.first_token_ns = int(first.ends_ns[0][0])
        row.finish_ns = aio.now_ns()
        if row.state is RequestState.COMPLETED:
            row.finish_ns = max([int(output.ends_ns[-1][-1]) for output in job.outputs])
        self.ended += 1
        ticket = self.running.pop(job.request_id)
        if ticket.timer is not None:
            ticket.timer.cancel()
        self._recorder.event(
            aio.now_ns(), row.state, job.request_id, "frontend", tokens=job.produced, detail=row.reason
        )
        self._recorder.request(row)


def check_sampling(request: Request) -> None:
    """Raise `UnsupportedSampling` for what no executor's sampler gives."""
    sampling = request.sampling
    if (sampling.logprobs or 0) > MOST_LOGPROBS:
        problem = f"sampling.logprobs={sampling.logprobs}, at most {MOST_LOGPROBS} alternatives a token can be told"
        raise UnsupportedSampling(request.request_id, problem)
    if sampling.min_tokens and len(sampling.stop_tokens) > MOST_STOPS:
        problem = f"{len(sampling.stop_tokens)} stop tokens beside sampling.min_tokens, at most {MOST_STOPS} go"
        raise UnsupportedSampling(request.request_id, problem)
