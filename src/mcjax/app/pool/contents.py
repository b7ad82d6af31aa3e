"""What lies in a folder of blocks: how many, in which chains, whose, and what is damaged. Told from headers alone."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcjax.app.pool.folders import Headers
from mcjax.kvpool.keys import Salts, namespace
from mcjax.kvpool.stores.ssd.header import BlockHeader, space_digest
from mcjax.kvpool.stores.ssd.manifest import Manifest
from mcjax.types import BlockKey

_NOT_KNOWN = bytes(32)


@dataclass(frozen=True, slots=True)
class Chains:
    """The prefix tree of the blocks that can be reached from a first one."""

    roots: int
    leaves: int
    depths: Sequence[int]
    """Of every leaf, in blocks, shortest first."""
    branchings: int
    """Blocks that more than one block continues."""
    most_children: int
    without_prefix: int
    """Blocks whose prefix is not there in full: nothing can find them."""

    def values(self) -> dict[str, Any]:
        depths = self.depths
        return {
            "roots": self.roots,
            "leaves": self.leaves,
            "depth_median": statistics.median(depths) if depths else 0,
            "depth_longest": depths[-1] if depths else 0,
            "branchings": self.branchings,
            "most_children": self.most_children,
            "without_prefix": self.without_prefix,
        }


def chains_of(blocks: Mapping[BlockKey, BlockHeader]) -> Chains:
    """The tree, walked from its first blocks down, so that a ring of wrong parents is no part of it."""
    children: dict[BlockKey, list[BlockKey]] = {}
    level: list[BlockKey] = []
    for key, header in blocks.items():
        if header.parent is None:
            level.append(key)
        else:
            children.setdefault(header.parent, []).append(key)
    roots, reached, depth = len(level), 0, 0
    depths: list[int] = []
    fans: list[int] = []
    while level:
        depth += 1
        reached += len(level)
        below: list[BlockKey] = []
        for key in level:
            more = children.get(key, [])
            below += more
            if more:
                fans.append(len(more))
            else:
                depths.append(depth)
        level = below
    branchings = sum(fan > 1 for fan in fans)
    return Chains(roots, len(depths), depths, branchings, max(fans, default=0), len(blocks) - reached)


def tenants_by_digest(manifest: Manifest, salts: Salts, names: Iterable[str]) -> dict[bytes, str]:
    """Whose blocks a digest of a namespace stands for: of tenants with a salt, and of those that are `names`d.

    Salts go into digests and nowhere else.
    """
    tenants = dict.fromkeys([*salts.tenants, *names])
    return {space_digest(namespace(manifest.kv_format, salts.of(tenant))): tenant for tenant in tenants}


@dataclass(frozen=True, slots=True)
class Space:
    """The blocks of one namespace: a model, layout, adapter, and a tenant's salt."""

    digest: bytes
    """Of the namespace; empty where the blocks do not say."""
    tenant: str | None
    """Whose it is, where that is known."""
    blocks: int

    def values(self) -> dict[str, Any]:
        return {"digest": self.digest.hex(), "tenant": self.tenant, "blocks": self.blocks}


def spaces_of(headers: Headers, tenants: Mapping[bytes, str]) -> list[Space]:
    """The namespaces there are, the largest first."""
    counts = Counter(header.namespace for header in headers.blocks.values())
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [Space(b"" if digest == _NOT_KNOWN else digest, tenants.get(digest), n) for digest, n in ordered]
