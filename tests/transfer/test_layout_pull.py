"""Unequal meshes over every kind of endpoint: each target rank reads its heads where the source's ranks show theirs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from conformance import PATIENCE_S, SECRET, Show
from endpoint_kinds import KINDS
from endpoint_peer import buffer_of, pattern

from mcjax.transfer.layout.describe import GroupLayout, Layout, tensor_shards
from mcjax.transfer.layout.placed import Blocks, Placed, pulls
from mcjax.transfer.layout.plan import plan
from mcjax.transfer.layout.staged import apply, pack, staged_bytes, unpack
from mcjax.transfer.packing import fragmented
from mcjax.transfer.transports.endpoint import Endpoint, Spans

TOKENS = 60
LAYERS = ("0", "1", "2")


def mesh(kv_heads: int, tensor: int, block_tokens: int, dtype: str = "bfloat16") -> Layout:
    shards = tensor_shards(len(LAYERS), kv_heads, tensor)
    return Layout("weights", (GroupLayout("full", "full", LAYERS, kv_heads, 8, block_tokens, dtype, shards),))


def blocks_of(layout: Layout, rank: int, seed: int) -> tuple[Blocks, int]:
    """Where a request's blocks lie on a rank, anywhere in a region, and the region's length."""
    (group,) = layout.groups
    count, stride = -(-TOKENS // group.block_tokens), group.block_bytes(rank) + 64
    slots = np.random.default_rng(seed).permutation(count + 3)[:count]
    return Blocks(slots.astype(np.int64), stride), (count + 3) * stride


@pytest.mark.parametrize("meshes", [(2, 4), (4, 2), (1, 8), (8, 1), (4, 4)])
@pytest.mark.parametrize("target_dtype", ["bfloat16", "float32"])
def test_each_rank_reads_its_heads_from_another_process(
    endpoint: Endpoint, show: Show, meshes: tuple[int, int], target_dtype: str
) -> None:
    source, target = mesh(4, meshes[0], 16), mesh(4, meshes[1], 12, target_dtype)
    found = plan(source, target)
    regions = {rank: blocks_of(source, rank, rank) for rank in range(source.ranks)}
    shown = {rank: show(nbytes, seed=rank) for rank, (_, nbytes) in regions.items()}
    numbers = {rank: pattern(nbytes, rank) for rank, (_, nbytes) in regions.items()}
    sources = {("full", rank): Placed(numbers[rank], regions[rank][0]) for rank in regions}
    for rank in range(target.ranks):
        blocks, nbytes = blocks_of(target, rank, 50 + rank)
        local = endpoint.expose(buffer_of(nbytes, None))
        places = {number: at for number, (at, _) in regions.items()}
        for pull in pulls(found, "full", rank, 0, TOKENS, places, blocks):
            into = endpoint.expose(buffer_of(pull.staged_bytes, None)) if pull.staged_bytes else local
            results = endpoint.read(into, shown[pull.source_rank], pull.spans).result(PATIENCE_S)
            assert not results.errors
            pull.finish(into.buffer, local.buffer)
            if pull.staged_bytes:
                endpoint.withdraw(into)
        wanted = np.zeros(nbytes, np.uint8)
        targets = {("full", other): Placed(np.zeros(1 << 20, np.uint8), blocks) for other in range(target.ranks)}
        targets["full", rank] = Placed(wanted, blocks)
        apply(found, sources, targets, 0, TOKENS)
        assert wanted.any()
        assert (local.buffer == wanted).all()
        endpoint.withdraw(local)


def test_a_layout_travels_with_its_region(endpoint: Endpoint) -> None:
    layout = mesh(4, 2, 16)
    exposed = endpoint.expose(buffer_of(4096, None), layout=layout.to_values())
    told = json.loads(json.dumps(exposed.descriptor().to_json()))
    descriptor = exposed.descriptor().from_json(told)
    assert Layout.from_values(descriptor.layout) == layout
    other = replace(layout, fingerprint="other")
    assert Layout.from_values(descriptor.layout).differences(other) == ["model is weights, not other"]


def test_fragments_go_as_one_span_when_packed(kind: str, endpoint: Endpoint) -> None:
    """Heads of one rank out of pages of a whole model, with tokens outside of heads: short pieces, and many."""
    source, target, rank = mesh(4, 1, 16), mesh(4, 4, 12, "float32"), 2
    found = plan(source, target)
    at, nbytes = blocks_of(source, 0, 1)
    blocks, room = blocks_of(target, rank, 2)
    what = (found, "full", 0, rank, 0, TOKENS)
    [pull] = pulls(found, "full", rank, 0, TOKENS, {0: at}, blocks)
    assert fragmented(pull.spans.nbytes)
    peer = KINDS[kind].make(SECRET)
    try:
        region = buffer_of(nbytes, 7)
        shown, staging = peer.expose(region), peer.expose(buffer_of(staged_bytes(*what), None))
        into, local = (endpoint.expose(buffer_of(size, None)) for size in (staging.nbytes, room))
        assert not endpoint.read(into, shown.descriptor(), pull.spans).result(PATIENCE_S).errors
        pull.finish(into.buffer, local.buffer)
        wanted = local.buffer.copy()
        assert wanted.any()
        local.buffer[:], into.buffer[:] = 0, 0
        pack(*what, Placed(region, at), staging.buffer)
        one = Spans.of([(0, 0, staging.nbytes)])
        assert not endpoint.read(into, staging.descriptor(), one).result(PATIENCE_S).errors
        unpack(*what, into.buffer, Placed(local.buffer, blocks))
        assert (local.buffer == wanted).all()
    finally:
        peer.close()
