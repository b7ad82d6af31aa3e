"""Weka traces of agentic coding: conversations that start sub-agents and wait for them, replayed in closed loop."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Self

from mcjax.types import Request
from mcjax.workload.base import Turn
from mcjax.workload.files import find
from mcjax.workload.replay import Pacing, Recorded, Replaying
from mcjax.workload.streams import rate
from mcjax.workload.weka_file import Agent, read

SOURCE = (
    "The traces are in traces/ of callanjfox/kv-cache-tester, and in the data sets cc-traces-weka of semianalysisai; "
    "docs/workload.md has the format"
)


class Weka:
    """Replays Weka conversations. The files have no time between conversations: they start at a rate (Poisson).

    A turn goes out when the one before has been answered, all sub-agents that it started have ended, and the recorded
    pause is over. Sub-agents of one turn run side by side, each a session of its own; those that were launched in the
    background hold nobody up. Prompts are the recorded ones, by their block ids, whatever the system answers.

    Args:
        path: a folder of `.json` files, a conversation each; one such file; or a JSONL file, a conversation a line. As
            given, else under `$MCJAX_TRACES`, else under `./traces`.
        seed: of the `workload` stream; 0 or more. The arrivals are drawn.
        rate_per_s: conversations that start in a second.
        max_tokens: the limit that requests carry; the recorded lengths, clipped to it, go into the scripts.
        max_think_s: no pause is longer than this; None for all as recorded (some last days).
        limit: take only the first so many conversations; None for all.

    Raises `ConfigError` for a path or value that cannot work, `TraceError` for the first line that cannot be read.
    """

    def __init__(
        self,
        path: str,
        seed: int = 0,
        rate_per_s: float = 0.1,
        max_tokens: int = 8192,
        max_think_s: float | None = None,
        limit: int | None = None,
    ):
        self.name = "weka"
        self._pacing = Pacing(seed, rate("rate_per_s", rate_per_s), max_think_s)
        self._replaying = Replaying(max_tokens=max_tokens, limit=limit)
        self._corpus, self._inputs = read(find(path, SOURCE, folder=None), limit)
        self.block_tokens: int | None = self._corpus.block_tokens

    def reseeded(self, seed: int) -> Self:
        """The same conversations, started at other times."""
        other = copy.copy(self)
        other._pacing = replace(self._pacing, seed=seed)
        return other

    @property
    def total_requests(self) -> int:
        return sum(_size(agent) for agent in self._corpus.agents)

    def sessions(self) -> Iterator[Recorded]:
        """Conversations in the order of the files."""
        agents = self._corpus.agents
        first_id = 0
        for start_ns, agent in zip(self._pacing.starts_ns([0] * len(agents)), agents, strict=True):
            yield Recorded(start_ns, self._turns(agent, agent.name, first_id, start_ns, None))
            first_id += _size(agent)

    def inputs(self) -> dict[str, str]:
        return dict(self._inputs)

    def _turns(self, agent: Agent, session: str, first_id: int, start_ns: int, parent: int | None) -> Iterator[Turn]:
        """The turns of an agent. Request ids count from `first_id`: a call, all of its sub-agents, the next call."""
        request_id = first_id
        for number_, call in enumerate(agent.calls):
            request = Request(
                request_id=request_id,
                arrival_ns=start_ns if number_ == 0 else self._pacing.pause_ns(call.think_ns),
                prompt_tokens=call.input_tokens,
                max_tokens=self._replaying.max_tokens,
                trace_ids=self._corpus.block_ids(call),
                trace_block_tokens=self._corpus.block_tokens,
                session=session,
                turn=number_,
                parent=parent,
            )
            parent, child_id = request_id, request_id + 1
            sessions: list[Recorded] = []
            for child in [*call.children, *call.background]:
                pause_ns = self._pacing.pause_ns(child.calls[0].think_ns)
                name = f"{session}/{child.name}"
                sessions.append(Recorded(pause_ns, self._turns(child, name, child_id, pause_ns, request_id)))
                child_id += _size(child)
            awaited = len(call.children)
            script = self._replaying.script(call.output_tokens)
            yield Turn(request, script, tuple(sessions[:awaited]), tuple(sessions[awaited:]))
            request_id = child_id


def _size(agent: Agent) -> int:
    """Requests of an agent and of those that it starts."""
    return sum(1 + sum(_size(child) for child in [*call.children, *call.background]) for call in agent.calls)
