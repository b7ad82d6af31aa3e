"""A shape goes to worker processes as plain values, and stands in configs as such."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from family_cases import CONFIGS
from mcjax.cost.architecture import Latent
from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_shape_comes_back_from_json(name: str) -> None:
    shape = ModelShape.from_hugging_face(CONFIGS[name])
    there = ModelShape(**json.loads(json.dumps(asdict(shape))))
    assert there == shape
    assert hash(there) == hash(shape)
    assert there.identity() == shape.identity()


def test_a_config_may_say_a_part_as_a_mapping_of_known_keys() -> None:
    sizes = {"layers": 2, "d_model": 64, "heads": 4, "kv_heads": 4, "head_dim": 24, "d_ff": 80, "vocab": 97}
    latent = {"kv_rank": 32, "rope_dim": 8, "nope_dim": 16, "value_dim": 12}
    assert ModelShape("mine", **sizes, latent=latent).latent == Latent(32, 8, 16, 12)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"model\.latent\.rank=32: there is no such key; allowed: kv_rank, "):
        ModelShape("mine", **sizes, latent={"rank": 32})  # pyright: ignore[reportArgumentType]
