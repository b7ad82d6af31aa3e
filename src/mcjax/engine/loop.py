"""The step loop: decides what the next step computes, runs it, and hands progress to the sequences.

One loop serves prefill, decode and mixed instances. It also computes the horizon: how many equal steps may pass before
policy could want to act, so that a world may run (or skip over) them in one go.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mcjax import aio
from mcjax.engine.base import Capacity, Executor, Kind, Progress, StepPlan
from mcjax.engine.batch import choose
from mcjax.engine.sequence import End, Sequence, ended, teller
from mcjax.errors import BrokenOutput, ExecutorFailed, McjaxError
from mcjax.sched.base import Batching, Tenancy
from mcjax.sched.output import LENGTH, STOP
from mcjax.sched.reports import Growth
from mcjax.types import Recorder, Tier

NO_STEPS: NDArray[np.int64] = np.zeros(0, np.int64)


def _nobody() -> None:
    pass


class StepLoop:
    """Sequences of one executor. `max_steps` bounds a macro-step (None: only the horizon does).

    `on_lost` hears that the executor has lost its pages: nothing here will ever end, as if the instance had died.
    """

    def __init__(
        self,
        name: str,
        executor: Executor,
        batching: Batching,
        tenancy: Tenancy,
        recorder: Recorder,
        on_change: Callable[[], None],
        more_pages: Callable[[int, int], list[int]],
        max_steps: int | None = None,
    ):
        self.name = name
        self.prefills: list[Sequence] = []
        self.decodes: list[Sequence] = []
        self.waiting_decodes: list[Sequence] = []
        self.context_tokens = 0
        """Tokens held by the sequences being decoded or waiting for it."""
        self._executor = executor
        self._capacity: Capacity = executor.capacity()
        self._batching = batching
        self._tenancy = tenancy
        self._recorder = recorder
        self._on_change = on_change
        self._more_pages = more_pages
        self._max_steps = max_steps or (1 << 30)
        self._wake = aio.Signal(f"{name}.loop")
        self.growth: Growth | None = None
        """What the running decode step adds to `context_tokens`, until the step is applied."""
        self._making_room: dict[Sequence, None] = {}
        self._growths: list[Growth] = []
        self._running: list[Sequence] = []
        self._dead: McjaxError | None = None
        self.on_lost: Callable[[], None] = _nobody

    # Joining and leaving

    def add_prefill(self, sequence: Sequence) -> None:
        """Its place is that of its job: what it waited for before it was ready does not count."""
        self._check_alive()
        place = len(self.prefills)
        while place and self.prefills[place - 1].order > sequence.order:
            place -= 1
        self.prefills.insert(place, sequence)
        self._woken()

    def add_decode(self, sequence: Sequence) -> None:
        self._check_alive()
        self.context_tokens += sequence.item.start
        self.waiting_decodes.append(sequence)
        self._admit()
        self._on_change()
        self._woken()

    async def leave(self, sequence: Sequence) -> None:
        """Take a sequence out; returns when no running step touches its pages any more."""
        removed = self._remove(sequence)
        sequence.send()
        if not sequence.running or self._dead is not None:
            if removed:
                self._on_change()
            return
        if self.growth is not None:
            self.growth = Growth(self.growth.batch - 1, self._executor.step_ends_ns)
            self._growths.append(self.growth)
        self._on_change()
        sequence.left, sequence.left_ns = aio.new_future(), aio.now_ns()
        self._executor.interrupt()
        await ended(sequence.left)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead

    def _woken(self) -> None:
        self._wake.set()
        if self._running:
            self._executor.interrupt()  # no effect on a single step; a macro-step ends at its next boundary

    def _admit(self) -> None:
        while self.waiting_decodes and len(self.decodes) < self._capacity.max_batch:
            self.decodes.append(self.waiting_decodes.pop(0))

    def _remove(self, sequence: Sequence) -> bool:
        """False if it had gone already."""
        if sequence in self.prefills:
            self.prefills.remove(sequence)
            return True
        for group in (self.decodes, self.waiting_decodes):
            if sequence in group:
                group.remove(sequence)
                self.context_tokens -= sequence.item.start
                self._admit()
                return True
        return False

    # Running

    async def run(self) -> None:
        """Forever: plan, run, apply."""
        while True:
            planned = self._plan()
            if planned is None:
                self._on_change()
                await self._wake.wait()
                continue
            self._wake.clear()
            plan, chosen, max_steps = planned
            self._running = chosen
            for sequence in chosen:
                sequence.running = True
            if chosen[0].item.kind is Kind.DECODE:
                self.growth = Growth(len(chosen), self._executor.step_ends_ns)
                self._growths = [self.growth]
            self._on_change()
            on_step = teller(chosen, self._executor.interrupt) if max_steps > 1 else None
            try:
                progress = await self._executor.run(plan, max_steps, on_step)
            except McjaxError as problem:
                self._let_go(chosen)
                if self._dead is not None:
                    return
                if isinstance(problem, ExecutorFailed) and problem.lost_pages:
                    self._dead = problem
                    self.on_lost()
                    return
                self._settle(NO_STEPS)
                for sequence in chosen:
                    self._fail(sequence, problem)
                continue
            except BaseException:
                self._let_go(chosen)  # the loop ends, and its step with it: whoever leaves must not wait for that
                raise
            self._running = []
            if self._dead is not None:
                return
            self._settle(progress.ends_ns)
            self._apply(chosen, progress)
            self._let_go(chosen)

    def _fail(self, sequence: Sequence, problem: McjaxError) -> None:
        self._remove(sequence)
        sequence.send()
        if not sequence.done.done():
            sequence.done.set_exception(problem)

    def kill(self, problem: McjaxError) -> None:
        """The instance is dead: its steps never end, who joins is told, who leaves need not wait.

        Those inside hear of it from the conductor.
        """
        self._dead = problem
        ends_ns = self._executor.step_ends_ns()
        self._settle(ends_ns[ends_ns < aio.now_ns()])  # what it would have gone on to do never happened
        self._let_go(self._running)

    def _let_go(self, chosen: list[Sequence]) -> None:
        self._running = []
        for sequence in chosen:
            sequence.running = False
            if sequence.left is not None and not sequence.left.done():
                sequence.left.set_result(None)

    def _settle(self, ends_ns: NDArray[np.int64]) -> None:
        for growth in self._growths:
            growth.settle(ends_ns)
        self._growths, self.growth = [], None

    def _plan(self) -> tuple[StepPlan, list[Sequence], int] | None:
        prefills = self.prefills
        decodes, horizon = self._ready_decodes()
        if not prefills:
            return (StepPlan([s.item for s in decodes]), decodes, min(horizon, self._max_steps)) if decodes else None
        chunks, decode = choose(prefills, self._tenancy, self._batching, len(decodes), self._capacity.chunk_tokens)
        chosen: list[Sequence] = []
        for sequence, tokens in chunks:
            item, prompt = sequence.item, sequence.request.tokens
            item.q_len = tokens
            item.samples = item.start + tokens == sequence.end
            item.tokens = None if prompt is None else prompt[item.start : item.start + tokens]
            chosen.append(sequence)
        if decode:
            chosen += decodes
        return StepPlan([sequence.item for sequence in chosen]), chosen, 1

    def _ready_decodes(self) -> tuple[list[Sequence], int]:
        """The decodes that have room for a token, and how many steps they could go on together."""
        decodes = list(self.decodes)
        steps = self._steps(decodes)
        if steps and min(steps) <= 0:
            self._grow_pages()
            decodes = [sequence for sequence in self.decodes if self._room(sequence) > 0]
            steps = self._steps(decodes)
        return decodes, min(steps, default=0)

    def _steps(self, decodes: list[Sequence]) -> list[int]:
        """How far each could go on: until its pages are full, or its output is as long as it may be, or somebody wants
        to look at it."""
        page_tokens = self._capacity.page_tokens
        return [
            min(len(item.pages) * page_tokens - item.start, sequence.limit - item.generated, sequence.most_steps)
            for sequence in decodes
            for item in (sequence.item,)
        ]

    def _room(self, sequence: Sequence) -> int:
        """Tokens that still fit into its pages."""
        return len(sequence.item.pages) * self._capacity.page_tokens - sequence.item.start

    def feed(self) -> None:
        """Pages have come free: decodes that stand still for want of one go before those that wait to join."""
        if self._dead is None and self._grow_pages():
            self._woken()

    def made_room(self, sequence: Sequence) -> None:
        """A preempted sequence has given its pages back, or has ended."""
        self._making_room.pop(sequence, None)

    def _grow_pages(self) -> bool:
        """Give a page to every decode that has no room for its next token; True if one got it.

        Where pages have run out it stands still. If it came before somebody else who holds pages here, the last of
        those is preempted: one at a time, since each frees more than a page.
        """
        starving = [sequence for sequence in self.decodes if self._room(sequence) <= 0 and not sequence.running]
        grown = False
        for sequence in sorted(starving, key=lambda sequence: sequence.since):
            page = self._more_pages(sequence.item.request_id, 1)
            if page:
                sequence.item.pages.extend(page)
                grown = True
                continue
            last = max([*self.decodes, *self.waiting_decodes], key=lambda sequence: sequence.since)
            alone = last is sequence and not self.waiting_decodes  # else one that waits for its place holds pages too
            if not self._making_room and not alone and not last.running:
                self._preempt(last)
        return grown

    def _preempt(self, sequence: Sequence) -> None:
        self._remove(sequence)
        self._making_room[sequence] = None
        self._recorder.event(aio.now_ns(), "preempt", sequence.item.request_id, self.name, tokens=sequence.item.start)
        if not sequence.done.done():
            sequence.done.set_result(End(None, aio.now_ns(), preempted=True))

    def _apply(self, chosen: list[Sequence], progress: Progress) -> None:
        steps, failed = progress.steps, progress.failed
        if steps == 0:
            return
        decoded = 0
        finished = frozenset(progress.finished)
        for index, sequence in enumerate(chosen):
            if sequence.item.kind is Kind.DECODE:
                decoded += 1
                self._decoded(sequence, progress, index, index in finished)
            elif index in failed:
                self._fail(sequence, BrokenOutput(sequence.item.request_id, failed[index]))
            else:
                self._chunk_done(sequence, progress, index, index in finished)
        if decoded:
            self._recorder.event(
                int(progress.ends_ns[-1]),
                "decode_step",
                -1,
                self.name,
                blocks=decoded,
                tokens=decoded * steps,
                start_ns=progress.start_ns,
            )

    def _decoded(self, sequence: Sequence, progress: Progress, index: int, finished: bool) -> None:
        item, steps, ends_ns, tokens = sequence.item, progress.steps, progress.ends_ns, progress.tokens[index]
        first = item.generated
        sequence.advance(steps, tokens)
        self.context_tokens += steps
        why = progress.failed.get(index)
        if sequence.left is not None or why is not None:
            sequence.tell_part(progress, index, first)
            if sequence.left is not None:
                self.context_tokens -= steps  # it left while the step ran, and was already taken off
            elif why is not None:
                self._fail(sequence, BrokenOutput(item.request_id, why))
            return
        ended = False
        if tokens is None and not sequence.streams:
            sequence.unsent.append(ends_ns)
        else:
            ended = sequence.on_tokens(first, tokens, ends_ns, progress.logprobs.get(index))
        if ended or finished or item.generated >= sequence.limit:
            self._remove(sequence)
            sequence.send()
            if not sequence.done.done():
                token = None if tokens is None else int(tokens[-1])
                reason = STOP if ended or finished else LENGTH
                sequence.done.set_result(End(token, int(ends_ns[-1]), reason))

    def _chunk_done(self, sequence: Sequence, progress: Progress, index: int, ended: bool) -> None:
        item, end_ns = sequence.item, int(progress.ends_ns[-1])
        start, item.start = item.start, item.start + item.q_len
        self._tenancy.charge(sequence.request, item.q_len)
        page_tokens = self._capacity.page_tokens
        filled = sequence.blocks[start // page_tokens : item.start // page_tokens]
        self._recorder.event(
            end_ns,
            "prefill_step",
            item.request_id,
            self.name,
            tier=Tier.HBM,
            first_block=filled[0] if filled else -1,
            blocks=len(filled),
            tokens=item.q_len,
            start_ns=progress.start_ns,
        )
        if sequence.left is not None:
            return
        if item.start == sequence.end:
            self.prefills.remove(sequence)
        sequence.on_chunk(start, item.start, progress.start_ns)
        if item.start == sequence.end and not sequence.done.done():
            tokens = progress.tokens[index]
            token = None if tokens is None else int(tokens[0])
            reason = STOP if ended else ""
            sequence.done.set_result(End(token, end_ns, reason, logprobs=progress.logprobs.get(index)))
