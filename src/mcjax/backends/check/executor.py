"""The checking executor: computes digests, takes arbitrary but seeded times."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mcjax import aio
from mcjax.backends.check.digests import PageView, entry, logprob, next_token
from mcjax.backends.check.faults import FaultCounts, Faults
from mcjax.backends.check.store import ByteStore
from mcjax.engine.base import Capacity, Kind, OnStep, Progress, StepItem, StepPlan
from mcjax.errors import ExecutorFailed, IntegrityError
from mcjax.types import NS_PER_S, Logprobs, Scripts, Tokens

BROKEN = "its logits are not numbers"

STEP_S = (0.5e-3, 3e-3)
TOKEN_S = 20e-6


class CheckExecutor:
    """Reads and writes real bytes in pages. The bytes of a step are written as it ends, step by step."""

    def __init__(
        self,
        name: str,
        capacity: Capacity,
        pages: ByteStore,
        scripts: Scripts,
        rng: np.random.Generator,
        faults: Faults,
        counts: FaultCounts,
    ):
        self.name = name
        self._capacity = capacity
        self._pages = pages
        self._scripts = scripts
        self._rng = rng
        self._faults = faults
        self._counts = counts
        self.problem: ExecutorFailed | None = None
        """What the plan under way, or the next one, shall raise."""
        self.to_break: dict[int, None] = {}
        """Requests that shall come to nothing in their next step."""
        self._stop = False
        self._ends_ns: list[int] = []
        self._busy_ns = 0

    def capacity(self) -> Capacity:
        return self._capacity

    def busy_ns(self) -> int:
        return self._busy_ns

    def step_ends_ns(self) -> NDArray[np.int64]:
        return np.array(self._ends_ns, np.int64)

    def interrupt(self) -> None:
        self._stop = True

    async def run(self, plan: StepPlan, max_steps: int, on_step: OnStep | None = None) -> Progress:
        start_ns = aio.now_ns()
        self._stop = False
        ends_ns = self._ends_ns = []
        produced: list[list[int]] = [[] for _ in plan.items]
        finished: tuple[int, ...] = ()
        failed: dict[int, str] = {}
        if self._hit("raised", self._faults.raised):
            self.problem = ExecutorFailed("MemoryError: injected")
        while len(ends_ns) < max_steps and not (finished or failed) and not (ends_ns and self._stop):
            tokens = sum(item.q_len for item in plan.items)
            await aio.sleep_ns(round((self._rng.uniform(*STEP_S) + tokens * TOKEN_S) * NS_PER_S))
            if self.problem is not None:
                problem, self.problem = self.problem, None
                raise problem
            finished = self._step(plan.items, len(ends_ns), produced)
            if self._hit("broken", self._faults.broken):
                failed[int(self._rng.integers(len(plan.items)))] = BROKEN
            failed.update((at, BROKEN) for at, item in enumerate(plan.items) if item.request_id in self.to_break)
            ends_ns.append(aio.now_ns())
            if on_step is not None:
                last = [tokens[-1] if item.samples else None for item, tokens in zip(plan.items, produced, strict=True)]
                on_step(
                    len(ends_ns) - 1, [None if at in failed else token for at, token in enumerate(last)], ends_ns[-1]
                )
        self._busy_ns += ends_ns[-1] - start_ns
        return Progress(
            len(ends_ns),
            start_ns,
            np.array(ends_ns, np.int64),
            [
                np.array(tokens, np.int32) if item.samples else None
                for item, tokens in zip(plan.items, produced, strict=True)
            ],
            finished,
            failed,
            {at: _logprobs(item, produced[at]) for at, item in enumerate(plan.items) if _wants_logprobs(item)},
        )

    def _hit(self, kind: str, probability: float) -> bool:
        if probability == 0.0 or self._rng.random() >= probability:
            return False
        self._counts.note(kind)
        return True

    def _step(self, items: list[StepItem], step: int, produced: list[list[int]]) -> tuple[int, ...]:
        finished: list[int] = []
        for index, item in enumerate(items):
            view = PageView(self._pages.buffer(), item.pages, self._capacity.page_tokens)
            start = item.start + step
            fed = self._fed(item, step, produced[index])
            before = view.read(start - 1) if start else b""
            self._check_private(item, start, start + len(fed))
            for position, token in enumerate(fed.tolist(), start):
                before = entry(before, token)
                view.write(position, before)
            if not item.samples:
                continue
            end = start + len(fed)
            known = None if item.tokens is None else item.tokens[1:]
            if item.kind is Kind.DECODE and known is not None and step < len(known):
                produced[index].append(int(known[step]))
            else:
                produced[index].append(next_token(view.read_all(end), end, item.sampling))
            script = self._scripts.script(item.request_id)
            if item.generated + step + 1 >= script.output_tokens or produced[index][-1] in item.sampling.stop_tokens:
                finished.append(index)
        return tuple(finished)

    def _check_private(self, item: StepItem, start: int, end: int) -> None:
        """Raise `IntegrityError` if a page that is about to be written into holds a block that others may read."""
        page_tokens = self._capacity.page_tokens
        for page in item.pages[start // page_tokens : -(-end // page_tokens)]:
            if self._pages.header(page) is not None:
                raise IntegrityError(f"{self.name}: request {item.request_id} writes into page {page}, a shared block")

    @staticmethod
    def _fed(item: StepItem, step: int, produced: list[int]) -> Tokens:
        assert item.tokens is not None
        if item.kind is Kind.PREFILL:
            return item.tokens
        if step < len(item.tokens):
            return item.tokens[step : step + 1]
        return np.array(produced[-1:], np.int32)


def _wants_logprobs(item: StepItem) -> bool:
    return item.samples and item.sampling.logprobs is not None


def _logprobs(item: StepItem, produced: list[int]) -> Logprobs:
    first = item.start + item.q_len
    chosen = np.array([logprob(token, at) for at, token in enumerate(produced, first)], np.float32)
    width = item.sampling.logprobs or 0
    tokens = np.repeat(np.array(produced, np.int32)[:, None], width, axis=1)
    return Logprobs(chosen, tokens, np.repeat(chosen[:, None], width, axis=1))
