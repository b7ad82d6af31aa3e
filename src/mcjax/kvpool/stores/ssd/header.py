"""The sector in front of every block on disk: which block it is, of what layout, and how to tell whether it is whole.

Little-endian; the last 16 of its 4096 bytes are the XXH3-128 of all before, so a sector written in part or with one
bit flipped is no header. It names its own slot too: one that was copied or written to another place is none there.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace

import xxhash

from mcjax.types import BlockKey, KVFormat

FORMAT_VERSION = 1
HEADER_BYTES = 4096
"""One page and one sector of every disk: the unit of direct I/O."""

_MAGIC = b"mcjaxKV\x00"
_HAS_PARENT, _LOSSY = 1, 2
_FIELDS = struct.Struct("<8sIIQQQQ32s32s32s32s16s16s")
_SUM_BYTES = 16
_EMPTY = bytes(HEADER_BYTES)


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What is known of one block on disk, without a look at its bytes."""

    slot: int
    sequence: int
    """Grows with every block written to the folder: of two copies of a block the higher one is the later."""
    key: BlockKey
    parent: BlockKey | None
    """The key of the block that this one continues; None for the first of a chain."""
    namespace: bytes
    """A digest of the block's namespace, `space_digest`: model, layout, adapter, tenant's salt. Zeros: not known."""
    layout: bytes
    """A digest of what the bytes mean (`layout_digest`)."""
    tokens: int
    payload_bytes: int
    checksum: bytes
    """XXH3-128 of the payload."""
    encoding: str = "none"
    lossy: bool = False

    def with_checksum(self, checksum: bytes) -> BlockHeader:
        """This header for a payload of that checksum."""
        return self if checksum == self.checksum else replace(self, checksum=checksum)


def layout_digest(kv_format: KVFormat, encoding: str, block_bytes: int) -> bytes:
    """32 bytes, equal exactly for blocks whose bytes are laid out, and encoded, alike, of the same weights."""
    fields = [kv_format.fingerprint, str(kv_format.block_tokens), encoding, str(block_bytes)]
    for group in kv_format.groups:
        fields += [group.name, group.kind, str(group.bytes_per_token), str(group.block_multiple)]
    digest = hashlib.sha256(b"mcjax-layout-1")
    for text in fields:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def space_digest(space: bytes) -> bytes:
    """What stands on disk for a namespace. One-way, since who knows a namespace can make the keys of its blocks."""
    return hashlib.sha256(b"mcjax-space-1" + space).digest() if space else bytes(32)


def encode(header: BlockHeader) -> bytes:
    """The sector that says so, `HEADER_BYTES` long."""
    packed = _FIELDS.pack(
        _MAGIC,
        FORMAT_VERSION,
        (_HAS_PARENT if header.parent is not None else 0) | (_LOSSY if header.lossy else 0),
        header.slot,
        header.sequence,
        header.tokens,
        header.payload_bytes,
        header.key,
        header.parent or b"",
        header.namespace,
        header.layout,
        header.checksum,
        header.encoding.encode(),
    )
    body = packed.ljust(HEADER_BYTES - _SUM_BYTES, b"\x00")
    return body + xxhash.xxh3_128(body).digest()


def decode(sector: bytes, slot: int) -> tuple[BlockHeader | None, str]:
    """The header in a slot's first sector, or why there is none: nothing where no block was ever written."""
    if sector == _EMPTY:
        return None, ""
    if len(sector) < HEADER_BYTES:
        return None, f"the file ends after {len(sector)} bytes of the header"
    if sector[: len(_MAGIC)] != _MAGIC:
        return None, "no header of a block"
    if xxhash.xxh3_128(sector[:-_SUM_BYTES]).digest() != sector[-_SUM_BYTES:]:
        return None, "the header's checksum is wrong"
    (_, version, flags, place, sequence, tokens, payload_bytes, key, parent, space, layout, checksum, encoding) = (
        _FIELDS.unpack_from(sector)
    )
    if version != FORMAT_VERSION:
        return None, f"the header has format version {version}"
    if place != slot:
        return None, f"the header is that of slot {place}"
    known = BlockHeader(
        slot,
        sequence,
        key,
        parent if flags & _HAS_PARENT else None,
        space,
        layout,
        tokens,
        payload_bytes,
        checksum,
        encoding.rstrip(b"\x00").decode(),
        bool(flags & _LOSSY),
    )
    return known, ""
