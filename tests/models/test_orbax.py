"""Models saved by Orbax: restored onto other meshes bit for bit, and no damage that is not named."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import family_cases
from mcjax.cost.model_shape import ModelShape
from mcjax.cost.parameters import Parameter, parameters
from mcjax.errors import ConfigError
from mcjax.models import catalogue
from mcjax.models.builtin import SeededWeights
from mcjax.models.decoder import Decoder
from mcjax.models.orbax_directory import DESCRIPTION, read_directory
from mcjax.models.orbax_weights import OrbaxWeights, save, weights_of

CASES = ("llama-tied", pytest.param("gemma3", marks=pytest.mark.check_long), "deepseek_v3")


def shape_of(case: str, **changes: Any) -> ModelShape:
    config = family_cases.CONFIGS[case] | {"num_hidden_layers": 2, "layer_types": None} | changes
    return ModelShape.from_hugging_face({key: value for key, value in config.items() if value is not None})


def over(devices: int, parameter: Parameter) -> NamedSharding:
    """Cut along the largest dimension that so many devices share; else everywhere whole."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    fit = [at for at, size in enumerate(parameter.shape) if size % devices == 0]
    cut = max(fit, key=lambda at: parameter.shape[at], default=None)
    return NamedSharding(mesh, PartitionSpec(*("x" if at == cut else None for at in range(len(parameter.shape)))))


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = shape_of("llama-tied")
    path = tmp_path_factory.mktemp("orbax") / "model"
    save(path, shape, SeededWeights(shape, 1))
    return path


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.mark.parametrize("case", CASES)
def test_restored_onto_other_meshes(tmp_path: Path, case: str) -> None:
    shape = shape_of(case, **({} if case.startswith("deepseek") else {"num_hidden_layers": 1}))
    seeded, declared = SeededWeights(shape, 3), parameters(shape)
    save(tmp_path / "two", shape, lambda name, parameter: seeded(name, parameter, over(2, parameter)))
    directory = read_directory(tmp_path / "two")
    assert directory.shape.identity() == shape.identity()
    for devices in (1, 4, 8)[: 3 if len(jax.devices()) >= 8 else 2]:
        source = OrbaxWeights(directory, shape)
        for name, parameter in declared.items():
            sharding = over(devices, parameter)
            found = source(name, parameter, sharding)
            assert found.sharding == sharding
            np.testing.assert_array_equal(np.asarray(found), np.asarray(seeded(name, parameter)), name)


def test_a_loaded_model_is_saved_and_loaded_again(tmp_path: Path) -> None:
    shape = shape_of("qwen3", dtype="bfloat16")
    model = Decoder(shape, 32, SeededWeights(shape, 2))
    (tmp_path / "tokenizer.json").write_text("{}")
    save(tmp_path / "m", shape, weights_of(model), [tmp_path / "tokenizer.json"])
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "{}"
    at = read_directory(tmp_path / "m").shape
    assert at.checkpoint == str(tmp_path / "m")
    loaded = catalogue.load(at, 0, 32)
    for ours, theirs in zip(jax.tree.leaves(loaded.model), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert loaded.fingerprint == catalogue.fingerprint(at, 1)
    save(tmp_path / "again", shape, weights_of(model))
    assert catalogue.fingerprint(read_directory(tmp_path / "again").shape, 0) == loaded.fingerprint  # by content
    save(tmp_path / "other", shape, SeededWeights(shape, 3))
    assert catalogue.fingerprint(read_directory(tmp_path / "other").shape, 0) != loaded.fingerprint


def test_restored_in_another_dtype(saved: Path) -> None:
    directory, shape = read_directory(saved), shape_of("llama-tied", dtype="bfloat16")
    name, parameter = next(iter(parameters(shape).items()))
    found = OrbaxWeights(directory, shape)(name, parameter)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(SeededWeights(shape, 1)(name, parameter)))


def test_nothing_is_overwritten_and_broken_numbers_are_not_saved(saved: Path, tmp_path: Path) -> None:
    shape = shape_of("llama-tied")
    with pytest.raises(ConfigError, match="is there already"):
        save(saved, shape, SeededWeights(shape, 1))
    with pytest.raises(ConfigError, match=r"final_norm\.gain: holds numbers that are NaN"):
        save(tmp_path / "nan", shape, lambda name, each: SeededWeights(shape, 1)(name, each) / (name[:5] != "final"))
    assert not (tmp_path / "nan").exists()


def load(path: Path) -> None:
    """The last block of a model."""
    directory = read_directory(path)
    source = OrbaxWeights(directory, directory.shape)
    for name, parameter in parameters(directory.shape).items():
        if name.startswith("blocks.1."):
            source(name, parameter)


def test_another_shape_is_refused_by_field(saved: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab=98: .*mcjax\.json has 97"):
        OrbaxWeights(read_directory(saved), shape_of("llama-tied", vocab_size=98))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda said: said.update(format=7), "format 7"),
        (lambda said: said.pop("shape"), "says no shape"),
        (lambda said: said["shape"].update(layers="x"), "model.layers"),
        (lambda said: said["shape"].update(fingers=5), "field fingers"),
        (lambda said: said["shape"].pop("heads"), "heads"),
        (lambda said: said.pop("parameters"), "lists no parameters"),
        (lambda said: said["parameters"].pop("embedding"), "lacks the parameter embedding"),
        (lambda said: said["parameters"]["embedding"].pop("digest"), "does not describe the parameter embedding"),
        (lambda said: said["parameters"]["embedding"].update(shape=[1, 2]), r"embedding is \[1, 2\]"),
    ],
)
def test_descriptions_that_are_damaged(copied: Path, change: Any, message: str) -> None:
    said = json.loads((copied / DESCRIPTION).read_text())
    change(said)
    (copied / DESCRIPTION).write_text(json.dumps(said))
    with pytest.raises(ConfigError, match=rf"mcjax\.json.*{message}"):
        read_directory(copied)


def test_parts_that_are_missing(copied: Path) -> None:
    (copied / DESCRIPTION).write_text((copied / DESCRIPTION).read_text()[:-40])
    with pytest.raises(ConfigError, match=r"mcjax\.json: is no JSON"):
        read_directory(copied)
    (copied / DESCRIPTION).unlink()
    with pytest.raises(ConfigError, match=r"mcjax\.json: cannot be read"):
        read_directory(copied)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax leaves coroutines behind
def test_weights_that_are_missing_or_damaged(saved: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(saved, tmp_path / "gone"))
    shutil.rmtree(path / "weights" / "blocks.1")
    with pytest.raises(ConfigError, match=r"blocks\.1: is not there, and should hold blocks\.1\.attention_norm\.gain"):
        read_directory(path)
    refused: set[bool] = set()
    for index, file in enumerate(sorted((saved / "weights" / "blocks.1").rglob("*"))):
        if not file.is_file() or not file.stat().st_size:
            continue
        path = Path(shutil.copytree(saved, tmp_path / str(index)))
        broken = path / file.relative_to(saved)
        content = bytearray(file.read_bytes())
        for at in range(len(content) // 2, len(content), 7):
            content[at] ^= 0x55
        broken.write_bytes(bytes(content))
        refused.add(is_refused(path, len(content) > 10_000))
        broken.unlink()
        refused.add(is_refused(path, len(content) > 10_000))
        shutil.rmtree(path)
    assert True in refused


def is_refused(path: Path, must_be: bool) -> bool:
    """Whether what is damaged is noticed; the bytes of what is loaded all the same are held against their digests."""
    try:
        load(path)
    except ConfigError as problem:
        return bool(re.search(r"blocks\.1: the parameter blocks\.1\..* cannot be restored", str(problem)))
    assert not must_be, "the numbers themselves"
    return False
