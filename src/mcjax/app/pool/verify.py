"""`mcjax pool verify DIR`: every block of an SSD tier is read, and its checksum compared. Nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcjax.app.pool.folders import read_headers, settle
from mcjax.app.pool.inspect import megabytes, place_of, where
from mcjax.kvpool.stores.ssd.manifest import Manifest
from mcjax.kvpool.stores.ssd.reader import FolderReader, SlotHeader, open_folder

WRONG_BYTES = "its bytes are not those that its header names"


@dataclass(frozen=True, slots=True)
class Damage:
    """One slot that cannot be used."""

    slot: int
    block: str
    """Its key, in hexadecimal; empty where the header does not tell."""
    problem: str


@dataclass(slots=True)
class Verified:
    """What was found in one node's folder."""

    path: Path
    manifest: Manifest
    used_by: str
    sound: int = 0
    changed: int = 0
    """Slots that a run has given to other blocks again and again meanwhile, or emptied."""
    damaged: list[Damage] = field(default_factory=list[Damage])

    def values(self) -> dict[str, Any]:
        """Everything, as plain JSON values."""
        return {
            "path": str(self.path),
            "used_by": self.used_by or None,
            "sound": self.sound,
            "bytes": self.sound * self.manifest.block_bytes,
            "changed": self.changed,
            "damage": [
                {"slot": one.slot, **place_of(self.manifest, one.slot), "block": one.block, "problem": one.problem}
                for one in self.damaged
            ],
        }

    def text(self) -> str:
        """The same for people: a line for each damaged slot, and one for all."""
        lines: list[str] = []
        for one in self.damaged:
            block = f", block {one.block[:16]}" if one.block else ""
            lines.append(f"{self.path}: slot {one.slot} ({where(self.manifest, one.slot)}){block}: {one.problem}")
        busy = f"; {self.changed:,} changed meanwhile" if self.changed else ""
        told = f"{len(self.damaged):,} damaged" if self.damaged else "nothing damaged"
        read = f"{self.sound:,} blocks sound, {megabytes(self.sound * self.manifest.block_bytes)}"
        return "\n".join([*lines, f"{self.path}: {read}; {told}{busy}"])


def verified(path: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> Verified:
    """Check every block of one node's folder; `progress(done, total)` hears of each. Raises `StoreError`, `OSError`.

    A slot that a run gives to another block meanwhile is read again as what it is then: only what stays wrong, for
    longer than a write takes, is damage.
    """
    with open_folder(path) as reader:
        result = Verified(path, reader.manifest, reader.used_by)
        headers = read_headers(reader)
        result.damaged += [Damage(one.slot, "", one.damage) for one in headers.damaged]
        found = sorted(headers.blocks.values(), key=lambda header: header.slot)  # the disk reads best in order
        doubtful: list[int] = []
        for done, header in enumerate(found, 1):
            one = _checked(reader, SlotHeader(header.slot, header))
            if one.problem:
                doubtful.append(header.slot)
            else:
                result.sound += 1
            progress(done, len(found))
        _look_again(reader, doubtful, result)
    return result


@dataclass(frozen=True, slots=True)
class _Look:
    """What one look at a slot came to: sound without `problem`; damaged, or changing, with one."""

    found: SlotHeader
    problem: str
    changing: bool = False


def _checked(reader: FolderReader, found: SlotHeader) -> _Look:
    state = reader.verify(found)
    return _Look(found, "" if state == "sound" else WRONG_BYTES, state == "changed")


def _look_again(reader: FolderReader, slots: list[int], result: Verified) -> None:
    def look(slot: int) -> _Look:
        found = reader.header(slot)
        return _Look(found, found.damage) if found.header is None else _checked(reader, found)

    busy = bool(reader.used_by or result.used_by)
    looks = settle(slots, look, lambda one: not one.problem) if busy else [look(slot) for slot in slots]
    for one in looks:
        header = one.found.header
        if not one.problem:
            result.sound += header is not None
            result.changed += header is None
        elif one.changing:
            result.changed += 1
        else:
            result.damaged.append(Damage(one.found.slot, header.key.hex() if header else "", one.problem))
