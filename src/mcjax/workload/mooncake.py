"""Mooncake traces (FAST'25 release): one single-turn session a line, prompts named by chained block ids."""

from __future__ import annotations

from collections.abc import Iterator

from mcjax.errors import ConfigError
from mcjax.types import Request
from mcjax.workload.base import Turn
from mcjax.workload.mooncake_file import Rows, find_trace, read_trace
from mcjax.workload.replay import OneTurn, Replaying


class Mooncake:
    """Replays a Mooncake JSONL trace, open loop: arrivals are the file's, whatever the system does.

    The whole file is read and checked here, before anything runs, into flat arrays (about 250 bytes a row); requests
    are made one by one. Request ids are row numbers from 0. Requests carry `max_tokens`, never the row's output length,
    which goes into the script, clipped to `1 .. max_tokens`.

    Args:
        path: the file: as given, else under `$MCJAX_TRACES`, else under `./traces`.
        seed: unused: nothing here is drawn. It is taken so that every workload is made alike.
        block_tokens: prompt tokens a block id stands for (512 in the published traces).
        max_tokens: the limit that requests carry.
        rate_scale: arrivals come so many times faster than in the file.
        limit: take only the first so many rows; None for all.
        verify_published: refuse a file that bears a published trace's name but not its bytes.
        count_partial: let the last, partial block of a prompt be shared as if it were full. Prompts are then rounded up
            to whole blocks (by half a block on average), because only full blocks are ever shared.

    Raises `ConfigError` for a path or value that cannot work, `TraceError` for the first line that cannot be read.
    """

    def __init__(
        self,
        path: str,
        seed: int = 0,
        block_tokens: int = 512,
        max_tokens: int = 2048,
        rate_scale: float = 1.0,
        limit: int | None = None,
        verify_published: bool = True,
        count_partial: bool = False,
    ):
        self._replaying = Replaying(block_tokens, max_tokens, rate_scale, limit)
        self.name = "mooncake"
        self.block_tokens: int | None = block_tokens
        self._count_partial = count_partial
        found = find_trace(path)
        try:
            self._rows, sha256 = read_trace(found, block_tokens, limit, verify_published)
        except OSError as problem:
            raise ConfigError("workload.path", path, f"cannot be read: {problem.strerror}") from problem
        self._inputs = {str(found): sha256}
        self._replaying.check_last(self._rows.timestamp_ns[-1])

    @property
    def rows(self) -> Rows:
        """The trace's columns, for statistics."""
        return self._rows

    @property
    def total_requests(self) -> int:
        return len(self._rows)

    def sessions(self) -> Iterator[OneTurn]:
        """One session a row, in the order of the file."""
        for index in range(len(self._rows)):
            yield OneTurn(self._turn(index))

    def inputs(self) -> dict[str, str]:
        return dict(self._inputs)

    def _turn(self, index: int) -> Turn:
        rows, replaying = self._rows, self._replaying
        ids = rows.block_ids(index)
        request = Request(
            request_id=index,
            arrival_ns=replaying.arrival_ns(rows.timestamp_ns[index]),
            prompt_tokens=len(ids) * replaying.block_tokens if self._count_partial else rows.input_tokens[index],
            max_tokens=replaying.max_tokens,
            trace_ids=ids,
            trace_block_tokens=replaying.block_tokens,
            session=f"row-{index}",
        )
        return Turn(request, replaying.script(rows.output_tokens[index]))
