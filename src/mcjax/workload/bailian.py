"""Qwen-Bailian traces: real chats and API calls of a cloud provider, with a content id for every 16 prompt tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from mcjax.errors import TraceError
from mcjax.types import Request
from mcjax.workload.base import Turn
from mcjax.workload.files import JsonLine, json_lines, opened
from mcjax.workload.replay import Lengths, OneTurn, Replaying

SOURCE = "The traces are in alibaba-edu/qwen-bailian-usagetraces-anon (Apache-2.0; Git LFS files)"
MOST = 2**63 - 1


@dataclass(slots=True)
class Chats:
    """A trace in columns. Row i's chained block ids are `ids[offsets[i] : offsets[i + 1]]`.

    `parent` is the row of the turn before (-1: none in the file), `root` the `chat_id` that the conversation began as.
    """

    lengths: Lengths = field(default_factory=Lengths)
    parent: array[int] = field(default_factory=lambda: array("q"))
    root: array[int] = field(default_factory=lambda: array("q"))
    turn: array[int] = field(default_factory=lambda: array("q"))
    ids: array[int] = field(default_factory=lambda: array("q"))
    offsets: array[int] = field(default_factory=lambda: array("q", [0]))


def parse_rows(lines: Iterable[bytes], path: str, block_tokens: int, limit: int | None = None) -> Chats:
    """Rows in the order of the file. Raises `TraceError`.

    The file's ids are hashes of single blocks: equal blocks in different places have equal ids. Here each (id of all
    before, id of the block) becomes a new id, so that an id stands for its block and everything before it.
    """
    chats = Chats()
    chained: dict[tuple[int, int], int] = {}
    row_of: dict[int, int] = {}
    for line in json_lines(lines, path):
        if limit is not None and len(chats.lengths) >= limit:
            break
        _append(chats, line, block_tokens, chained, row_of)
    if len(chats.lengths) == 0:
        raise TraceError(path, 1, "timestamp", "the file holds no rows")
    return chats


def _append(
    chats: Chats, line: JsonLine, block_tokens: int, chained: dict[tuple[int, int], int], row_of: dict[int, int]
) -> None:
    arrival_ns = line.seconds_ns("timestamp")
    input_tokens, output_tokens = line.whole("input_length", 1), line.whole("output_length", 0)
    turn = line.whole("turn", 0)
    chat = line.whole("chat_id", 0, MOST)
    before = line.whole("parent_chat_id", -1, MOST)
    if chat in row_of:
        raise line.error("chat_id", f"{chat} is that of an earlier line")
    ids = line.wholes("hash_ids", MOST)
    full, blocks = input_tokens // block_tokens, -(-input_tokens // block_tokens)
    if len(ids) not in (full, blocks):  # the partial block may or may not have an id
        problem = f"has {len(ids)} ids, but {input_tokens} tokens make {blocks} blocks of {block_tokens}"
        raise line.error("hash_ids", problem)
    row = len(chats.lengths)
    row_of[chat] = row
    parent = row_of.get(before, -1)
    last = -1
    for entry in ids:
        last = chained.setdefault((last, entry), len(chained))
        chats.ids.append(last)
    chats.offsets.append(len(chats.ids))
    chats.lengths.append(arrival_ns, input_tokens, output_tokens)
    chats.parent.append(parent)
    chats.root.append(chats.root[parent] if parent >= 0 else chat)
    chats.turn.append(turn)


class Bailian:
    """Replays a Qwen-Bailian JSONL trace, open loop: turns arrive when they did, whatever the system does.

    Request ids are row numbers. A request's `session` names the chat that its conversation began as; `parent` is the
    turn before, where the file has it. The file's 16-token blocks make block ids of `block_tokens` = 16; `reblocked`
    makes larger ones of them.

    Args:
        path: the file: as given, else under `$MCJAX_TRACES`, else under `./traces`.
        seed: unused: nothing here is drawn.
        block_tokens: prompt tokens an id stands for (16 in the published traces).
        max_tokens, rate_scale, limit: see `replay.Replaying`.

    Source: J. Wang et al., KVCache Cache in the Wild, USENIX ATC 2025.
    """

    def __init__(
        self,
        path: str,
        seed: int = 0,
        block_tokens: int = 16,
        max_tokens: int = 8192,
        rate_scale: float = 1.0,
        limit: int | None = None,
    ):
        self._replaying = Replaying(block_tokens, max_tokens, rate_scale, limit)
        lines, file, self._inputs = opened(path, SOURCE)
        self.name = "bailian"
        self.block_tokens: int | None = block_tokens
        self._chats = parse_rows(lines, file, block_tokens, limit)
        self._replaying.check_last(max(self._chats.lengths.arrival_ns))

    @property
    def total_requests(self) -> int:
        return len(self._chats.lengths)

    def sessions(self) -> Iterator[OneTurn]:
        """One session a row, in order of arrival, ties as in the file."""
        arrivals = np.frombuffer(self._chats.lengths.arrival_ns, np.int64)
        for index in np.argsort(arrivals, kind="stable").tolist():
            yield OneTurn(self._turn(index))

    def inputs(self) -> dict[str, str]:
        return dict(self._inputs)

    def _turn(self, index: int) -> Turn:
        chats, rows = self._chats, self._chats.lengths
        request = Request(
            request_id=index,
            arrival_ns=self._replaying.arrival_ns(rows.arrival_ns[index]),
            prompt_tokens=rows.input_tokens[index],
            max_tokens=self._replaying.max_tokens,
            trace_ids=tuple(chats.ids[chats.offsets[index] : chats.offsets[index + 1]]),
            trace_block_tokens=self._replaying.block_tokens,
            session=f"chat-{chats.root[index]}",
            turn=chats.turn[index],
            parent=chats.parent[index] if chats.parent[index] >= 0 else None,
        )
        return Turn(request, self._replaying.script(rows.output_tokens[index]))
