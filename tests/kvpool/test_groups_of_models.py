"""What models of several KV groups, and of latents, keep: sizes, layouts, encodings, SSD folders and logs agree."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from family_cases import CONFIGS
from mcjax.backends.at_rest import at_rest, host_layout
from mcjax.backends.base import Tiers
from mcjax.backends.replay.world import Shape
from mcjax.cost.model_shape import ModelShape
from mcjax.errors import LayoutMismatch, StoreError
from mcjax.kvpool.keys import namespace
from mcjax.transfer.layout.describe import Layout
from mcjax.transfer.layout.plan import plan
from mcjax.types import KVFormat, KVGroup
from ssd_fixtures import SsdTier

KINDS = {"llama": ["full"], "gemma2": ["full", "window"], "mistral": ["window"], "deepseek_v3": ["latent"]}
BLOCK_TOKENS = 4


def shape_of(name: str) -> ModelShape:
    return ModelShape.from_hugging_face(CONFIGS[name])


def format_of(name: str) -> KVFormat:
    return shape_of(name).kv_format(BLOCK_TOKENS, "weights")


@pytest.mark.parametrize("name", list(KINDS))
def test_a_block_holds_every_group_and_lies_as_a_page_does(name: str) -> None:
    shape, kv_format = shape_of(name), format_of(name)
    assert [group.kind for group in kv_format.groups] == KINDS[name]
    assert kv_format.block_bytes == np.prod(shape.page_shape(BLOCK_TOKENS)) * shape.kv_dtype_bytes
    layout = host_layout(shape, kv_format)
    assert layout is not None
    (group,) = layout.groups
    assert group.block_bytes(0) == kv_format.block_bytes
    assert (group.keys_and_values, len(group.layers)) == (shape.cache_entries, shape.layers)
    assert Layout.from_values(json.loads(json.dumps(layout.to_values()))) == layout
    assert plan(layout, layout).straight


@pytest.mark.parametrize("name", list(KINDS))
def test_every_vector_of_a_block_has_its_scale(name: str) -> None:
    """Of a latent one, of keys and values one each."""
    shape, kv_format = shape_of(name), format_of(name)
    rest = at_rest(Tiers(dram_encoding="int8", ssd_encoding="fp8"), shape, kv_format)
    *outer, width = shape.page_shape(BLOCK_TOKENS)
    block = np.random.default_rng(0).standard_normal((*outer, width)).astype(np.float32)
    for packer in (rest.dram, rest.ssd):
        packed = packer.pack(block.view(np.uint8).reshape(-1))
        assert packed.nbytes == packer.packed_bytes == np.prod(outer) * (4 + width)
        layout = rest.layout(packer)
        assert layout is not None
        assert layout.groups[0].block_bytes(0, layout.encoding) == packer.packed_bytes
        back = packer.unpack(packed).view(np.float32).reshape(block.shape)
        np.testing.assert_allclose(back, block, atol=0.05 * np.abs(block).max())


def test_latents_are_not_taken_for_keys_and_values() -> None:
    latent = host_layout(shape_of("deepseek_v3"), format_of("deepseek_v3"))
    full = host_layout(shape_of("llama"), format_of("llama"))
    assert latent is not None
    assert full is not None
    with pytest.raises(LayoutMismatch, match="KV groups"):
        plan(latent, full)


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3"])
def test_a_folder_is_opened_again_by_its_own_groups_only(name: str, tmp_path: Path) -> None:
    kv_format = format_of(name)

    def opened(kv_format: KVFormat) -> SsdTier:
        return SsdTier(tmp_path, block_bytes=kv_format.block_bytes, kv_format=kv_format, slab_bytes=None)

    tier = opened(kv_format)
    tier.put(0, [0, 1, 2])
    tier.close()
    again = opened(kv_format)
    assert len(again.store.recovered()) == 3
    again.close()
    one = (KVGroup(bytes_per_token=kv_format.bytes_per_token),)
    with pytest.raises(StoreError, match=kv_format.groups[-1].kind):
        opened(dataclasses.replace(kv_format, groups=one))


@pytest.mark.parametrize("name", list(KINDS))
def test_a_log_tells_the_groups_and_so_the_names_of_blocks(name: str) -> None:
    kv_format = format_of(name)
    told: dict[str, Any] = {
        "fingerprint": "weights",
        "bytes_per_token": kv_format.bytes_per_token,
        "page_tokens": BLOCK_TOKENS,
        "groups": [dataclasses.asdict(group) for group in kv_format.groups],
        **dict.fromkeys(("pages", "pool_blocks", "max_batch", "chunk_tokens", "max_context_tokens"), 1),
        "shares_decoded": False,
    }
    shape = Shape(**json.loads(json.dumps(told)))
    assert shape.kv_groups == kv_format.groups
    assert shape.block_bytes == kv_format.block_bytes
    del told["groups"]  # as earlier versions wrote it
    assert Shape(**told).kv_groups == (KVGroup(bytes_per_token=kv_format.bytes_per_token),)
    other = namespace(KVFormat("weights", BLOCK_TOKENS, Shape(**told).kv_groups), "salt")
    assert (namespace(kv_format, "salt") == other) == (name == "llama")
