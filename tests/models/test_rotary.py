from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcjax.cost.architecture import Rope
from mcjax.errors import ConfigError
from mcjax.models.layers.rotary import attention_factor, frequencies, rotary_table

LLAMA31 = Rope(500_000.0, "llama3", 8.0, 8192, low_frequency_factor=1.0, high_frequency_factor=4.0)
YARN = Rope(1_000_000.0, "yarn", 4.0, 32_768)
DEEPSEEK = Rope(10_000.0, "yarn", 40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
DYNAMIC = Rope(10_000.0, "dynamic", 2.0, 64)
NOWHERE = np.zeros(1)


def plain(rope: Rope) -> Rope:
    return Rope(rope.theta)


def test_a_linear_scale_stretches_positions() -> None:
    rope = Rope(10_000.0, "linear", 4.0)
    np.testing.assert_array_equal(rotary_table(rope, 16, 41)[::4], rotary_table(plain(rope), 16, 11))


def test_llama3_divides_what_turns_less_than_once_and_leaves_what_turns_often() -> None:
    found, before = (frequencies(rope, 128, NOWHERE) for rope in (LLAMA31, plain(LLAMA31)))
    turns = before * 8192 / (2 * math.pi)
    np.testing.assert_array_equal(found[turns > 4], before[turns > 4])
    np.testing.assert_allclose(found[turns < 1], before[turns < 1] / 8, rtol=1e-12)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert (np.diff(found) < 0).all()
    assert ((found < before) & (found > before / 8))[between].all()


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_divides_low_frequencies_alone(truncate: bool) -> None:
    rope = dataclasses.replace(YARN, truncate=truncate)
    ratio = frequencies(plain(rope), 128, NOWHERE) / frequencies(rope, 128, NOWHERE)
    turns = frequencies(plain(rope), 128, NOWHERE) * 32_768 / (2 * math.pi)
    assert (np.diff(ratio) >= 0).all()
    np.testing.assert_allclose(ratio[turns > 40], 1, rtol=1e-12)
    np.testing.assert_allclose(ratio[turns < 0.75], 4, rtol=1e-12)


def test_yarn_scales_what_is_turned() -> None:
    assert attention_factor(YARN) == pytest.approx(0.1 * math.log(4) + 1)
    assert attention_factor(DEEPSEEK) == 1
    assert attention_factor(dataclasses.replace(DEEPSEEK, mscale=0.5)) == pytest.approx(
        (0.05 * math.log(40) + 1) / (0.1 * math.log(40) + 1)
    )
    table = rotary_table(dataclasses.replace(YARN, attention_factor=1.5), 16, 9)
    np.testing.assert_allclose((table**2).sum(axis=1), 2.25, rtol=1e-6)


@given(st.integers(0, 200), st.integers(1, 200))
def test_a_dynamic_row_depends_on_its_position_alone(position: int, further: int) -> None:
    """Whatever the length of the table, and plainly within the trained context: a cached key stays right."""
    short = frequencies(DYNAMIC, 16, np.arange(position + 1.0))[position]
    long = frequencies(DYNAMIC, 16, np.arange(position + 1.0 + further))[position]
    np.testing.assert_array_equal(short, long)
    before = frequencies(plain(DYNAMIC), 16, NOWHERE)
    if position < 64:
        np.testing.assert_allclose(short, before, rtol=1e-12)
    else:
        assert short[0] == before[0]
        assert (short[1:] < before[1:]).all()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"scaling": "longrope"}, "rope.scaling"),
        ({"factor": 0.0}, "rope.factor"),
        ({"original_context_tokens": 0}, "rope.original_context_tokens"),
        ({"scaling": "dynamic"}, "rope.scaling"),
    ],
)
def test_scalings_that_cannot_be_computed_are_named(changes: dict[str, Any], field: str) -> None:
    dim = 2 if changes == {"scaling": "dynamic"} else 16
    with pytest.raises(ConfigError, match=field):
        rotary_table(dataclasses.replace(YARN, **changes), dim, 4)


@pytest.mark.parity
@pytest.mark.parametrize(
    "rope",
    [LLAMA31, YARN, dataclasses.replace(YARN, truncate=False), DEEPSEEK, DYNAMIC, Rope(5_000.0, "linear", 8.0)],
    ids=["llama31", "yarn", "yarn-not-truncated", "deepseek", "dynamic", "linear"],
)
@pytest.mark.parametrize("dim", [64, 128])
def test_frequencies_are_those_of_transformers(rope: Rope, dim: int) -> None:
    from transformers import LlamaConfig  # pyright: ignore[reportMissingImports]
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # pyright: ignore[reportMissingImports]

    said: dict[str, Any] = {
        "rope_type": rope.scaling, "rope_theta": rope.theta, "factor": rope.factor,
        "original_max_position_embeddings": rope.original_context_tokens,
        "low_freq_factor": rope.low_frequency_factor, "high_freq_factor": rope.high_frequency_factor,
        "beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate,
        "mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim,
    }  # fmt: skip
    trained = rope.original_context_tokens or 64
    config: Any = LlamaConfig(head_dim=dim, max_position_embeddings=trained, rope_parameters=said)
    for position in (0, trained - 1, trained, 3 * trained):
        theirs, factor = ROPE_INIT_FUNCTIONS[rope.scaling](config, "cpu", seq_len=position + 1)
        ours = frequencies(rope, dim, np.array([float(position)])).reshape(-1)
        np.testing.assert_allclose(ours, theirs.double().numpy(), rtol=2e-6)  # they compute in float32
        assert factor == pytest.approx(attention_factor(rope))
