"""Whether a pool's books add up. For tests and the ends of runs: O(blocks)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mcjax.errors import IntegrityError
from mcjax.kvpool.base import BlockStore
from mcjax.kvpool.holds import Anchor, Pin
from mcjax.kvpool.index import BlockIndex


def check_blocks(node: str, store: BlockStore, index: BlockIndex) -> None:
    """Raise `IntegrityError` unless every block lies in a slot that says so, behind its parent."""
    store.check_integrity()
    index.check_integrity(node)
    for block, slot in index.slots.items():
        header = store.header(slot)
        if header is None or header.block != block:
            raise IntegrityError(f"{node}: slot {slot} does not hold block {block}")


def check_pins(node: str, index: BlockIndex, pins: Iterable[Pin], detached: Mapping[Anchor, None]) -> None:
    """Raise `IntegrityError` unless anchors are counted right, and where their blocks are."""
    counts: dict[Anchor, int] = {}
    for pin in pins:
        if pin.deepest is not None:
            counts[pin.deepest] = counts.get(pin.deepest, 0) + 1
    anchors = [*index.anchors.values(), *detached]
    if {anchor: anchor.pins for anchor in anchors} != counts:
        raise IntegrityError(f"{node}: pins are miscounted")
    for block, anchor in index.anchors.items():
        if anchor.detached or index.slots.get(block) != anchor.slot:
            raise IntegrityError(f"{node}: the anchor of block {block} is not where the block is")
