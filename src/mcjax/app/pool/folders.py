"""Finds the folders of an SSD tier, and reads their headers though a run may be writing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mcjax.errors import StoreError
from mcjax.kvpool.stores.ssd.header import BlockHeader
from mcjax.kvpool.stores.ssd.manifest import MANIFEST_NAME
from mcjax.kvpool.stores.ssd.reader import FolderReader, SlotHeader
from mcjax.types import BlockKey

Again = TypeVar("Again")

LOOKS, FIRST_PAUSE_S = 8, 0.02
"""What looks damaged under a run's pen is looked at so often, with pauses that double: 2.5 s in all."""


def folders(path: Path) -> list[Path]:
    """The folders of blocks at `path`: itself, or one a node below it. Raises `StoreError` if there are none."""
    if not path.is_dir():
        raise StoreError(f"{path}: no such directory; give that of kvpool.ssd_path, or one node's folder below it")
    if (path / MANIFEST_NAME).exists():
        return [path]
    found = sorted(manifest.parent for manifest in path.glob(f"*/{MANIFEST_NAME}"))
    if not found:
        raise StoreError(f"{path} holds no SSD tier: there is no {MANIFEST_NAME} in it, nor in a folder below it")
    return found


@dataclass(slots=True)
class Headers:
    """What the headers of a folder say."""

    blocks: dict[BlockKey, BlockHeader]
    """By key, the latest of several with the same one."""
    older: int
    """Copies of a block that a later one stands for."""
    damaged: list[SlotHeader]
    unused: int
    """Slots that never held a block."""


def read_headers(reader: FolderReader) -> Headers:
    """Look at every slot's header, and again at those that a run is just writing."""
    found: list[SlotHeader] = []
    doubtful: list[int] = []
    busy = bool(reader.used_by)
    for one in reader.headers():
        if one.damage and busy:
            doubtful.append(one.slot)
        else:
            found.append(one)
    settled = settle(doubtful, reader.header, lambda one: not one.damage)
    found += settled
    blocks: dict[BlockKey, BlockHeader] = {}
    older = unused = 0
    for one in found:
        header = one.header
        if header is None:
            unused += not one.damage
            continue
        other = blocks.get(header.key)
        older += other is not None
        if other is None or other.sequence < header.sequence:
            blocks[header.key] = header
    return Headers(blocks, older, [one for one in found if one.damage], unused)


def settle(slots: Sequence[int], look: Callable[[int], Again], settled: Callable[[Again], bool]) -> list[Again]:
    """Look at each slot until it is `settled`, or for as long as a write may take; the last look of each."""
    last = {slot: look(slot) for slot in slots}
    pause_s = FIRST_PAUSE_S
    for _ in range(LOOKS - 1):
        open_still = [slot for slot, one in last.items() if not settled(one)]
        if not open_still:
            break
        time.sleep(pause_s)
        pause_s *= 2
        last |= {slot: look(slot) for slot in open_still}
    return list(last.values())
