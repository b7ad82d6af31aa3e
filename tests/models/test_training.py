"""`mcjax train-tiny`: its text, one path of training however often it is interrupted, and what ships."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mcjax
from mcjax.cost import catalogue as shapes
from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError
from mcjax.kernels.attention.reference import paged_attention
from mcjax.kernels.xla import WriteThenRead
from mcjax.models import builtin, catalogue
from mcjax.models.byte_tokenizer import ByteTokenizer
from mcjax.models.tokenizer import tokenizer_for
from mcjax.models.training.directory import rounded, write_directory
from mcjax.models.training.loop import Learner, Trained, train
from mcjax.models.training.measure import agreement, held_out_rows, measured
from mcjax.models.training.shipped import card
from mcjax.models.training.step import Recipe, as_function, dense_attention
from mcjax.models.training.text import Corpus, corpus

TRAINED = Path(mcjax.__file__).parent / "models" / "trained"
SMALL = ModelShape("small", 1, 16, 4, 2, 8, 24, 259, dtype_bytes=4, kv_dtype_bytes=4)
RECIPE = Recipe(steps=8, tokens_per_step=64, row_tokens=16, long_row_tokens=32, context_tokens=64, warmup_steps=1)
BOUND_BITS = {"tiny": 3.0, "tiny-draft": 3.4}
"""Of the first rows of what is held out. Random weights need more than eight."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A standard library of three files."""
    folder = tmp_path_factory.mktemp("library")
    topics = {
        f"topic {n}": f"The statement number {n} is used to do what the number says.\n\nIt ends." for n in range(40)
    }
    (folder / "pydoc_data").mkdir()
    (folder / "pydoc_data" / "topics.py").write_text(f"topics = {topics!r}\n")
    (folder / "test").mkdir()
    (folder / "test" / "test_some.py").write_text('"""A test, which not every installation brings with it."""\n')
    code = '"""{0}: what it is for takes forty characters to say."""\n' + (
        'class Thing:\n    """A thing of {0}, as long as a docstring must be here."""\n'
        '    def turn(self):\n        """Turn the thing of {0} by as much as it has been told."""\n'
        "def short():\n    '''Too short.'''\n"
    )
    for name in ("some", "other"):
        (folder / f"{name}.py").write_text(code.format(name))
    return folder


@pytest.fixture(scope="module")
def text(library: Path) -> Corpus:
    return corpus(library)


def test_text_has_chats_topics_and_their_frames(text: Corpus) -> None:
    whole = ByteTokenizer().decode([*text.training, *text.held_out])
    asked = "User: What is some.Thing?\nAssistant: A thing of some, as long as a docstring must be here."
    assert asked + "\nUser: What is some.Thing.turn?\nAssistant: Turn the thing" in whole
    assert "A test" not in whole
    assert "Too short" not in whole
    assert text.parts.keys() == {"pydoc_data/topics.py", "some.py", "other.py"}
    for side in (text.training, text.held_out):
        opened, closed = np.flatnonzero(side == 256), np.flatnonzero(side == 257)
        assert opened[0] == 0
        assert closed[-1] == side.size - 1
    assert text.held_out_bytes == (text.held_out < 256).sum() > 0


def test_text_is_a_function_of_the_files(library: Path, text: Corpus, tmp_path: Path) -> None:
    again = corpus(library)
    assert (again.digest, again.parts) == (text.digest, text.parts)
    for file in library.rglob("*.py"):
        copy = tmp_path / file.relative_to(library)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(file.read_text().replace("of other", "of another"))
    changed = corpus(tmp_path)
    assert changed.digest != text.digest
    assert changed.differences(text.parts) == ["other.py"]


def test_nothing_held_out_is_learnt(library: Path, text: Corpus) -> None:
    """A paragraph counts once: those that all topics share are in one of them."""
    held_out = ByteTokenizer().decode(text.held_out.tolist())
    learnt = ByteTokenizer().decode(text.training.tolist())
    for number in range(40):
        line = f"The statement number {number} is used"
        assert (line in held_out) != (line in learnt)


def _learner(folder: Path, steps: int = RECIPE.steps) -> Learner:
    return Learner("small", SMALL, dataclasses.replace(RECIPE, steps=steps), folder)


def _same(one: Trained, other: Trained) -> bool:
    pairs = ((one.parameters[name], other.parameters[name]) for name in one.parameters)
    return all(np.array_equal(ours, theirs) for ours, theirs in pairs)


def test_resumed_training_is_the_uninterrupted_one(text: Corpus, tmp_path: Path) -> None:
    """Bit for bit; and the first steps are those of a longer training."""
    seen: list[float] = []
    whole = train(_learner(tmp_path / "whole"), text, lambda progress: seen.append(progress.loss_bits))
    assert whole.step == RECIPE.steps
    assert 0 < seen[-1] < 9
    first = dataclasses.replace(RECIPE, steps=60)
    early = Learner("small", SMALL, first, tmp_path / "parts")
    stopped = train(early, text, lambda _: None, until_s=0)
    assert stopped.step == 0
    *_, resumed = (train(_learner(tmp_path / "parts"), text, lambda _: None, resume=True) for _ in range(2))
    assert _same(resumed, whole)
    with pytest.raises(ConfigError, match="--steps"):
        train(_learner(tmp_path / "parts", steps=60), text, lambda _: None, resume=True)
    other = Learner("small", SMALL, dataclasses.replace(RECIPE, seed=1), tmp_path / "parts")
    with pytest.raises(ConfigError, match="another recipe"):
        train(other, text, lambda _: None, resume=True)


def test_loss_falls_and_a_draft_learns_from_its_target(text: Corpus, tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPE, steps=60, learning_rate=1e-2, last_share=0.0)
    target = train(Learner("t", SMALL, recipe, tmp_path), text, lambda _: None)
    guess = partial(target.logits, target.parameters)
    rows = text.training[: 4 * 33].reshape(4, 33)
    assert measured(guess, rows).bits_per_byte < 0.8 * 8.02  # the logarithm of the vocabulary
    teach = dataclasses.replace(recipe, taught=1.0)
    small = dataclasses.replace(SMALL, d_ff=8)
    draft = train(Learner("d", small, teach, tmp_path), text, lambda _: None, teacher=guess)
    both = agreement(guess, partial(draft.logits, draft.parameters), rows)
    assert 0.5 < both.accepted <= 1 + 1e-5


def test_what_is_written_is_read_back(text: Corpus, tmp_path: Path) -> None:
    """Through a Hugging Face directory, in bfloat16."""
    trained = train(_learner(tmp_path), text, lambda _: None)
    write_directory(tmp_path / "small", SMALL, trained.parameters, {"model": "small"})
    shape = ModelShape.read(str(tmp_path / "small"), dtype_bytes=4, checkpoint=str(tmp_path / "small"))
    assert shape.identity() == dataclasses.replace(SMALL, name=shape.name).identity()
    values, _ = as_function(catalogue.load(shape, 0, 64).model)
    expected = rounded(trained.parameters)
    assert values.keys() == expected.keys()
    assert all(np.array_equal(values[name], expected[name]) for name in values)
    assert isinstance(tokenizer_for(shape), ByteTokenizer)


def test_training_computes_what_serving_does(text: Corpus) -> None:
    """Logits over whole rows, and those of the engine's entry point over pages."""
    model = catalogue.load(shapes.model("tiny"), max_positions=64).model
    values, logits = as_function(model)
    tokens = text.held_out[:16].reshape(2, 8)
    positions = np.broadcast_to(np.arange(8, dtype=np.int32), tokens.shape)
    whole = jax.jit(logits)(values, tokens, positions)
    pages = jnp.zeros((5, *model.shape.page_shape(4)))
    table, attend = jnp.arange(4).reshape(2, 2), WriteThenRead(paged_attention, "tokens_first")
    last, _ = model(jnp.asarray(tokens), jnp.asarray(positions), pages, table, jnp.array([8, 8]), attend)
    np.testing.assert_allclose(whole[:, -1], last, atol=1e-4)


def test_skipped_positions_are_seen_and_the_past_alone_is() -> None:
    recipe = dataclasses.replace(RECIPE, tokens_per_step=512)
    rows, positions = recipe.batch(np.arange(1000, dtype=np.int32), 0)
    assert rows.shape == (32, 17)
    assert positions.shape == (32, 16)
    assert np.array_equal(rows[:, 1:], rows[:, :-1] + 1)
    assert (np.diff(positions) >= 1).all()
    assert (positions < recipe.context_tokens).all()
    assert (np.diff(positions) > 1).any(axis=1).sum() > 8
    assert recipe.batch(np.arange(1000, dtype=np.int32), recipe.first_steps)[0].shape[1] == 33
    random = np.random.default_rng(0)
    queries, keys, values = (jnp.asarray(random.normal(size=(1, 6, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    unused = jnp.zeros((1, 6), jnp.int32)
    found, _ = dense_attention(queries, keys, values, None, 0, None, unused)
    changed, _ = dense_attention(queries, keys.at[:, 4:].set(0), values.at[:, 4:].set(9), None, 0, None, unused)
    np.testing.assert_array_equal(found[:, :4], changed[:, :4])
    assert not np.allclose(found[:, 4:], changed[:, 4:])


def test_shipped_weights_are_small_and_know_something() -> None:
    files = [file for file in TRAINED.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 3_000_000
    assert shapes.model("tiny-draft").parameters < 0.27 * shapes.model("tiny").parameters
    rows = held_out_rows(corpus(), 8)
    for name, bound in BOUND_BITS.items():
        shape = shapes.model(name)
        values, logits = as_function(catalogue.load(shape, max_positions=512).model)
        found = measured(partial(logits, values), rows)
        assert found.bits_per_byte < bound
        assert abs(found.bits_per_byte - card(name)["held_out"]["bits_per_byte"]) < 0.6
        assert card(name)["parameters"] == shape.parameters


def test_other_sizes_and_seeds_are_random_ones() -> None:
    tiny = shapes.model("tiny")
    with pytest.raises(ConfigError, match="for which a llama of this config has no use") as error:
        catalogue.load(dataclasses.replace(tiny, layers=2))
    assert "model.checkpoint=''" in error.value.__notes__[0]
    random = dataclasses.replace(tiny, layers=2, checkpoint="")
    assert catalogue.fingerprint(random, 1) == builtin.fingerprint(random, 1)
    assert catalogue.fingerprint(tiny, 0) == catalogue.fingerprint(tiny, 1) != builtin.fingerprint(tiny, 0)
