"""Plays a workload: starts sessions when they are due, sends each next turn after the answer and the time to think."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from mcjax import aio
from mcjax.errors import RequestError
from mcjax.types import Script, Tokens
from mcjax.workload.base import Session, Turn, Workload


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """How a turn ended. `tokens` (`[T]`) is None where token ids do not exist; the session then goes by its script."""

    completed: bool
    tokens: Tokens | None = None


class ScriptBook:
    """The hidden futures of the requests sent so far (`types.Scripts`), for simulated executors and the oracle only."""

    def __init__(self) -> None:
        self._scripts: dict[int, Script] = {}

    def put(self, request_id: int, script: Script) -> None:
        if request_id in self._scripts:
            raise RequestError(request_id, "this id has a script already; a workload must number its requests uniquely")
        self._scripts[request_id] = script

    def script(self, request_id: int) -> Script:
        found = self._scripts.get(request_id)
        if found is None:
            raise RequestError(request_id, "has no script; requests to a simulated executor must come from a workload")
        return found

    def forget(self, request_id: int) -> None:
        """Drop a script, if it is there. Only when no executor can still be working on the request."""
        self._scripts.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._scripts)


async def drive(workload: Workload, submit: Callable[[Turn], Awaitable[Answer]], scripts: ScriptBook) -> None:
    """Play `workload` to its end: return when every session has ended.

    `submit` sends a turn and returns when it has ended, well or not; a session whose turn was not completed ends there,
    and so does one whose child did. It must not raise for a failed request: whatever it raises ends the drive, and is
    raised here. Sessions of one instant start in the workload's order, children in their turn's. A first turn bears its
    planned arrival, even if the loop was late for it, so that latencies count the wait; a later one arrives when its
    thinking is over. Scripts stay in the book: after a fault, an executor may still be busy with a request that ended
    elsewhere. Cancelling the drive ends every session before it returns.
    """
    running = 0
    ended = aio.Signal("workload.ended")
    # A scope drops its tasks as they end, so that a trace of many thousand sessions holds only those under way.
    scope = aio.Scope("workload")

    def begin(session: Session, name: str, child: bool = False) -> asyncio.Task[bool]:
        nonlocal running
        running += 1
        return scope.spawn(play(session, name, child), name)

    async def play(session: Session, name: str, child: bool) -> bool:
        """Whether the session played to its end: its own turns, and the children that they waited for."""
        nonlocal running
        turn = session.next_turn(None)
        if turn is not None and child:
            turn = await _due(turn, turn.request.arrival_ns)
        completed = True
        while turn is not None:
            scripts.put(turn.request.request_id, turn.script)
            answer = await submit(turn)
            completed = answer.completed
            if completed:
                started = f"{name}, request {turn.request.request_id}, child"
                children = [begin(other, f"{started} {index}", True) for index, other in enumerate(turn.children)]
                for index, other in enumerate(turn.background, start=len(children)):
                    begin(other, f"{started} {index}", True)
                completed = all([await other for other in children])
            turn = session.next_turn(answer.tokens) if completed else None
            if turn is not None:
                turn = await _due(turn, turn.request.arrival_ns)
        running -= 1
        ended.set()
        return completed

    async def start() -> None:
        for index, session in enumerate(workload.sessions()):
            if session.start_ns > aio.now_ns():
                await aio.sleep_until_ns(session.start_ns)
            begin(session, f"session {index}")
        while running:
            await ended.wait()

    async with scope:
        await scope.run(start())


async def _due(turn: Turn, delay_ns: int) -> Turn:
    """The turn, once so much time has passed; it arrives then."""
    await aio.sleep_ns(delay_ns)
    return replace(turn, request=replace(turn.request, arrival_ns=aio.now_ns()))
