"""Sessions in AIPerf's Mooncake format, as its agentic-code generator writes them: turns as increments, closed loop."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Self

from mcjax.errors import TraceError
from mcjax.types import Request
from mcjax.workload.base import Turn
from mcjax.workload.files import JsonLine, json_lines, opened
from mcjax.workload.replay import Pacing, Recorded, Replaying

SOURCE = "`aiperf synthesize agentic-code` writes such files as dataset.jsonl; docs/workload.md has the format"
MAX_ID = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Row:
    """One turn: what it adds to the conversation, and the pause before it (0 in a first turn)."""

    new_tokens: int
    output_tokens: int
    delay_ns: int = 0


@dataclass(slots=True)
class Talk:
    """One session. `shared`: the ids of the first prompt's full blocks, each standing for all before it too."""

    name: str
    start_ns: int
    shared: tuple[int, ...]
    rows: list[Row] = field(default_factory=list[Row])


def parse_talks(lines: Iterable[bytes], path: str, block_tokens: int, limit: int | None = None) -> list[Talk]:
    """The first `limit` sessions, in the order of their first rows. Raises `TraceError`.

    Rows of a session may be apart; a row without `session_id` is a session of its own.
    """
    talks: dict[str, Talk] = {}
    chained: dict[tuple[int, int], int] = {}
    for line in json_lines(lines, path):
        name = line.text("session_id", "") or f"row-{line.number}"
        talk = talks.get(name)
        if talk is None and limit is not None and len(talks) >= limit:
            continue
        for other in ("text_input", "messages", "payload"):
            if line.fields.get(other) is not None:
                raise line.error(other, "holds content; only rows with input_length are read")
        new_tokens, output_tokens = line.whole("input_length", 1), line.whole("output_length", 0)
        ids = _ids(line, new_tokens, block_tokens)
        if talk is None:
            shared = _chained(ids[: new_tokens // block_tokens], chained)
            talk = talks[name] = Talk(name, _ns(line, "timestamp", 0), shared)
            talk.rows.append(Row(new_tokens, output_tokens))
        else:
            talk.rows.append(Row(new_tokens, output_tokens, _ns(line, "delay", None)))
    if not talks:
        raise TraceError(path, 1, "input_length", "the file holds no rows")
    return list(talks.values())


def _ids(line: JsonLine, new_tokens: int, block_tokens: int) -> list[int]:
    if line.fields.get("hash_ids") is None:
        return []
    ids = line.wholes("hash_ids", MAX_ID)
    blocks = -(-new_tokens // block_tokens)
    if len(ids) != blocks:
        problem = f"has {len(ids)} ids, but {new_tokens} tokens make {blocks} blocks of {block_tokens}"
        raise line.error("hash_ids", problem)
    return ids


def _chained(ids: list[int], known: dict[tuple[int, int], int]) -> tuple[int, ...]:
    """Each (all before, id) as a number from 0, so that it stands for all before it whatever the file's ids do."""
    numbers: list[int] = []
    last = -1
    for block in ids:
        last = known.setdefault((last, block), len(known))
        numbers.append(last)
    return tuple(numbers)


def _ns(line: JsonLine, name: str, default: int | None) -> int:
    """Milliseconds in the file; `default` where the field is absent, None: it must be there."""
    if line.fields.get(name) is None and default is not None:
        return default
    return line.milliseconds_ns(name)


class AIPerf:
    """Replays sessions of AIPerf's Mooncake format in closed loop.

    A row's `input_length` and `hash_ids` are what the turn adds. Its prompt is the prompt before, the answer to that,
    and the addition; it is sent `delay` after that answer. The first prompt's blocks are shared by their ids, as the
    generator's layers are (tools and system prompt, repository, session). Everything behind an answer is private to its
    session: equal full blocks of two sessions would need equal answers before them.

    Args:
        path: the file: as given, else under `$MCJAX_TRACES`, else under `./traces`.
        seed: of the `workload` stream; 0 or more. The arrivals are drawn, if `rate_per_s` is given.
        rate_per_s: sessions that start in a second (Poisson, in the order of the file); None for the file's
            `timestamp`, which is 0 for every session that the generator makes.
        block_tokens: tokens that a hash id stands for.
        max_tokens: the limit that requests carry.
        max_think_s: no delay is longer than this; None for all as in the file.
        limit: take only the first so many sessions; None for all.
    """

    def __init__(
        self,
        path: str,
        seed: int = 0,
        rate_per_s: float | None = 1.0,
        block_tokens: int = 512,
        max_tokens: int = 8192,
        max_think_s: float | None = None,
        limit: int | None = None,
    ):
        self.name = "aiperf"
        self.block_tokens: int | None = block_tokens
        self._replaying = Replaying(block_tokens, max_tokens, limit=limit)
        self._pacing = Pacing(seed, rate_per_s, max_think_s)
        lines, file, self._inputs = opened(path, SOURCE)
        self._talks = parse_talks(lines, file, block_tokens, limit)

    def reseeded(self, seed: int) -> Self:
        """The same sessions, started at other times."""
        other = copy.copy(self)
        other._pacing = replace(self._pacing, seed=seed)
        return other

    @property
    def total_requests(self) -> int:
        return sum(len(talk.rows) for talk in self._talks)

    def sessions(self) -> Iterator[Recorded]:
        """Sessions in order of arrival."""
        talks = self._talks
        starts_ns = self._pacing.starts_ns([talk.start_ns for talk in talks])
        first_ids, first_blocks = [0], [0]
        for talk in talks:
            tokens = sum(row.new_tokens + self._replaying.script(row.output_tokens).output_tokens for row in talk.rows)
            first_ids.append(first_ids[-1] + len(talk.rows))
            first_blocks.append(first_blocks[-1] + -(-tokens // self._replaying.block_tokens))
        for index in sorted(range(len(talks)), key=starts_ns.__getitem__):
            turns = self._turns(talks[index], starts_ns[index], first_ids[index], first_blocks[index])
            yield Recorded(starts_ns[index], turns)

    def inputs(self) -> dict[str, str]:
        return dict(self._inputs)

    def _turns(self, talk: Talk, start_ns: int, first_id: int, first_block: int) -> Iterator[Turn]:
        """The turns of a session. Even block ids are the file's, odd ones the session's own: they cannot meet."""
        size, prompt_tokens = self._replaying.block_tokens, 0
        shared = tuple(2 * block for block in talk.shared)
        for index, row in enumerate(talk.rows):
            prompt_tokens += row.new_tokens
            script = self._replaying.script(row.output_tokens)
            own = -(-prompt_tokens // size) - len(shared)
            request = Request(
                request_id=first_id + index,
                arrival_ns=self._pacing.pause_ns(row.delay_ns) if index else start_ns,
                prompt_tokens=prompt_tokens,
                max_tokens=self._replaying.max_tokens,
                trace_ids=(*shared, *range(2 * first_block + 1, 2 * (first_block + own) + 1, 2)),
                trace_block_tokens=size,
                session=talk.name,
                turn=index,
                parent=first_id + index - 1 if index else None,
            )
            yield Turn(request, script)
            prompt_tokens += script.output_tokens
