"""A closed-loop conversation: each turn's prompt is everything said so far, and then what the user says next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mcjax.errors import ConfigError
from mcjax.types import CacheHint, Request, Sampling, Script, Tokens
from mcjax.workload.base import Turn
from mcjax.workload.tenants import Tenant

TURNS_PER_SESSION = 1000
"""Request ids are `session * TURNS_PER_SESSION + turn`: unique however the sessions interleave."""


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """What a user says in one turn (`tokens`, `[T]`), what is asked for, and what a simulated model would answer."""

    tokens: Tokens
    max_tokens: int
    script: Script
    think_ns: int = 0
    """Time between the end of the last answer and this turn; unused in a first turn."""


@dataclass(frozen=True, slots=True, eq=False)
class Opening:
    """How a session begins. `shared` (`[T]`) is the prefix that other sessions have too; it opens the first prompt."""

    index: int
    start_ns: int
    tenant: Tenant
    shared: Tokens
    turns: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What holds for every request of a workload."""

    max_prompt_tokens: int | None = None
    """A session ends rather than send a longer prompt."""
    temperature: float = 0.0
    hints: bool = False
    hint_ttl_s: float | None = None
    accepts_lossy: bool = False


class Conversation:
    """One session. `say(turn)` gives the user's message; it must be a function of the turn alone."""

    def __init__(self, opening: Opening, say: Callable[[int], Message], limits: Limits):
        if opening.turns > TURNS_PER_SESSION:
            raise ConfigError("workload.turns", opening.turns, f"must be at most {TURNS_PER_SESSION}")
        self.start_ns = opening.start_ns
        self._opening = opening
        self._say = say
        self._limits = limits
        self._turn: int = 0
        self._history = opening.shared
        self._script = Script(0)

    def next_turn(self, answer: Tokens | None) -> Turn | None:
        """See `workload.base.Session`. The next prompt holds `answer` as it came, or (None) the script's tokens."""
        turn, opening, limits = self._turn, self._opening, self._limits
        if turn > 0:
            said = self._script.tokens if answer is None else answer
            if said is not None:
                self._history = np.concatenate([self._history, said]).astype(np.int32, copy=False)
        if turn >= opening.turns:
            return None
        message = self._say(turn)
        prompt = np.concatenate([self._history, message.tokens]).astype(np.int32, copy=False)
        if limits.max_prompt_tokens is not None and len(prompt) > limits.max_prompt_tokens:
            self._turn = opening.turns
            return None
        prompt.flags.writeable = False
        request_id = opening.index * TURNS_PER_SESSION + turn
        request = Request(
            request_id=request_id,
            arrival_ns=opening.start_ns if turn == 0 else message.think_ns,
            prompt_tokens=len(prompt),
            max_tokens=message.max_tokens,
            tokens=prompt,
            tenant=opening.tenant.name,
            session=f"{opening.tenant.name}-{opening.index}",
            turn=turn,
            parent=request_id - 1 if turn > 0 else None,
            priority=opening.tenant.priority,
            sampling=Sampling(temperature=limits.temperature, seed=request_id),
            hints=self._hints(turn, len(prompt)),
            accepts_lossy=limits.accepts_lossy,
        )
        self._history, self._script, self._turn = prompt, message.script, turn + 1
        return Turn(request, message.script)

    def _hints(self, turn: int, prompt_tokens: int) -> tuple[CacheHint, ...]:
        """What a client knows of its own future: what others share, whether it will be back, and about when."""
        if not self._limits.hints:
            return ()
        hints: list[CacheHint] = []
        if turn == 0 and len(self._opening.shared) > 0:
            hints.append(CacheHint("share", len(self._opening.shared)))
        if turn + 1 < self._opening.turns:
            hints.append(CacheHint("retain", prompt_tokens, self._limits.hint_ttl_s))
        else:
            hints.append(CacheHint("demote", prompt_tokens))
        return tuple(hints)
