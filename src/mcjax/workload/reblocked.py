"""The same prompts in blocks of another size, as far as a trace's block ids can tell."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self

from mcjax.errors import ConfigError
from mcjax.types import Request
from mcjax.workload.mapped import Mapped, reseeded, spread_ids, workload_at
from mcjax.workload.streams import whole


def larger(ids: tuple[int, ...], multiple: int) -> tuple[int, ...]:
    """Ids of blocks `multiple` times as large: the last id of each group, which stands for all before it too."""
    grouped = ids[multiple - 1 :: multiple]
    return (*grouped, ids[-1]) if len(ids) % multiple else grouped


def smaller(ids: tuple[int, ...], divisor: int, blocks: int) -> tuple[int, ...]:
    """`blocks` ids of blocks that are `divisor` times smaller: part `j` of block `b` is `b * divisor + j`."""
    spread = spread_ids("block_tokens", ids, divisor)
    return tuple(block + part for block in spread for part in range(divisor))[:blocks]


class Reblocked:
    """`of`, with block ids for blocks of `block_tokens`, a multiple or a divisor of its own block size.

    Larger blocks are exact: prompts share a large block if they share all the small ones in it. Smaller blocks are a
    lower bound: a trace's ids cannot tell where inside a block two prompts part, so small blocks are shared only where
    the large one was; what becomes finer is the last block of a prompt, the moves and the evictions. Requests that
    carry tokens pass unchanged: their blocks are cut at any size.

    Args:
        of: the workload.
        block_tokens: the new size; None keeps the old.
        count_partial: let the last, partial block of a prompt be shared as if it were full: prompts are rounded up to
            whole blocks of the old size. False: it is private, as only full blocks can be shared.
    """

    def __init__(self, of: Any, block_tokens: int | None = None, count_partial: bool = False):
        self.name = "reblocked"
        self._of = workload_at("of", of)
        size = self._of.block_tokens if block_tokens is None else whole("block_tokens", block_tokens, 1)
        old = self._of.block_tokens
        if size is not None and old is not None and size % old and old % size:
            raise ConfigError("workload.block_tokens", size, f"must be a multiple or a divisor of the trace's {old}")
        self.block_tokens: int | None = size
        self._count_partial = count_partial

    def reseeded(self, seed: int) -> Self:
        """The same blocks of the workload under another seed."""
        other = copy.copy(self)
        other._of = reseeded(self._of, seed)
        return other

    @property
    def total_requests(self) -> int | None:
        return getattr(self._of, "total_requests", None)

    def sessions(self) -> Iterator[Mapped]:
        for session in self._of.sessions():
            yield Mapped(session, session.start_ns, self._change)

    def inputs(self) -> dict[str, str]:
        return self._of.inputs()

    def _change(self, request: Request) -> Request:
        ids, old, new = request.trace_ids, request.trace_block_tokens, self.block_tokens
        if ids is None or new is None:
            return request
        prompt_tokens = len(ids) * old if self._count_partial else request.prompt_tokens
        if new > old:
            ids = larger(ids, new // old)
        elif new < old:
            ids = smaller(ids, old // new, -(-prompt_tokens // new))
        return replace(request, prompt_tokens=prompt_tokens, trace_ids=ids, trace_block_tokens=new)
