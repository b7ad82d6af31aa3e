"""Configs as transformers writes them, every default spelled out, say what the short ones say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from family_cases import CONFIGS
from mcjax.cost.model_shape import ModelShape

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_config_is_the_same_shape(name: str, tmp_path: Path) -> None:
    AutoConfig = pytest.importorskip("transformers").AutoConfig
    wanted = ModelShape.from_hugging_face(CONFIGS[name], name, dtype_bytes=4)
    config = AutoConfig.for_model(**CONFIGS[name])
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    for written in (saved, config.to_dict()):
        assert ModelShape.from_hugging_face(written, name, dtype_bytes=4) == wanted
