"""The conductor: carries each job from placement to its last token, and decides between nodes.

It learns of the cluster from reports; it keeps a journal of everything its decisions depended on; when half of a job is
lost it places the job again, and the client never sees a token twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from mcjax import aio
from mcjax.errors import (
    ConfigError,
    ExecutorFailed,
    InstanceDown,
    LeaseLost,
    PoolFull,
    Preempted,
    RecordMismatch,
    RequestFailed,
    TransferError,
)
from mcjax.kvpool.pool import Pool
from mcjax.sched.base import NOWHERE, DecodePort, Located, MixedPort, PrefillPort, Stage, is_asked
from mcjax.sched.job import CompletionRecord, Job, Placement
from mcjax.sched.placement import Strategies, admit, locate, place
from mcjax.sched.reports import ReportBus
from mcjax.sched.state import ClusterState
from mcjax.types import NS_PER_S, BlockId, Recorder, Role, Tier

T = TypeVar("T")

RETRYABLE = (TransferError, LeaseLost, InstanceDown, ExecutorFailed, PoolFull, RecordMismatch)
"""Failures of a place or a path, not of the request: another attempt may succeed."""

RETRY_PAUSE_NS = NS_PER_S // 10


class InstanceHandle(Protocol):
    """What the conductor holds of an instance: its name, its number on the report bus, and a future that is done when
    it is given up for dead."""

    name: str
    number: int
    down: asyncio.Future[None]


class Conductor:
    """One a cluster. `attempts` bounds how often a job may fail in a retryable way; making room is no failure."""

    def __init__(
        self,
        state: ClusterState,
        strategies: Strategies,
        bus: ReportBus,
        rng: np.random.Generator,
        recorder: Recorder,
        attempts: int = 4,
    ):
        if attempts < 1:
            raise ConfigError("sched.attempts", attempts, "must be at least 1")
        self.state = state
        self._strategies = strategies
        self._bus = bus
        self._rng = rng
        self._recorder = recorder
        self._attempts = attempts
        self._instances: dict[str, InstanceHandle] = {}
        self._pools: dict[str, Pool] = {}

    # Membership

    def role_of(self, name: str, proposed: Role) -> Role:
        """The role that an instance which is about to join shall take."""
        self.refresh()
        return self._strategies.roles.assign(name, proposed, self.state.view(aio.now_ns(), 0, ()))

    def join(self, instance: InstanceHandle, node: str, role: Role, pool: Pool, free_tokens: int) -> None:
        """An instance is there, and ready."""
        self._instances[instance.name] = instance
        self._pools[node] = pool
        member = self.state.join(instance.name, node, role, free_tokens)
        if member.index != instance.number:
            raise RuntimeError(f"{instance.name} reports as number {instance.number} and joins as {member.index}")
        self._journal(f"join {instance.name} {node} {role}", [free_tokens])

    def placed_on(self, name: str) -> int:
        """Jobs that count on this instance, whether they have reached it or not."""
        return self.state.placed_on(name)

    def drain(self, name: str) -> None:
        """Place nothing on this instance any more; what it has goes on."""
        self.state.drain(name)
        self._journal(f"drain {name}", [])

    def leave(self, name: str) -> None:
        """The instance has left, or is given up for dead: whoever waits for it is told now."""
        instance = self._instances.pop(name, None)
        if instance is None:
            return
        self.state.leave(name)
        self._journal(f"leave {name}", [])
        if not instance.down.done():
            instance.down.set_result(None)

    # Serving

    async def serve(self, job: Job) -> None:
        """Carry `job` to its last token.

        Raises:
            Rejected: admission refused.
            RequestFailed: every attempt failed.
        """
        failures = 0
        while True:
            job.row.attempts += 1
            try:
                await self._carry(job, self._place(job, job.row.attempts))
                return self._completed(job)
            except Preempted as made_room:
                self._note(job, "recompute", made_room)
            except RETRYABLE as problem:
                self._note(job, "retry", problem)
                if job.complete:  # lost after its last token: the client has everything
                    return self._completed(job)
                failures += 1
                if failures == self._attempts:
                    raise RequestFailed(
                        job.request_id, f"gave up after {failures} attempts; the last: {problem}"
                    ) from problem
                await aio.sleep_ns(failures * RETRY_PAUSE_NS)

    def _note(self, job: Job, kind: str, problem: Exception) -> None:
        detail = f"{type(problem).__name__}: {problem}"
        self._recorder.event(aio.now_ns(), kind, job.request_id, "conductor", detail=detail)

    def _completed(self, job: Job) -> None:
        self._strategies.lengths.observe(job.request, job.first.produced)
        self._journal("completed", [job.request_id, job.first.produced])

    def locate(self, job: Job, blocks: Sequence[BlockId], have: int, exclude: Sequence[tuple[str, Tier]]) -> Located:
        """A prefill instance misses `blocks`, behind the `have` blocks it has: from where, or compute them?

        `exclude` are places where it has looked. It notes in the answer what came of it.
        """
        self.refresh()
        looked = ",".join(f"{node}/{tier}" for node, tier in exclude) or NOWHERE
        self._journal(f"locate {looked} {job.produced}", [job.request_id, have, *blocks])
        return locate(
            job.request,
            blocks,
            have,
            exclude,
            job.produced,
            self.state,
            self._strategies,
            self._rng,
            aio.now_ns(),
            self._recorder,
        )

    def refresh(self) -> None:
        """Fold in every report that has become visible."""
        now_ns = aio.now_ns()
        for report in self._bus.read():
            self._recorder.report(now_ns, report.tick_ns, report.source, report.kind, report.values)
            self.state.fold(report)

    def _place(self, job: Job, attempt: int) -> Placement:
        self.refresh()
        now_ns = aio.now_ns()
        self._journal("place", [job.request_id, attempt])
        return place(
            job.request, job.blocks, job.slo, self.state, self._strategies, self._rng, now_ns, self._recorder, attempt
        )

    async def _carry(self, job: Job, placement: Placement) -> None:
        row, decision = job.row, placement.decision
        row.prefill_instance, row.decode_instance = placement.prefill, placement.decode
        prefill, decode = self._instances[placement.prefill], self._instances[placement.decode]
        self._assign(job, placement)
        try:
            if prefill is decode:
                await _at(prefill, cast("MixedPort", prefill).serve(job, placement))
            else:
                prompt = cast("PrefillPort", prefill).prefill(job, placement)
                # Without its receiver a prompt goes nowhere: the death of either half ends it.
                record = await _at(decode, _at(prefill, prompt, self._release), self._release)
                try:
                    if job.complete:
                        decision.outcome = "completed"
                        return
                    self._recheck(job, placement)
                    self.state.hand_over(job.request_id, aio.now_ns())
                    self._journal("hand_over", [job.request_id])
                    await _at(decode, cast("DecodePort", decode).decode(job, record))
                finally:
                    self._release(record)
            decision.outcome = "completed"
        except BaseException as problem:
            decision.outcome = type(problem).__name__
            raise
        finally:
            _note_outcome(job, placement)
            self.state.settle(job.request_id, aio.now_ns())
            self._journal("settle", [job.request_id])

    def _assign(self, job: Job, placement: Placement) -> None:
        context_tokens = job.request.prompt_tokens + job.produced
        self.state.assign(
            job.request_id,
            placement.prefill_index,
            placement.decode_index,
            placement.prefill_estimate_ns,
            context_tokens,
            job.blocks,
        )
        values = [job.request_id, placement.prefill_index, placement.decode_index]
        self._journal("assign", [*values, placement.prefill_estimate_ns, context_tokens])

    def _recheck(self, job: Job, placement: Placement) -> None:
        """Admission's second look, with the load as it is now that the prompt is done."""
        if not is_asked(self._strategies.admission, Stage.DECODE):
            return
        self.refresh()
        now_ns = aio.now_ns()
        self._journal("recheck", [job.request_id])
        view = self.state.view(now_ns, job.request.prompt_tokens, ())
        placement.update_tbt(view)
        admit(
            job.request,
            placement,
            job.slo,
            view,
            Stage.DECODE,
            self._strategies.admission,
            self._rng,
            now_ns,
            self._recorder,
        )

    def _release(self, record: CompletionRecord) -> None:
        """Whatever became of the job, nothing of it stays held where the record says its blocks are."""
        pool = self._pools.get(record.pin.node)
        if pool is not None:
            pool.release(record.pin)
            pool.release(record.tail)

    def _journal(self, kind: str, values: Sequence[int]) -> None:
        now_ns = aio.now_ns()
        self._recorder.report(now_ns, now_ns, "conductor", kind, values)


async def _at(
    instance: InstanceHandle,
    procedure: Coroutine[Any, Any, T],
    discard: Callable[[T], None] = lambda result: None,
) -> T:
    """Run a procedure on an instance; `InstanceDown` as soon as the instance is given up for dead."""
    return await aio.unless(instance.down, lambda: InstanceDown(instance.name), procedure, discard)


def _note_outcome(job: Job, placement: Placement) -> None:
    """Beside what was expected, what came: the first token, and the mean interval of those after it (of output 0).

    Only of a first attempt: a later one has tokens of the attempts before it.
    """
    output, decision, decode = job.first, placement.decision, placement.decode_decision
    if not output.produced or job.row.attempts > 1:
        return
    first_ns = int(output.ends_ns[0][0])
    decision.outcome_s = (first_ns - decision.time_ns) / NS_PER_S
    if decode is not None:
        decode.outcome = decision.outcome
        if output.produced > 1:
            span_ns = int(output.ends_ns[-1][-1]) - first_ns
            decode.outcome_s = span_ns / (output.produced - 1) / NS_PER_S
