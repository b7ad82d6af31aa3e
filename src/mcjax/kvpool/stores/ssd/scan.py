"""What a folder of blocks still holds, from its headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mcjax.kvpool.stores.ssd.header import BlockHeader
from mcjax.types import BlockKey


def latest(headers: Iterable[BlockHeader]) -> dict[BlockKey, BlockHeader]:
    """One header a key, the one that was written last."""
    best: dict[BlockKey, BlockHeader] = {}
    for header in headers:
        known = best.get(header.key)
        if known is None or header.sequence > known.sequence:
            best[header.key] = header
    return best


def parents_first(best: dict[BlockKey, BlockHeader]) -> Sequence[BlockHeader]:
    """The blocks whose whole prefix is there, each behind its parent, otherwise those first that were written first."""
    whole: dict[BlockKey, bool] = {}
    ordered: list[BlockHeader] = []
    for header in sorted(best.values(), key=lambda one: one.sequence):
        chain: list[BlockHeader] = []
        at: BlockHeader | None = header
        while at is not None and at.key not in whole:
            whole[at.key] = False  # until its start is found; so a chain that bites its own tail ends as broken
            chain.append(at)
            at = None if at.parent is None else best.get(at.parent)
        top = chain[-1] if chain else header
        complete = top.parent is None or whole.get(top.parent, False)
        for one in reversed(chain):
            whole[one.key] = complete
            if complete:
                ordered.append(one)
    return ordered
