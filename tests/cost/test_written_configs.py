"""A shape's own `config.json` gives the shape again."""

from __future__ import annotations

from dataclasses import replace

import pytest

import family_cases
from mcjax.cost import catalogue
from mcjax.cost.families.written import config_of
from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError


@pytest.mark.parametrize("case", family_cases.CONFIGS)
def test_a_shape_is_what_its_config_says(case: str) -> None:
    shape = ModelShape.from_hugging_face(family_cases.CONFIGS[case])
    config = config_of(shape)
    assert ModelShape.from_hugging_face(config).identity() == shape.identity()
    assert config["model_type"] == {"mistral-full": "llama"}.get(case, family_cases.CONFIGS[case]["model_type"])


@pytest.mark.parametrize("name", ["tiny", "smollm2", "llama3-70b", "qwen3-32b"])
def test_shapes_of_the_catalogue(name: str) -> None:
    shape = catalogue.model(name)
    assert ModelShape.from_hugging_face(config_of(shape)).identity() == shape.identity()


def test_what_no_family_has_is_named() -> None:
    shape = ModelShape.from_hugging_face(family_cases.CONFIGS["llama"])
    with pytest.raises(ConfigError, match=r"model\.attention_soft_cap=3\.0.*llama would have 0\.0"):
        config_of(replace(shape, attention_soft_cap=3.0))
