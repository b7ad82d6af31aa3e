"""`mcjax pool inspect DIR`: what an SSD tier holds, told without a lock and without changing anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcjax.app.pool.contents import Chains, Space, chains_of, spaces_of, tenants_by_digest
from mcjax.app.pool.folders import folders, read_headers
from mcjax.kvpool.keys import Salts
from mcjax.kvpool.stores.ssd.manifest import Manifest
from mcjax.kvpool.stores.ssd.reader import SlotHeader, open_folder

SHOWN = 5
"""Damaged slots, and namespaces, that the text names; `--json` has them all."""


class Inspected:
    """One node's folder."""

    def __init__(self, path: Path, salts: Salts, names: Sequence[str]):
        """Reads every header. Raises `StoreError` and `OSError`."""
        self.path = path
        with open_folder(path) as reader:
            self.manifest: Manifest = reader.manifest
            self.used_by = reader.used_by
            headers = read_headers(reader)
        self.blocks = len(headers.blocks)
        self.older, self.unused = headers.older, headers.unused
        self.damaged: list[SlotHeader] = headers.damaged
        self.chains: Chains = chains_of(headers.blocks)
        self.spaces: list[Space] = spaces_of(headers, tenants_by_digest(self.manifest, salts, names))

    def values(self) -> dict[str, Any]:
        """Everything, as plain JSON values."""
        manifest = self.manifest
        return {
            "path": str(self.path),
            "used_by": self.used_by or None,
            "model": manifest.kv_format.fingerprint,
            "block_tokens": manifest.kv_format.block_tokens,
            "block_bytes": manifest.block_bytes,
            "encoding": manifest.encoding,
            "lossy": manifest.lossy,
            "slots": manifest.capacity,
            "disk_bytes": sum(nbytes for _, nbytes in manifest.slabs()),
            "blocks": self.blocks,
            "bytes": self.blocks * manifest.block_bytes,
            "older_copies": self.older,
            "unused_slots": self.unused,
            "chains": self.chains.values(),
            "namespaces": [space.values() for space in self.spaces],
            "damage": [
                {"slot": one.slot, **place_of(manifest, one.slot), "problem": one.damage} for one in self.damaged
            ],
        }

    def text(self) -> str:
        """The same for people."""
        manifest, kv_format, chains = self.manifest, self.manifest.kv_format, self.chains.values()
        slabs = manifest.slabs()
        encoding = "" if manifest.encoding == "none" else f", encoded {manifest.encoding}"
        spaces = [
            f"{self._name(space)}: {space.blocks:,} blocks, {megabytes(space.blocks * manifest.block_bytes)}"
            for space in self.spaces
        ]
        damage = [f"slot {one.slot} ({where(manifest, one.slot)}): {one.damage}" for one in self.damaged]
        lines = [
            f"{self.path}" + (f", in use by {self.used_by}" if self.used_by else ""),
            f"  model       {kv_format.fingerprint}, {kv_format.block_tokens} tokens a block{encoding}",
            f"  disk        {manifest.capacity:,} slots in {len(slabs)} files, "
            f"{megabytes(sum(nbytes for _, nbytes in slabs))}",
            f"  blocks      {self.blocks:,}, {megabytes(self.blocks * manifest.block_bytes)}; {self.older:,} older "
            f"copies, {self.unused:,} slots never used",
            f"  chains      {chains['roots']:,} first blocks, {chains['leaves']:,} last ones; depth "
            f"{chains['depth_median']:g} (median), {chains['depth_longest']:,} (longest); {chains['branchings']:,} "
            f"branchings of up to {chains['most_children']:,}",
        ]
        if chains["without_prefix"]:
            lines.append(
                f"  lost        {chains['without_prefix']:,} blocks whose prefix is not there: nothing finds them"
            )
        lines += listed("namespaces", spaces)
        lines += listed("damage", damage or ["none in the headers; `mcjax pool verify` reads the blocks as well"])
        return "\n".join(lines)

    def _name(self, space: Space) -> str:
        digest = space.digest.hex()[:12] or "not told"
        return digest if space.tenant is None else f"{digest} (tenant {space.tenant})"


def inspected(path: Path, names: Sequence[str] = ()) -> list[Inspected]:
    """Every node's folder at `path`. `names` are tenants that may be told by their namespaces, beside those with a salt
    in the file of `MCJAX_TENANT_SALTS_FILE`. Raises `StoreError` and `OSError`."""
    salts = Salts.from_environment()
    return [Inspected(folder, salts, names) for folder in folders(path)]


def listed(what: str, lines: Sequence[str]) -> list[str]:
    """Lines under one heading, the first few of them."""
    shown = [f"  {what if not index else '':<12}{line}" for index, line in enumerate(lines[:SHOWN])]
    return shown + ([f"  {'':<12}and {len(lines) - SHOWN:,} more"] if len(lines) > SHOWN else [])


def place_of(manifest: Manifest, slot: int) -> dict[str, Any]:
    """File of a slot, and where its header begins in it."""
    slab, number = divmod(slot, manifest.slab_slots)
    return {"file": manifest.slabs()[slab][0], "offset": number * manifest.slot_bytes}


def where(manifest: Manifest, slot: int) -> str:
    place = place_of(manifest, slot)
    return f"{place['file']} at byte {place['offset']:,}"


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
