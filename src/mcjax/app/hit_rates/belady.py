"""The offline bound: evict what is needed again last (Belady 1966), which only who knows the future can do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from mcjax.kvpool.eviction.ranks import Ranks
from mcjax.types import BlockId

NEVER = 1 << 62


class Belady:
    """Farthest next use first; of those that are used next by the same request, suffixes before prefixes.

    No policy finds more blocks, where requests come one at a time and each stays whole while it is served: a block kept
    from one use to its next is an interval, which saves one block and takes one slot; at each request so many slots are
    left; and dropping, whenever there are too many, the interval that ends last keeps the most intervals. A prefix is
    needed no later than what continues it, so the order never asks for a prefix before its suffix, and that only leaves
    leave costs nothing. It bounds *blocks* found: counted in tokens it is the same where all blocks are full.

    Args:
        prompts: the blocks of every request to come, cut to the capacity of the pool.
    """

    def __init__(self, prompts: Sequence[Sequence[BlockId]]):
        self._ranks = Ranks()
        self._prompts = prompts
        self._next: list[list[int]] = [[]] * len(prompts)
        self._request = 0
        coming: dict[BlockId, int] = {}
        for request in reversed(range(len(prompts))):
            blocks = prompts[request]
            self._next[request] = [coming.get(block, NEVER) for block in blocks]
            coming.update(dict.fromkeys(blocks, request))

    def begin(self, request: int) -> None:
        """Request number `request` comes: its blocks' next uses are those after it."""
        self._request = request

    def on_insert(self, blocks: Sequence[BlockId], parent: BlockId | None) -> None:
        """The last blocks of the request's prompt."""
        following = self._next[self._request][-len(blocks) :]
        end = len(blocks)
        for request, same in groupby(reversed(following)):
            start = end - sum(1 for _ in same)
            self._ranks.add(blocks[start:end][::-1], -request)
            end = start

    def on_hit(self, blocks: Sequence[BlockId]) -> None:
        """The first of them."""
        move, following = self._ranks.move, self._next[self._request]
        for at in reversed(range(len(blocks))):
            move(blocks[at], -following[at])

    def on_extend(self, blocks: Sequence[BlockId]) -> None:
        self.on_hit(blocks)  # or of equals the head of a chain would go before its tail

    def on_remove(self, blocks: Sequence[BlockId]) -> None:
        self._ranks.remove(blocks)

    def victims(self) -> Iterator[BlockId]:
        return iter(self._ranks)
