"""Kernels that do not compute what a model asks for are refused by name, before anything is compiled."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import pytest
from flax import nnx

from family_cases import CONFIGS
from mcjax.backends.jax.ahead import abstract_model
from mcjax.backends.jax.world import JaxWorld
from mcjax.backends.processes.world import ProcessesWorld
from mcjax.cost.catalogue import model
from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError
from mcjax.kernels.choice import KernelChoice
from mcjax.kernels.serves import check_serves, options_of
from mcjax.types import NullRecorder

PALLAS = KernelChoice("pallas", "pallas", "pallas", "heads_first")


def shape_of(name: str) -> ModelShape:
    return ModelShape.from_hugging_face({**CONFIGS[name], "vocab_size": 259})


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of a user's own."""
    (tmp_path / "attentions_of_mine.py").write_text(
        textwrap.dedent(
            """
            def plain(queries, keys, values, pages, layer, page_table, positions, sharpness=1.0): ...

            def with_window(queries, keys, values, pages, layer, page_table, positions, *, window=None): ...

            class Whole:
                def __call__(self, queries, keys, values, pages, layer, page_table, positions, **look): ...

            class Plain:
                def __call__(self, queries, keys, values, pages, layer, page_table, positions): ...
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "attentions_of_mine"
    sys.modules.pop("attentions_of_mine", None)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_options_are_those_that_the_models_layers_name(name: str) -> None:
    shape = shape_of(name)
    named: dict[str, None] = {}

    def attend(queries: Any, keys: Any, values: Any, pages: Any, *rest: Any, **look: Any) -> Any:
        named.update(dict.fromkeys(look))
        return queries, pages

    def step(outline: Any) -> Any:
        pages = jnp.zeros((2, *shape.page_shape(8)), shape.dtype)
        zeros = jnp.zeros((1, 1), jnp.int32)
        return outline(zeros, zeros, pages, zeros, jnp.ones(1, jnp.int32), attend)

    nnx.eval_shape(step, abstract_model(shape, 8))
    assert sorted(named) == sorted(options_of(shape))


@pytest.mark.parametrize("key", ["prefill", "decode", "kv_pack"])
def test_latents_are_not_for_pallas(key: str) -> None:
    choice = KernelChoice(pages="heads_first")
    check_serves(choice, shape_of("deepseek_v3"))
    with pytest.raises(ConfigError, match=rf"kernels\.{key}=pallas: .*deepseek_v3 caches latents.*allowed: xla$"):
        check_serves(dataclasses.replace(choice, **{key: "pallas"}), shape_of("deepseek_v3"))
    check_serves(PALLAS, shape_of("gemma2"))


def test_a_users_own_kernel_takes_what_the_models_layers_name(mine: str) -> None:
    def own(name: str, **arguments: Any) -> KernelChoice:
        return KernelChoice(decode={"_target_": f"{mine}.{name}", **arguments})

    check_serves(own("plain", sharpness=2.0), model("tiny"))
    check_serves(own("Plain"), model("tiny"))
    check_serves(own("with_window"), shape_of("mistral"))
    check_serves(own("Whole"), shape_of("gemma2"))
    for name, kernel, option in (
        ("mistral", "plain", "window"),
        ("mistral", "Plain", "window"),
        ("gemma2", "with_window", "soft_cap"),
        ("deepseek_v3", "plain", "scale"),
    ):
        with pytest.raises(
            ConfigError, match=rf"kernels\.decode={mine}\.{kernel}: .*argument {option}: model {name} has"
        ):
            check_serves(own(kernel), shape_of(name))


def test_worlds_ask_before_they_load_anything(mine: str) -> None:
    shape = shape_of("deepseek_v3")
    with pytest.raises(ConfigError, match=r"kernels\.prefill=pallas: .*allowed: xla$"):
        JaxWorld(shape, kernels=PALLAS, max_context_tokens=64)
    inputs: Any = SimpleNamespace(model=shape, kernels=PALLAS, recorder=NullRecorder())
    with pytest.raises(ConfigError, match=r"kernels\.prefill=pallas: .*allowed: xla$"):
        ProcessesWorld(inputs, {}, cast("Any", None), 1.0)
