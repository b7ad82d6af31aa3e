"""What a node's SSD store held when it was opened, in words that the outcome log can hold: a replay begins with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mcjax.kvpool.base import Stored
from mcjax.kvpool.keys import KeyTable


def mechanism(node: str) -> str:
    """Under which name the log has it, as the only outcome."""
    return f"ssd.{node}"


def encode_recovered(found: Sequence[Stored], table: KeyTable) -> dict[str, Any]:
    """`found` as plain JSON values. Parents go by their place in the list, where they are, since they come first."""
    places = {stored.block: place for place, stored in enumerate(found)}
    return {
        "slots": [stored.slot for stored in found],
        "keys": [table.key(stored.block).hex() for stored in found],
        "parents": [None if stored.parent is None else places[stored.parent] for stored in found],
        "checksums": [stored.checksum.hex() for stored in found],
    }


def decode_recovered(payload: dict[str, Any], table: KeyTable) -> list[Stored]:
    """The inverse, with the same ids if `table` was as it was then."""
    blocks = [table.intern([bytes.fromhex(key)])[0] for key in payload["keys"]]
    parents: list[int | None] = payload["parents"]
    slots: list[int] = payload["slots"]
    return [
        Stored(slot, block, None if parent is None else blocks[parent], bytes.fromhex(checksum))
        for slot, block, parent, checksum in zip(slots, blocks, parents, payload["checksums"], strict=True)
    ]
