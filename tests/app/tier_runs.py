"""Runs of the real engine over three small tiers, and the same requests computed from scratch.

Tests import it in processes of their own: one engine a process, as a user has it.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mcjax
from mcjax.track.run import Run
from mcjax.transfer.transports import file
from mcjax.transfer.transports.disk import Disk
from mcjax.types import Request, Tokens
from mcjax.workload.base import Session, Turn
from mcjax.workload.chat import Chat

TENANTS = {
    "helpdesk": {"share": 1.0, "system_prompt_tokens": 100},
    "research": {"share": 1.0, "system_prompt_tokens": 120},
}
BLOCK_TOKENS = 16
PAGE_BYTES = 4096

BASE = (
    *("cluster=1m", "verify=false", "track.sinks.0.overview=false", f"kvpool.block_tokens={BLOCK_TOKENS}"),
    *("backend.chunk_tokens=128", "backend.max_context_tokens=1024"),
)


def chat(sessions: int, turns: int = 4) -> Chat:
    """Conversations whose prompts begin alike, by tenant, and grow with each turn. All talk at once."""
    return Chat(
        7,
        sessions,
        turns,
        TENANTS,
        note_tokens=(0, 200),
        user_tokens=(60, 90),
        output_tokens=(12, 24),
        rate_per_s=50.0,
        think_time_s=0.3,
    )


class Mapped:
    """Another workload whose requests are changed on their way."""

    name = "mapped"
    block_tokens: int | None = None

    def __init__(self, inner: Chat, change: Callable[[Request], Request]):
        self._inner, self._change = inner, change

    def sessions(self) -> Iterator[Session]:
        for session in self._inner.sessions():
            yield _MappedSession(session, self._change)

    def inputs(self) -> dict[str, str]:
        return {}


class _MappedSession:
    def __init__(self, inner: Any, change: Callable[[Request], Request]):
        self._inner, self._change = inner, change
        self.start_ns = inner.start_ns

    def next_turn(self, answer: Tokens | None) -> Turn | None:
        turn = self._inner.next_turn(answer)
        return None if turn is None else dataclasses.replace(turn, request=self._change(turn.request))


def alone(sessions: int, turns: int = 4) -> Mapped:
    """The same conversations, but each request is of a tenant of its own: nobody can use anything of another."""
    return Mapped(
        chat(sessions, turns),
        lambda request: dataclasses.replace(request, tenant=f"{request.tenant}-{request.request_id}"),
    )


class Resumed:
    """The conversations of `chat` from turn `after` on: what was answered before is in `answers`, by request."""

    name = "resumed"
    block_tokens: int | None = None

    def __init__(self, inner: Chat, after: int, answers: Mapping[int, Sequence[int]]):
        self._inner, self._after, self._answers = inner, after, answers

    def sessions(self) -> Iterator[Session]:
        for session in self._inner.sessions():
            yield _ResumedSession(session, self._after, self._answers)

    def inputs(self) -> dict[str, str]:
        return {}


class _ResumedSession:
    def __init__(self, inner: Any, after: int, answers: Mapping[int, Sequence[int]]):
        self._inner, self._after, self._answers = inner, after, answers
        self.start_ns = inner.start_ns

    def next_turn(self, answer: Tokens | None) -> Turn | None:
        import numpy as np

        while self._after:
            self._after -= 1
            past = self._inner.next_turn(answer)
            if past is None:
                return None
            answer = np.array(self._answers[past.request.request_id], np.int32)
        return self._inner.next_turn(answer)


def run(*overrides: str, **strategies: Any) -> Run:
    """A run of the built-in model; whatever `overrides` say beside the rest."""
    return mcjax.run([*BASE, *overrides], progress=False, **strategies)


def tiers(pages: int, pool_blocks: int, ssd_path: str = "tier", ssd_bytes: int = 200_000_000) -> list[str]:
    """Three tiers of these sizes."""
    return [
        *(f"backend.pages={pages}", f"backend.pool_blocks={pool_blocks}", "kvpool.hbm_cache=true"),
        *(f"kvpool.ssd_path={ssd_path}", f"kvpool.ssd_bytes={ssd_bytes}"),
    ]


def outputs(run: Run) -> dict[int, list[int]]:
    """Tokens by request. Everything must have completed."""
    columns = run.requests.select(["request_id", "state", "output"]).to_pydict()
    assert set(columns["state"]) == {"completed"}, run.summary["requests"]
    return dict(zip(columns["request_id"], columns["output"], strict=True))


def hits(run: Run) -> dict[str, int]:
    """Prompt tokens by the tier that had them."""
    return run.summary["tokens_by_tier"]


def blocks_seen(run: Run) -> int:
    """Distinct blocks that came into host memory: the working set, as far as prompts go."""
    events = run.events.to_pylist()
    return sum(one["blocks"] for one in events if one["kind"] == "insert" and one["tier"] == "ssd")


def counted(run: Run, kind: str) -> int:
    """Events of a kind."""
    return run.events.column("kind").to_pylist().count(kind)


class FaultyDisk(Disk):
    """Fails every read number `one_in`, the first soon (how many there are depends on how quick the machine is), and
    flips a bit on disk in one block written in `one_in`, by a seed. Thread-safe."""

    def __init__(self, one_in: int, slot_bytes: int, seed: int = 0):
        self._draw = random.Random(seed)
        self._one_in, self._slot_bytes = one_in, slot_bytes
        self._lock = threading.Lock()
        self.reads = self.failed = self.flipped = 0

    def _strikes(self) -> bool:
        return self._draw.randrange(self._one_in) == 0

    def read(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            self.reads += 1
            if self.reads % self._one_in == self._one_in // 2:
                self.failed += 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(file, views, offset)

    def write(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        done = super().write(file, views, offset)
        for start in range(offset, offset + done, self._slot_bytes):
            with self._lock:
                strikes = self._strikes()
                self.flipped += strikes
            if strikes:
                self._flip(file, start + PAGE_BYTES)
        return done

    def _flip(self, file: int, offset: int) -> None:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.preadv(file, [page], offset)
            page[17] ^= 4
            os.pwritev(file, [page], offset)


def with_faults(one_in: int, slot_bytes: int) -> FaultyDisk:
    """From now on the real world's SSD tier reads and writes by a disk like that."""
    disk = FaultyDisk(one_in, slot_bytes)
    file.Disk = lambda: disk
    return disk


def keep(path: str, **values: Any) -> None:
    """Hand something to the next process."""
    Path(path).write_text(json.dumps(values))


def kept(path: str) -> Any:
    return json.loads(Path(path).read_text())
