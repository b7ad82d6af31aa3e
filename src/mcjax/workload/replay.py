"""Replays of traces that tell lengths but not content: every prompt gets block ids of its own, so nothing is shared."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from mcjax.errors import ConfigError
from mcjax.types import NS_PER_S, Request, Script, Tokens
from mcjax.workload.arrivals import arrivals_ns
from mcjax.workload.base import Turn
from mcjax.workload.streams import ARRIVALS, number, rate, stream, whole

LATEST_NS = 2**62


class OneTurn:
    """A session of one request."""

    def __init__(self, turn: Turn):
        self.start_ns = turn.request.arrival_ns
        self._turn: Turn | None = turn

    def next_turn(self, answer: Tokens | None) -> Turn | None:
        turn, self._turn = self._turn, None
        return turn


class Recorded:
    """A session whose turns do not depend on the answers; each is made when it is asked for."""

    def __init__(self, start_ns: int, turns: Iterator[Turn]):
        self.start_ns = start_ns
        self._turns = turns

    def next_turn(self, answer: Tokens | None) -> Turn | None:
        return next(self._turns, None)


@dataclass(slots=True)
class Lengths:
    """A trace in columns, one entry a row. `tenant` indexes `tenants`."""

    arrival_ns: array[int] = field(default_factory=lambda: array("q"))
    input_tokens: array[int] = field(default_factory=lambda: array("q"))
    output_tokens: array[int] = field(default_factory=lambda: array("q"))
    tenant: array[int] = field(default_factory=lambda: array("q"))
    tenants: tuple[str, ...] = ("default",)

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def append(self, arrival_ns: int, input_tokens: int, output_tokens: int, tenant: int = 0) -> None:
        self.arrival_ns.append(arrival_ns)
        self.input_tokens.append(input_tokens)
        self.output_tokens.append(output_tokens)
        self.tenant.append(tenant)


@dataclass(frozen=True, slots=True)
class Replaying:
    """What holds for every replay. Raises `ConfigError` naming the key that cannot work.

    `max_tokens` is the limit that requests carry: never the row's own output length, which goes into the script,
    clipped to `1 .. max_tokens`. Arrivals come `rate_scale` times faster than in the file; `limit` takes the first so
    many rows.
    """

    block_tokens: int = 512
    max_tokens: int = 2048
    rate_scale: float = 1.0
    limit: int | None = None

    def __post_init__(self) -> None:
        whole("block_tokens", self.block_tokens, 1)
        whole("max_tokens", self.max_tokens, 1)
        rate("rate_scale", self.rate_scale)
        if self.limit is not None:
            whole("limit", self.limit, 1)

    def arrival_ns(self, trace_ns: int) -> int:
        """When a request arrives that the trace has at `trace_ns`."""
        return round(trace_ns / self.rate_scale) if self.rate_scale != 1.0 else trace_ns

    def check_last(self, trace_ns: int) -> None:
        """Raise `ConfigError` if the last arrival does not fit 64-bit nanoseconds."""
        if trace_ns / self.rate_scale >= LATEST_NS:
            raise ConfigError("workload.rate_scale", self.rate_scale, "so slow that arrivals exceed 64-bit nanoseconds")

    def script(self, output_tokens: int) -> Script:
        return Script(max(1, min(output_tokens, self.max_tokens)))


@dataclass(frozen=True, slots=True)
class Pacing:
    """When recorded sessions start and how long they pause. Raises `ConfigError` naming the key that cannot work.

    Sessions start at `rate_per_s` (Poisson, drawn from `seed`), or when the file says if that is None. No pause is
    longer than `max_think_s`, if that is given.
    """

    seed: int
    rate_per_s: float | None
    max_think_s: float | None = None

    def __post_init__(self) -> None:
        whole("seed", self.seed, 0)
        if self.rate_per_s is not None:
            rate("rate_per_s", self.rate_per_s)
        if self.max_think_s is not None:
            number("max_think_s", self.max_think_s, 0)

    def starts_ns(self, recorded_ns: list[int]) -> list[int]:
        """When the sessions start that the file has at `recorded_ns`."""
        if self.rate_per_s is None:
            return recorded_ns
        return arrivals_ns(stream(self.seed, ARRIVALS), len(recorded_ns), self.rate_per_s).tolist()

    def pause_ns(self, recorded_ns: int) -> int:
        return recorded_ns if self.max_think_s is None else min(recorded_ns, round(self.max_think_s * NS_PER_S))


class PrivateReplay:
    """A workload of single-turn sessions with private prompts, open loop. Request ids are row numbers of the file.

    Rows need not be in order of time: they are played in order of arrival, ties as in the file.
    """

    def __init__(self, name: str, rows: Lengths, replaying: Replaying, inputs: Mapping[str, str]):
        self.name = name
        self.block_tokens: int | None = replaying.block_tokens
        self._rows = rows
        self._replaying = replaying
        self._inputs = dict(inputs)
        arrivals = np.frombuffer(rows.arrival_ns, np.int64)
        replaying.check_last(int(arrivals.max()) if len(rows) else 0)
        self._order = np.argsort(arrivals, kind="stable")
        blocks = -(-np.frombuffer(rows.input_tokens, np.int64) // replaying.block_tokens)
        self._first_ids = np.concatenate([np.zeros(1, np.int64), np.cumsum(blocks)])

    @property
    def rows(self) -> Lengths:
        """The trace's columns, for statistics."""
        return self._rows

    @property
    def total_requests(self) -> int:
        return len(self._rows)

    def sessions(self) -> Iterator[OneTurn]:
        for index in self._order.tolist():
            yield OneTurn(self._turn(index))

    def inputs(self) -> dict[str, str]:
        return dict(self._inputs)

    def _turn(self, index: int) -> Turn:
        rows = self._rows
        request = Request(
            request_id=index,
            arrival_ns=self._replaying.arrival_ns(rows.arrival_ns[index]),
            prompt_tokens=rows.input_tokens[index],
            max_tokens=self._replaying.max_tokens,
            trace_ids=tuple(range(int(self._first_ids[index]), int(self._first_ids[index + 1]))),
            trace_block_tokens=self._replaying.block_tokens,
            tenant=rows.tenants[rows.tenant[index]],
            session=f"row-{index}",
        )
        return Turn(request, self._replaying.script(rows.output_tokens[index]))
