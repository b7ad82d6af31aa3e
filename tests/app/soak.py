"""Many short requests through the real engine, with clients that go away at any time and steps that raise now and then.

`python soak.py REQUESTS SEED` prints one line of JSON: how the requests ended, and what memory and threads did.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import threading
import time
from collections import Counter
from typing import Any

import numpy as np

from mcjax import aio
from mcjax.app.build import build, track_settings, workload_of
from mcjax.app.compose import compose
from mcjax.app.plugins import Plugins
from mcjax.app.runner import Performance
from mcjax.engine.service import Service
from mcjax.kvpool.keys import KeyTable
from mcjax.track.console import NullProgress
from mcjax.types import SLO, NullRecorder, Request, RequestState, Sampling

CLIENTS = 12
WARM = 200
"""Requests before anything is measured: buffers, pools and caches find their size."""
EVERY = 20
RAISES_EVERY = 211
"""So many steps of an executor, and one raises."""
CONFIG = (
    "cluster=1p1d",
    "backend.chunk_tokens=32",
    "backend.max_batch=8",
    "backend.max_context_tokens=96",
    "backend.pages=40",
    "backend.pool_blocks=64",
    "backend.poison=true",
    "kvpool.block_tokens=8",
    "verify=false",
    "workload.sessions=1",
)
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Soak(Performance):
    """`total` requests by `CLIENTS` clients, each of which sends the next when the last has ended."""

    def __init__(self, total: int, seed: int, *made: Any):
        super().__init__(*made)
        self._total = total
        self._rng = np.random.default_rng(seed)
        self._prompts = [self._prompt() for _ in range(60)]
        self._numbers = itertools.count()
        self._outputs: dict[tuple[object, ...], list[int]] = {}
        self.ends: Counter[str] = Counter()
        self.problems: list[str] = []
        self.memory: list[int] = []
        self.threads: set[int] = set()
        self.raised = 0

    def _prompt(self) -> np.ndarray:
        """Of 1 to 9 blocks; many begin alike."""
        length = int(self._rng.integers(3, 70))
        begin = np.full(int(self._rng.choice([0, 16, 24])), 7, np.int32)
        return np.concatenate([begin, self._rng.integers(0, 256, length, dtype=np.int32)])[:80]

    async def _drive(self, service: Service) -> None:
        for name in list(service.cluster.instances):
            self._let_raise(self._r.world._executors[name])  # pyright: ignore
        clients = [aio.spawn(self._client(service), f"client {index}") for index in range(CLIENTS)]
        for client in clients:
            await client

    def _let_raise(self, executor: Any) -> None:
        step, steps = executor.step, itertools.count(1)

        def raising(call: object) -> object:
            if next(steps) % RAISES_EVERY == 0:
                self.raised += 1
                raise MemoryError("injected")
            return step(call)

        executor.step = raising

    async def _client(self, service: Service) -> None:
        while (number := next(self._numbers)) < self._total:
            await self._one(service, number)
            if number >= WARM and number % EVERY == 0:
                with open("/proc/self/statm") as statm:
                    self.memory.append(int(statm.read().split()[1]) * PAGE_BYTES)
                self.threads.add(threading.active_count())

    async def _one(self, service: Service, number: int) -> None:
        rng, which = self._rng, int(self._rng.integers(len(self._prompts)))
        prompt, length = self._prompts[which], int(self._rng.integers(1, 9))
        rich = Sampling(0.8, which, top_k=20, top_p=0.9, repetition_penalty=1.2, stop_tokens=(3,), min_tokens=2)
        sampling = rich if which % 4 == 0 else Sampling()
        request = Request(
            number,
            aio.now_ns(),
            len(prompt),
            length,
            tokens=prompt,
            sampling=sampling,
            slo=SLO(float("inf"), float("inf")),
        )
        leaves = str(rng.choice(["stays", "at once", "some time", "with a token"], p=[0.55, 0.05, 0.25, 0.15]))
        leaves_after = int(rng.integers(1, length + 1))
        heard = 0

        def listen(tokens: np.ndarray | None, ends_ns: np.ndarray) -> None:
            nonlocal heard
            heard += len(ends_ns)
            if leaves == "with a token" and heard >= leaves_after:
                aio.clock().call_soon(ticket.cancel)

        ticket = service.frontend.submit(request, listen)
        if leaves == "at once":
            ticket.cancel()
        elif leaves == "some time":
            aio.clock().call_at_ns(aio.now_ns() + int(rng.exponential(20e6)), ticket.cancel)
        row = await ticket.task
        self.ends[row.state.value] += 1
        output = row.output or []
        if row.state is RequestState.FAILED and "injected" not in row.reason:
            self.problems.append(f"request {number}: {row.reason}")
        if row.state is RequestState.CANCELLED and leaves == "stays":
            self.problems.append(f"request {number} was cancelled by nobody")
        if row.state is RequestState.COMPLETED and len(output) != length and (output[-1:] != [3] or len(output) < 3):
            self.problems.append(f"request {number}: {len(output)} of {length} tokens")
        longest = self._outputs.setdefault((which,), output)
        if any(one != other for one, other in zip(output, longest, strict=False)):
            self.problems.append(f"request {number}: {output}, once it was {longest}")
        if len(output) > len(longest):
            self._outputs[which,] = output


def main(total: int, seed: int) -> dict[str, object]:
    config = compose(CONFIG)
    recorder: Any = NullRecorder()
    rehearsal = build(config, Plugins({}), workload_of(config), KeyTable(), recorder, track_settings(config))
    before = threading.active_count()
    soak = Soak(total, seed, rehearsal, NullProgress(), lambda *_: None)
    began_s = time.monotonic()
    soak.run()
    gc.collect()
    quarter = len(soak.memory) // 4
    first, last = (float(np.median(part)) / 2**20 for part in (soak.memory[:quarter], soak.memory[-quarter:]))
    return {
        "ends": dict(soak.ends),
        "raised": soak.raised,
        "problems": soak.problems[:10],
        "rss_first_quarter_mib": round(first, 2),
        "rss_last_quarter_mib": round(last, 2),
        "threads": sorted(soak.threads),
        "threads_left": threading.active_count() - before,
        "seconds": round(time.monotonic() - began_s, 1),
    }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))))
