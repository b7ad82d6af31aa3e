"""The generic trace format: one JSON object a request, with as much of its content as you can give."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from mcjax.errors import TraceError
from mcjax.types import Request, Tokens
from mcjax.workload.base import Turn
from mcjax.workload.files import JsonLine, json_lines, opened
from mcjax.workload.replay import OneTurn, Replaying

SOURCE = "docs/workload.md has the format"
MAX_ID = 2**64 - 1
MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One request of the file. `tokens` (`[T]`) or `block_ids`, or neither: then the prompt is like no other.

    `block_ids` are numbered anew, from 0.
    """

    arrival_ns: int
    input_tokens: int
    output_tokens: int
    tenant: str
    session: str
    turn: int
    parent: int | None
    tokens: Tokens | None
    block_ids: tuple[int, ...] | None


def parse_rows(lines: Iterable[bytes], path: str, block_tokens: int, limit: int | None = None) -> list[Row]:
    """Rows in the order of the file; blank lines and unknown fields are passed over. Raises `TraceError`."""
    rows: list[Row] = []
    last_of: dict[tuple[str, str], int] = {}
    known: dict[int, tuple[int, int]] = {}  # an id -> the id it follows, and the number it gets here
    for line in json_lines(lines, path):
        if limit is not None and len(rows) >= limit:
            break
        tenant, session = line.text("tenant", "default"), line.text("session", "")
        parent = last_of.get((tenant, session)) if session else None
        last_of[tenant, session] = len(rows)
        tokens = _prompt(line)
        row = Row(
            arrival_ns=line.seconds_ns("arrival_s"),
            input_tokens=_input_tokens(line, tokens),
            output_tokens=line.whole("output_tokens", 0),
            tenant=tenant,
            session=session or f"row-{len(rows)}",
            turn=0 if parent is None else rows[parent].turn + 1,
            parent=parent,
            tokens=tokens,
            block_ids=_block_ids(line, block_tokens, known) if line.fields.get("block_ids") is not None else None,
        )
        rows.append(row)
    if not rows:
        raise TraceError(path, 1, "arrival_s", "the file holds no rows")
    return rows


def _prompt(line: JsonLine) -> Tokens | None:
    """`[T]` token ids: a list as it is, a text by the byte tokenizer (one id a byte of its UTF-8)."""
    given = line.fields.get("prompt")
    if given is None:
        return None
    if line.fields.get("block_ids") is not None:
        raise line.error("prompt", "a row has a prompt or block_ids, not both")
    if isinstance(given, str):
        try:
            tokens = np.frombuffer(given.encode(), np.uint8).astype(np.int32)
        except UnicodeEncodeError:
            raise line.error("prompt", "holds half a surrogate pair, which is no text") from None
    else:
        tokens = np.array(line.wholes("prompt", MAX_TOKEN_ID), np.int32)
    if len(tokens) == 0:
        raise line.error("prompt", "must hold at least one token")
    tokens.flags.writeable = False
    return tokens


def _input_tokens(line: JsonLine, tokens: Tokens | None) -> int:
    if tokens is None:
        return line.whole("input_tokens", 1)
    if line.fields.get("input_tokens") is not None and line.whole("input_tokens", 1) != len(tokens):
        raise line.error("input_tokens", f"says {line.fields['input_tokens']}, but the prompt has {len(tokens)} tokens")
    return len(tokens)


def _block_ids(line: JsonLine, block_tokens: int, known: dict[int, tuple[int, int]]) -> tuple[int, ...]:
    """Numbers from 0 in place of the file's ids, which may be 64-bit hashes."""
    ids = line.wholes("block_ids", MAX_ID)
    blocks = -(-line.whole("input_tokens", 1) // block_tokens)
    if len(ids) != blocks:
        problem = f"has {len(ids)} ids, but {line.fields['input_tokens']} tokens make {blocks} blocks of {block_tokens}"
        raise line.error("block_ids", problem)
    numbers: list[int] = []
    for index, (before, block) in enumerate(zip([-1, *ids], ids, strict=False)):
        follows, number = known.setdefault(block, (before, len(known)))
        if follows != before:
            problem = f"id {block} at index {index} did not follow the same id before; an id stands for its block"
            raise line.error("block_ids", f"{problem} and all blocks before it")
        numbers.append(number)
    return tuple(numbers)


class Jsonl:
    """Replays a file of the generic schema, open loop: each row arrives when it says.

    Rows may come in any order; they are played in order of arrival, ties as in the file. Request ids are row numbers.
    Rows of one `session` (within a tenant) are its turns, in the order of the file. A file whose rows all have prompts
    runs on any backend; one that has other rows dictates `block_tokens`, and runs in simulation only.

    Args:
        path: the file: as given, else under `$MCJAX_TRACES`, else under `./traces`.
        seed: unused: nothing here is drawn.
        block_tokens: prompt tokens a block id stands for.
        max_tokens, rate_scale, limit: see `replay.Replaying`.
    """

    def __init__(
        self,
        path: str,
        seed: int = 0,
        block_tokens: int = 512,
        max_tokens: int = 2048,
        rate_scale: float = 1.0,
        limit: int | None = None,
    ):
        self._replaying = Replaying(block_tokens, max_tokens, rate_scale, limit)
        lines, file, self._inputs = opened(path, SOURCE)
        self._rows = parse_rows(lines, file, block_tokens, limit)
        self._replaying.check_last(max(row.arrival_ns for row in self._rows))
        self.name = "jsonl"
        self.block_tokens: int | None = None if all(row.tokens is not None for row in self._rows) else block_tokens

    @property
    def total_requests(self) -> int:
        return len(self._rows)

    def sessions(self) -> Iterator[OneTurn]:
        """One session a row, in order of arrival."""
        first_private = 0
        first_ids: list[int] = []
        for row in self._rows:
            first_ids.append(first_private)
            if row.tokens is None and row.block_ids is None:
                first_private += -(-row.input_tokens // self._replaying.block_tokens)
        for index in sorted(range(len(self._rows)), key=lambda index: self._rows[index].arrival_ns):
            yield OneTurn(self._turn(index, first_ids[index]))

    def inputs(self) -> dict[str, str]:
        return dict(self._inputs)

    def _turn(self, index: int, first_private: int) -> Turn:
        row, replaying = self._rows[index], self._replaying
        ids: tuple[int, ...] | None = None
        if row.block_ids is not None:  # even ids are the file's, odd ones private: they cannot meet
            ids = tuple(2 * block for block in row.block_ids)
        elif row.tokens is None:
            count = -(-row.input_tokens // replaying.block_tokens)
            ids = tuple(range(2 * first_private + 1, 2 * (first_private + count) + 1, 2))
        request = Request(
            request_id=index,
            arrival_ns=replaying.arrival_ns(row.arrival_ns),
            prompt_tokens=row.input_tokens,
            max_tokens=replaying.max_tokens,
            tokens=row.tokens,
            trace_ids=ids,
            trace_block_tokens=0 if ids is None else replaying.block_tokens,
            tenant=row.tenant,
            session=row.session,
            turn=row.turn,
            parent=row.parent,
        )
        return Turn(request, replaying.script(row.output_tokens))
