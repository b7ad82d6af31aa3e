"""The driver: who is sent when, what ends a session, what ends the drive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from mcjax import aio
from mcjax.backends.virtual import VirtualLoop
from mcjax.errors import RequestError
from mcjax.types import NS_PER_S, Request, Script, Tokens
from mcjax.workload.base import Turn
from mcjax.workload.chat import Chat
from mcjax.workload.driver import Answer, ScriptBook, drive
from mcjax.workload.mooncake import Mooncake
from mcjax.workload.synthetic import Synthetic


@dataclass
class Fixed:
    """A session of turns that think for a second."""

    index: int
    start_ns: int
    turns: int
    answers: list[Tokens | None] = field(default_factory=list[Tokens | None])
    sent: int = 0

    def next_turn(self, answer: Tokens | None) -> Turn | None:
        self.answers.append(answer)
        if self.sent == self.turns:
            return None
        turn = self.sent
        self.sent += 1
        arrival_ns = self.start_ns if turn == 0 else NS_PER_S
        return Turn(Request(self.index * 1000 + turn, arrival_ns, 1, 8), Script(self.index + turn + 1))


class Listed:
    """A workload of given sessions."""

    name = "listed"
    block_tokens: int | None = None

    def __init__(self, *sessions: Fixed):
        self._sessions = sessions

    def sessions(self) -> Iterator[Fixed]:
        return iter(self._sessions)

    def inputs(self) -> dict[str, str]:
        return {}


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def body() -> None:
        await main()

    VirtualLoop().run(body)


def test_sessions_start_on_time_and_think_between_turns() -> None:
    log: list[tuple[float, int, float]] = []

    async def submit(turn: Turn) -> Answer:
        log.append((aio.now_ns() / NS_PER_S, turn.request.request_id, turn.request.arrival_ns / NS_PER_S))
        await aio.sleep_ns(2 * NS_PER_S)
        return Answer(True)

    workload = Listed(Fixed(0, 0, 2), Fixed(1, 0, 1), Fixed(2, NS_PER_S, 2))
    run(lambda: drive(workload, submit, ScriptBook()))
    assert log == [(0, 0, 0), (0, 1000, 0), (1, 2000, 1), (3, 1, 3), (4, 2001, 4)]


def test_answers_reach_the_session_and_scripts_the_book() -> None:
    answer = np.array([1, 2], np.int32)
    scripts = ScriptBook()

    async def submit(turn: Turn) -> Answer:
        assert scripts.script(turn.request.request_id) is turn.script, "the script must be there before the request"
        return Answer(True, answer)

    session = Fixed(0, 0, 2)
    run(lambda: drive(Listed(session), submit, scripts))
    assert session.answers[0] is None
    assert session.answers[1] is answer
    assert session.answers[2] is answer
    assert len(scripts) == 2


def test_a_turn_that_was_not_completed_ends_its_session_only() -> None:
    sent: list[int] = []

    async def submit(turn: Turn) -> Answer:
        sent.append(turn.request.request_id)
        return Answer(turn.request.request_id != 1)

    run(lambda: drive(Listed(Fixed(0, 0, 3), Fixed(1, 0, 3)), submit, ScriptBook()))
    assert sorted(sent) == [0, 1, 1000, 1001, 1002]


def test_what_submit_raises_ends_the_drive_at_once_and_every_session_with_it() -> None:
    ended: list[int] = []

    async def submit(turn: Turn) -> Answer:
        try:
            await aio.sleep_ns((3 if turn.request.request_id == 0 else 1) * NS_PER_S)
            if turn.request.request_id == 1000:
                raise ValueError("a bug")
            return Answer(True)
        finally:
            ended.append(turn.request.request_id)

    async def main() -> None:
        with pytest.raises(ValueError, match="a bug"):
            await drive(Listed(Fixed(0, 0, 1), Fixed(1, 0, 1), Fixed(2, 9 * NS_PER_S, 1)), submit, ScriptBook())
        assert aio.now_ns() == NS_PER_S

    run(main)
    assert ended == [1000, 0]


def test_cancelling_the_drive_settles_every_session() -> None:
    ended: list[int] = []

    async def submit(turn: Turn) -> Answer:
        try:
            await aio.sleep_ns(60 * NS_PER_S)
        finally:
            await aio.sleep_ns(NS_PER_S)  # cleaning up takes time, and is waited for
            ended.append(turn.request.request_id)
        return Answer(True)

    async def main() -> None:
        task = aio.spawn(drive(Listed(Fixed(0, 0, 1), Fixed(1, 0, 1)), submit, ScriptBook()), "drive")
        await aio.sleep_ns(5 * NS_PER_S)
        await aio.settle(task)
        assert task.cancelled()
        assert ended == [0, 1000]

    run(main)


def test_the_same_on_a_stock_loop() -> None:
    sent: list[int] = []

    async def submit(turn: Turn) -> Answer:
        sent.append(turn.request.request_id)
        await aio.sleep_ns(1_000_000)
        return Answer(True)

    workload = Synthetic(1, sessions=5, turns=2, rate_per_s=1e4, think_time_s=1e-4)
    asyncio.run(drive(workload, submit, ScriptBook()))
    assert sorted(sent) == [session * 1000 + turn for session in range(5) for turn in range(2)]


@pytest.mark.parametrize("workload", [Chat(1), Synthetic(1, sessions=30)], ids=["chat", "synthetic"])
def test_two_drives_are_equal(workload: Chat | Synthetic) -> None:
    def once() -> list[tuple[int, int, int]]:
        log: list[tuple[int, int, int]] = []

        async def submit(turn: Turn) -> Answer:
            log.append((aio.now_ns(), turn.request.request_id, turn.request.prompt_tokens))
            assert turn.request.arrival_ns == aio.now_ns()
            await aio.sleep_ns(turn.script.output_tokens * 1_000_000)
            return Answer(True)

        run(lambda: drive(workload, submit, ScriptBook()))
        return log

    assert once() == once()


def test_a_trace_plays_open_loop(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    row = '{"timestamp": %d, "input_length": 3, "output_length": 2, "hash_ids": [%d]}\n'
    path.write_text("".join(row % (3000 * (index // 4), index) for index in range(40)))
    starts: list[int] = []

    async def submit(turn: Turn) -> Answer:
        starts.append(aio.now_ns() // NS_PER_S)
        assert turn.request.request_id == len(starts) - 1, "ties must keep the order of the file"
        await aio.sleep_ns(100 * NS_PER_S)
        return Answer(False)

    run(lambda: drive(Mooncake(str(path)), submit, ScriptBook()))
    assert starts == [3 * (index // 4) for index in range(40)]


def test_script_book_refuses_what_it_cannot_answer() -> None:
    scripts = ScriptBook()
    scripts.put(1, Script(5))
    with pytest.raises(RequestError, match="request 1"):
        scripts.put(1, Script(6))
    with pytest.raises(RequestError, match="request 2"):
        scripts.script(2)
    scripts.forget(1)
    scripts.forget(1)
    with pytest.raises(RequestError):
        scripts.script(1)
