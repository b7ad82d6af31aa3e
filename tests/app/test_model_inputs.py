"""Which files of a model directory decide what a run was of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mcjax.app.inputs import inputs_of


def named(folder: Path, **more: Any) -> str:
    section = {"_target_": "mcjax.cost.model_shape.ModelShape.read", "path": str(folder), "name": "", **more}
    return inputs_of({"model": section}).by_key["model.path"]


def test_weights_count_where_they_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("one")
    shape_alone = named(folder)
    assert shape_alone.endswith(" some-model")
    (folder / "README.md").write_text("two")
    assert named(folder) == shape_alone
    weights = folder / "model.safetensors"
    weights.write_bytes(b"12")
    first = named(folder)
    assert first != shape_alone
    assert first.endswith(" some-model")
    weights.write_bytes(b"345")
    assert named(folder) not in (first, shape_alone)
    assert named(folder, checkpoint="elsewhere.gguf") == shape_alone
    assert named(folder, checkpoint="") == shape_alone
