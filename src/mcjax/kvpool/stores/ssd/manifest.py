"""What a folder of blocks says of itself: whose blocks, of which layout, in which files."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from mcjax.errors import StoreError
from mcjax.kvpool.stores.ssd.header import FORMAT_VERSION, HEADER_BYTES, layout_digest
from mcjax.types import KVFormat, KVGroup

MANIFEST_NAME = "manifest.json"
_KIND = "mcjax ssd tier"

ALIGNMENT_BYTES = HEADER_BYTES
"""Direct I/O reads and writes whole pages at page boundaries."""


def padded(nbytes: int) -> int:
    """The least multiple of `ALIGNMENT_BYTES` that is no less."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Manifest:
    """The layout of a folder. Slot `n` lies in slab `n // slab_slots`; the last slab may be shorter."""

    kv_format: KVFormat
    encoding: str
    lossy: bool
    block_bytes: int
    capacity: int
    slab_slots: int
    version: int = FORMAT_VERSION

    @property
    def slot_bytes(self) -> int:
        """Header and payload, padded."""
        return HEADER_BYTES + padded(self.block_bytes)

    @property
    def layout(self) -> bytes:
        return layout_digest(self.kv_format, self.encoding, self.block_bytes)

    def slabs(self) -> list[tuple[str, int]]:
        """Name and length in bytes of each slab file, in order."""
        full, rest = divmod(self.capacity, self.slab_slots)
        counts = [self.slab_slots] * full + [rest] * bool(rest)
        return [(f"slab-{number:05d}", count * self.slot_bytes) for number, count in enumerate(counts)]

    def differences(self, wanted: Manifest) -> list[str]:
        """What keeps blocks of the one from being read as blocks of the other, in words. Capacities may differ."""
        mine, other = self._meaning(), wanted._meaning()
        return [f"{name} is {mine[name]}, not {other[name]}" for name in mine if mine[name] != other[name]]

    def _meaning(self) -> dict[str, object]:
        groups = ", ".join(
            f"{group.name} ({group.kind}, {group.bytes_per_token} bytes a token, multiple {group.block_multiple})"
            for group in self.kv_format.groups
        )
        return {
            "format version": self.version,
            "model": self.kv_format.fingerprint,
            "tokens of a block": self.kv_format.block_tokens,
            "KV groups": groups,
            "encoding": self.encoding + (" (lossy)" if self.lossy else ""),
            "bytes of a block": self.block_bytes,
        }

    def write(self, folder: Path) -> None:
        """Replace the folder's manifest, durably and at once. Raises `OSError`."""
        values = {
            "kind": _KIND,
            "version": self.version,
            "fingerprint": self.kv_format.fingerprint,
            "block_tokens": self.kv_format.block_tokens,
            "groups": [asdict(group) for group in self.kv_format.groups],
            "encoding": self.encoding,
            "lossy": self.lossy,
            "block_bytes": self.block_bytes,
            "slot_bytes": self.slot_bytes,
            "capacity": self.capacity,
            "slab_slots": self.slab_slots,
            "slabs": [name for name, _ in self.slabs()],
        }
        fresh = folder / (MANIFEST_NAME + ".new")
        with open(fresh, "w", encoding="utf-8") as file:
            json.dump(values, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, folder / MANIFEST_NAME)
        sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make names that were added to or taken from `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> Manifest | None:
    """The folder's manifest; None where there is none. Raises `StoreError` for one that cannot be understood."""
    path = folder / MANIFEST_NAME
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise StoreError(f"{path} cannot be read: {problem.strerror}") from None
    except ValueError:
        raise _damaged(path, "it is no JSON") from None
    fields: dict[str, Any] = cast("dict[str, Any]", values) if isinstance(values, dict) else {}
    if fields.get("kind") != _KIND:
        raise _damaged(path, "it is not that of an SSD tier")
    if fields.get("version") != FORMAT_VERSION:
        raise StoreError(
            f"{folder} has format version {fields.get('version')}, this mcjax reads and writes {FORMAT_VERSION}; "
            "name another folder (kvpool.ssd_path), or delete this one if its blocks are not needed"
        )
    try:
        found = Manifest(
            KVFormat(
                str(fields["fingerprint"]),
                int(fields["block_tokens"]),
                tuple(KVGroup(**group) for group in fields["groups"]),
            ),
            str(fields["encoding"]),
            bool(fields["lossy"]),
            int(fields["block_bytes"]),
            int(fields["capacity"]),
            int(fields["slab_slots"]),
        )
    except KeyError as missing:
        raise _damaged(path, f"{missing.args[0]!r} is missing") from None
    except (TypeError, ValueError) as problem:
        raise _damaged(path, str(problem)) from None
    if min(found.block_bytes, found.slab_slots) < 1 or found.capacity < 0:
        raise _damaged(path, "a size in it is not positive")
    return found


def _damaged(path: Path, problem: str) -> StoreError:
    return StoreError(
        f"{path} is damaged: {problem}; without it nothing tells what the folder's blocks are. Name another folder "
        "(kvpool.ssd_path), or delete this one"
    )
