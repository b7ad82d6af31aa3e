"""Checkpoints in another form: the same numbers under the names of the other, and taken up where it stopped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_fixtures as small
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import directory_fixtures as directories
import family_cases
from mcjax import cli
from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError
from mcjax.models import catalogue
from mcjax.models.byte_tokenizer import ByteTokenizer
from mcjax.models.checkpoint_shape import shape_at
from mcjax.models.convert import Target, convert
from mcjax.models.hugging_face import Dialect
from mcjax.models.tokenizer import tokenizer_for

CASES = ("llama-tied", "qwen2", "gemma3", "mixtral", "qwen3_moe", "deepseek_v3", "deepseek_v3-yarn")
TALK = [{"role": "user", "content": "hello 12 wörld"}]


def told(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a directory, by safetensors' own reader."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert set(ours) == set(theirs)
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype
        np.testing.assert_array_equal(ours[name].astype(np.float32), array.astype(np.float32), name)


def without_tokenizer(path: Path, **more: Any) -> Target:
    return Target(path, tokenizer=False, **more)


@pytest.mark.parametrize("case", CASES)
def test_a_directory_comes_out_as_it_went_in(tmp_path: Path, case: str) -> None:
    config = family_cases.CONFIGS[case]
    given = directories.tensors(config, Dialect(experts="mixtral" if case == "mixtral" else "separate"))
    shape = shape_at(str(directories.write(tmp_path / "in", config, given)))
    steps: list[tuple[int, int]] = []
    convert(shape, without_tokenizer(tmp_path / "out"), progress=lambda done, of: steps.append((done, of)))
    assert_same(told(tmp_path / "out"), given)
    assert [file.name for file in tmp_path.glob("*.partial")] == []
    assert steps[-1] == (sum(array.nbytes for array in given.values()),) * 2
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert shape_at(str(tmp_path / "out")).identity() == shape.identity()


def test_through_orbax_and_back_in_several_files(tmp_path: Path) -> None:
    path = small.write(tmp_path / "model.gguf")
    shape = shape_at(str(path))
    convert(shape, Target(tmp_path / "direct"))
    convert(shape, Target(tmp_path / "o", "orbax"))
    between = shape_at(str(tmp_path / "o"))
    assert between.identity() == shape.identity()
    convert(between, Target(tmp_path / "back", shard_bytes=5000))
    assert_same(told(tmp_path / "back"), told(tmp_path / "direct"))
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 2
    fingerprints = {catalogue.fingerprint(shape_at(str(tmp_path / name)), 0) for name in ("o", "back", "direct")}
    assert len(fingerprints) == 3
    wanted = tokenizer_for(shape)
    for name in ("direct", "o", "back"):
        found = tokenizer_for(shape_at(str(tmp_path / name)))
        assert found.end_tokens == wanted.end_tokens
        assert found.apply_chat_template(TALK) == wanted.apply_chat_template(TALK)
        catalogue.source(shape_at(str(tmp_path / name)))


def test_the_built_in_model_brings_its_bytes(tmp_path: Path) -> None:
    shape = replace(catalogue.builtin.DEFAULT_SHAPE, layers=1, checkpoint="")
    convert(shape, Target(tmp_path / "tiny"), seed=4)
    at = shape_at(str(tmp_path / "tiny"))
    assert at.identity() == shape.identity()
    ours, theirs = catalogue.load(at, 0, 8).model, catalogue.load(shape, 4, 8).model
    np.testing.assert_array_equal(np.asarray(ours.embedding[...]), np.asarray(theirs.embedding[...]))
    found, wanted = tokenizer_for(at), ByteTokenizer()
    assert found.vocab_size == wanted.vocab_size
    assert found.end_tokens == wanted.end_tokens
    assert found.encode("añ b\n") == wanted.encode("añ b\n")
    assert found.apply_chat_template(TALK) == wanted.apply_chat_template(TALK)


def test_another_dtype_is_rounded_once(tmp_path: Path) -> None:
    config = family_cases.CONFIGS["llama"]
    given = directories.tensors(config)
    shape = shape_at(str(directories.write(tmp_path / "in", config, given)), 2)
    convert(shape, without_tokenizer(tmp_path / "out"))
    assert_same(told(tmp_path / "out"), {name: array.astype(ml_dtypes.bfloat16) for name, array in given.items()})
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


class Stop(Exception):
    """What ends a conversion in a test."""


@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
def test_it_goes_on_where_it_stopped(tmp_path: Path, kind: str) -> None:
    path = small.write(tmp_path / "model.gguf")
    shape = shape_at(str(path))
    target = Target(tmp_path / "out", kind, shard_bytes=5000)

    def stop(done: int, of: int) -> None:
        if done > of * 0.7:
            raise Stop

    with pytest.raises(Stop):
        convert(shape, target, progress=stop)
    assert not (tmp_path / "out").exists()
    partial = tmp_path / "out.partial"
    weights = {file for file in partial.rglob("*") if file.suffix == ".safetensors" or file.name == "manifest.ocdbt"}
    before = {file.relative_to(partial): file.stat().st_mtime_ns for file in weights}
    assert before
    convert(shape, target)
    kept = [name for name, time in before.items() if (tmp_path / "out" / name).stat().st_mtime_ns == time]
    assert len(kept) == len(before)
    convert(shape, replace(target, path=tmp_path / "at once"))
    one, other = (shape_at(str(tmp_path / name)) for name in ("out", "at once"))
    assert catalogue.fingerprint(one, 0) == catalogue.fingerprint(other, 0)
    assert not list(tmp_path.rglob("convert.json"))


def test_what_was_left_of_other_weights_is_not_taken_up(tmp_path: Path) -> None:
    shape = replace(catalogue.builtin.DEFAULT_SHAPE, layers=1, checkpoint="")

    def stop(done: int, of: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        convert(shape, Target(tmp_path / "out", "orbax"), 1, stop)
    convert(shape, Target(tmp_path / "out", "orbax"), 2)
    convert(shape, Target(tmp_path / "two", "orbax"), 2)
    names = {catalogue.fingerprint(shape_at(str(tmp_path / name)), 0) for name in ("out", "two")}
    assert len(names) == 1


def test_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = family_cases.CONFIGS["llama"]
    source = directories.write(tmp_path / "in", config)
    shape = shape_at(str(source))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(ConfigError, match="is there already; --force replaces it"):
        convert(shape, without_tokenizer(tmp_path / "out"))
    assert (tmp_path / "out" / "mine").exists()
    convert(shape, without_tokenizer(tmp_path / "out", overwrite=True))
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in", "out"]
    with pytest.raises(ConfigError, match="holds what is to be converted"):
        convert(shape, without_tokenizer(source, overwrite=True))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(ConfigError, match=r"needs 0\.0 GB, and 0\.0 GB are free"):
        convert(shape, without_tokenizer(tmp_path / "large"))
    assert not (tmp_path / "large").exists()


def run(*arguments: str) -> int:
    return cli._command("convert", arguments)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = family_cases.CONFIGS["llama"]
    source = str(directories.write(tmp_path / "in", config))
    out = str(tmp_path / "m.orbax")
    assert run(source, out, "--no-tokenizer", "--dtype", "bfloat16") == 0
    assert "weights in bfloat16" in (told_ := capsys.readouterr().out)
    assert f"model.path={out}" in told_
    assert ModelShape.read(out).dtype == "bfloat16"  # its config.json
    assert run(source, out, "--no-tokenizer") == 2
    assert "--force" in capsys.readouterr().err
    assert run(str(tmp_path / "nothing"), out) == 2
    assert "no such file" in capsys.readouterr().err
    assert run(source, str(tmp_path / "x"), "--shard-gb", "0") == 2
    with pytest.raises(SystemExit):
        run("--help")
    assert "taken up" in capsys.readouterr().out.replace("takes it up", "taken up")
