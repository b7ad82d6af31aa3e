"""One trace through one pool: one request at a time finds its prefix, and writes what is missing behind it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mcjax.backends.virtual import VirtualLoop
from mcjax.errors import ConfigError
from mcjax.kvpool.base import Eviction, Watermark
from mcjax.kvpool.gone import Gone
from mcjax.kvpool.pool import Pool
from mcjax.kvpool.stores.slots import SlotStore
from mcjax.types import NS_PER_S, BlockId, Miss, NullRecorder, Tier
from mcjax.workload.mooncake_file import Rows


@dataclass(frozen=True)
class Chains:
    """A trace as a pool sees it: each prompt's blocks, in the order of arrival, and how many tokens it has."""

    block_tokens: int
    blocks: Sequence[tuple[BlockId, ...]]
    prompt_tokens: Sequence[int]

    def hit_rate(self, found: Sequence[int]) -> float:
        """The share of all prompt tokens that were found, of blocks found by prompt."""
        size = self.block_tokens
        hits = sum(min(count * size, tokens) for count, tokens in zip(found, self.prompt_tokens, strict=True))
        return hits / sum(self.prompt_tokens)

    @functools.cached_property
    def distinct(self) -> int:
        """A pool of so many blocks never evicts."""
        return len({block for prompt in self.blocks for block in prompt})


def chains_of(rows: Rows, trace_block_tokens: int, block_tokens: int, partial: bool = False) -> Chains:
    """Prompts cut into blocks of `block_tokens`: every id of the trace into as many equal parts.

    Equal ids give equal blocks, unlike ids give unlike ones: two prompts that part ways inside an id share none of its
    blocks, although the first of them may be equal. So hits are never too high. Only full blocks count, as in the
    engine; with `partial` a prompt's last, partial one does too.

    Raises `ConfigError` for blocks that the ids cannot be cut into.
    """
    parts, rest = divmod(trace_block_tokens, block_tokens)
    if rest or not parts:
        problem = f"must divide the {trace_block_tokens} tokens that an id of the trace stands for"
        raise ConfigError("kvpool.block_tokens", block_tokens, problem)
    blocks: list[tuple[BlockId, ...]] = []
    for index, tokens in enumerate(rows.input_tokens):
        ids = rows.block_ids(index)
        if parts > 1:
            ids = tuple(trace_id * parts + part for trace_id in ids for part in range(parts))
        blocks.append(ids[: -(-tokens // block_tokens) if partial else tokens // block_tokens])
    return Chains(block_tokens, blocks, list(rows.input_tokens))


def replay(chains: Chains, capacity: int, eviction: Eviction, watermark: Watermark) -> list[int]:
    """Play a trace through a pool of `capacity` blocks. Returns how many blocks of each prompt were there.

    Of a prompt longer than the pool, the beginning is kept.
    """

    async def play() -> list[int]:
        store = SlotStore("n0", Tier.DRAM, capacity, 1)
        pool = Pool("n0", store, eviction, watermark, NullRecorder(), lease_ns=NS_PER_S, gone=_Forgetful())
        begin: Callable[[int], None] = getattr(eviction, "begin", _nothing)
        hits: list[int] = []
        for index, prompt in enumerate(chains.blocks):
            begin(index)
            blocks = prompt[:capacity]
            pin = pool.pin(index, blocks)
            found = len(pin.blocks)
            hits.append(found)
            if found < len(blocks):
                room = pool.reserve(index, len(blocks) - found)
                pool.commit(room, blocks[found:], blocks[found - 1] if found else None)
                pool.release(room)
                pool.deepen(pin, blocks)
            pool.release(pin)
        pool.check_idle()
        return hits

    return VirtualLoop().run(play)


class _Forgetful(Gone):
    """Nobody asks why a block is missing."""

    def note(self, blocks: Sequence[BlockId], cause: Miss) -> None:
        pass


def _nothing(request: int) -> None:
    """Only a strategy that knows the future asks which request comes."""
