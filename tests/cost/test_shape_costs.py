"""Windows, latents and experts in what a shape counts: parameters, KV bytes, FLOPs, times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from family_cases import CONFIGS
from mcjax.cost import formulas
from mcjax.cost.architecture import Latent, Rope, Routing
from mcjax.cost.catalogue import hardware, model
from mcjax.cost.kernels import AttentionShape, prefill_cost
from mcjax.cost.memory import activation_bytes
from mcjax.cost.model_shape import ModelShape
from mcjax.cost.parameters import parameters
from mcjax.cost.roofline import Roofline
from mcjax.errors import ConfigError
from published_configs import PUBLISHED

SHAPES = {name: ModelShape.from_hugging_face(config, dtype_bytes=2) for name, config in CONFIGS.items()}
REAL = {name: ModelShape.from_hugging_face(config, dtype_bytes=2) for name, config in PUBLISHED.items()}
MACHINE = hardware("h200x8")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama3-8b", 8.03e9),
        ("qwen3-32b", 32.8e9),
        ("qwen2.5-7b", 7.62e9),
        ("mistral-7b", 7.24e9),
        ("gemma3-27b", 27.0e9),
        ("mixtral-8x7b", 46.7e9),
        ("qwen3-30b-a3b", 30.5e9),
        ("deepseek-v3", 671e9),
        ("kimi-k2", 1.027e12),
    ],
)
def test_parameters_are_as_published(name: str, count: float) -> None:
    assert REAL[name].parameters == pytest.approx(count, rel=0.01)


@pytest.mark.parametrize(
    ("name", "active"),  # as model cards state them; with the output head, without the embedding
    [("deepseek-v3", 37e9), ("kimi-k2", 32e9), ("qwen3-30b-a3b", 3.3e9), ("mixtral-8x7b", 12.9e9)],
)
def test_parameters_that_work_on_a_token(name: str, active: float) -> None:
    shape = REAL[name]
    multiplied = (formulas.matmul_flops_per_token(shape) + formulas.head_flops(shape)) / 2
    assert multiplied + shape.head_parameters == pytest.approx(active, rel=0.05)


@pytest.mark.parametrize("name", SHAPES)
def test_matrices_that_all_tokens_pass_are_counted_once(name: str) -> None:
    """With every expert taken, FLOPs are twice the declared matrices."""
    shape = SHAPES[name]
    if shape.experts:
        shape = replace(shape, experts_per_token=shape.experts, routing=Routing(bias=shape.routing.bias))
    matrices = sum(p.size for key, p in parameters(shape).items() if p.fan_in and key not in ("embedding", "head"))
    assert formulas.matmul_flops_per_token(shape) == 2 * matrices
    assert formulas.weight_read_bytes(shape, 1) == 2 * (matrices + shape.head_parameters)


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("llama", [("full", "full", 3 * 2 * 2 * 16 * 2, 0)]),
        ("mistral", [("window", "window", 3 * 2 * 2 * 16 * 2, 9)]),
        ("gemma2", [("full", "full", 3 * 2 * 2 * 16 * 2, 0), ("window", "window", 3 * 2 * 2 * 16 * 2, 9)]),
        ("gemma3", [("full", "full", 2 * 2 * 16 * 2, 0), ("window", "window", 5 * 2 * 2 * 16 * 2, 9)]),
        ("deepseek_v3", [("latent", "latent", 3 * (32 + 8) * 2, 0)]),
    ],
)
def test_kv_groups(name: str, groups: list[tuple[str, str, int, int]]) -> None:
    shape = SHAPES[name]
    layout = shape.kv_format(16, "f")
    found = [(group.name, group.kind, group.bytes_per_token, group.window_tokens) for group in layout.groups]
    assert found == groups
    assert layout.block_bytes == int(np.prod(shape.page_shape(16))) * shape.kv_dtype_bytes
    assert layout.bytes_per_token == shape.kv_bytes_per_token


def test_windows_of_two_widths_are_two_groups() -> None:
    shape = replace(SHAPES["llama"], layer_windows=(4, 0, 8))
    assert [group.name for group in shape.kv_groups] == ["full", "window4", "window8"]
    assert shape.kv_bytes(6) == (4 + 6 + 6) * shape.layer_kv_bytes


@given(st.sampled_from(sorted(SHAPES)), st.integers(0, 100))
def test_kv_bytes_of_a_context(name: str, tokens: int) -> None:
    shape = SHAPES[name]
    by_layer = sum(min(tokens, window or tokens) for window in shape.windows)
    assert shape.kv_bytes(tokens) == by_layer * shape.layer_kv_bytes
    assert shape.kv_bytes(tokens) <= tokens * shape.kv_bytes_per_token


@settings(deadline=None)
@given(st.sampled_from(sorted(SHAPES)), st.lists(st.integers(0, 30), max_size=6))
def test_chunks_sum_to_the_whole(name: str, chunks: list[int]) -> None:
    shape, cost = SHAPES[name], Roofline(SHAPES[name], MACHINE)
    starts = [sum(chunks[:index]) for index in range(len(chunks))]
    flops = sum(formulas.prefill_flops(shape, start, length) for start, length in zip(starts, chunks))
    assert flops == formulas.prefill_flops(shape, 0, sum(chunks))
    whole_ns = cost.prefill_ns(0, sum(chunks))
    assert sum(cost.prefill_ns(start, length) for start, length in zip(starts, chunks)) == whole_ns


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 5))
def test_a_window_as_long_as_the_context_costs_as_full_attention(start: int, length: int, batch: int) -> None:
    full = SHAPES["llama"]
    wide = replace(full, layer_windows=(121, 500, 0))
    for of in (formulas.prefill_flops, formulas.prompt_pairs):
        assert of(wide, start, length) == of(full, start, length)
    ours, theirs = Roofline(wide, MACHINE), Roofline(full, MACHINE)
    assert formulas.decode_bytes(wide, batch, batch * start) == formulas.decode_bytes(full, batch, batch * start)
    # Each window's layers are rounded by themselves.
    assert ours.prefill_ns(start, length) == pytest.approx(theirs.prefill_ns(start, length), abs=2)
    assert ours.mixed_ns(start, length, batch, batch * start) == pytest.approx(
        theirs.mixed_ns(start, length, batch, batch * start), abs=2
    )


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 60), st.integers(0, 60))
def test_a_narrower_window_never_costs_more(window: int, start: int, length: int) -> None:
    narrow = replace(SHAPES["llama"], layer_windows=(window, 0, window))
    wide = replace(narrow, layer_windows=(window + 1, 0, window + 1))
    assert formulas.prefill_flops(narrow, start, length) <= formulas.prefill_flops(wide, start, length)
    assert formulas.decode_bytes(narrow, 2, start) <= formulas.decode_bytes(wide, 2, start)
    assert formulas.decode_flops(narrow, 2, start) <= formulas.decode_flops(wide, 2, start)


@settings(deadline=None)
@given(st.sampled_from(sorted(SHAPES)), st.integers(1, 200), st.lists(st.integers(0, 200), min_size=1, max_size=4))
def test_estimates_are_what_steps_cost(name: str, prompt: int, reused: list[int]) -> None:
    """The conductor's estimates in seconds against the executor's nanoseconds."""
    cost = Roofline(SHAPES[name], MACHINE)
    cached = np.minimum(np.array(reused), prompt)
    wanted = [cost.prefill_ns(start, prompt - start) / 1e9 for start in cached.tolist()]
    assert cost.prefill_s(prompt, cached) == pytest.approx(wanted, abs=2e-9)
    batches, contexts = np.array([1, 2, 7]), np.array([3, 40, 900])
    steps = [int(cost.step_ns(b, c, 1)[0]) / 1e9 for b, c in zip(batches.tolist(), contexts.tolist())]
    assert cost.decode_s(batches, contexts) == pytest.approx(steps, abs=2e-9)
    mixed = [cost.mixed_ns(0, 0, b, c) / 1e9 for b, c in zip(batches.tolist(), contexts.tolist())]
    assert mixed == pytest.approx(steps, abs=2e-9)


def test_pairs_of_a_step_by_hand() -> None:
    shape = replace(SHAPES["llama"], layer_windows=(4, 0, 0))
    # Two sequences of three tokens and a new one each: all within the window. Of ten each: four keys in one layer.
    assert formulas.step_pairs(shape, 2, 6) == 3 * 8
    assert formulas.step_pairs(shape, 2, 20) == 8 + 2 * 22


def test_latent_attention_by_hand() -> None:
    shape = REAL["deepseek-v3"]
    assert shape.kv_bytes_per_token == 61 * 576 * 2 == 70_272
    assert formulas.layer_pair_flops(shape) == 2 * 128 * (576 + 512)
    layer = AttentionShape(128, 1, 576, 64, entries=1, value_dim=512)
    assert layer.token_bytes == 576 * 2
    assert prefill_cost(layer, [(0, 4)]).flops == 10 * formulas.layer_pair_flops(shape)
    queries, keys_values = 7168 * 1536 + 1536 * 128 * 192, 7168 * 576 + 128 * (128 + 128) * 512
    assert shape.attention_parameters == queries + keys_values + 128 * 128 * 7168
    assert activation_bytes(replace(shape, shared_experts=3), 8, 1024) > activation_bytes(shape, 8, 1024)


def test_first_layers_without_experts_keep_their_all_reduces() -> None:
    shape = REAL["deepseek-v3"]
    mixed = formulas.expert_parallel_bytes_per_token(shape, 8)
    experts_alone = formulas.expert_parallel_bytes_per_token(replace(shape, dense_layers=0), 8)
    all_dense = formulas.collective_bytes_per_token(shape, 8)
    assert mixed == pytest.approx((58 * experts_alone + 3 * all_dense) / 61, abs=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_windows": (4, 4)}, r"model\.layer_windows=2.*one a layer"),
        ({"layer_windows": (4, -1, 0)}, r"model\.layer_windows=-1"),
        ({"layer_windows": (4, 1.5, 0)}, r"model\.layer_windows=1\.5"),
        ({"activation": "relu"}, r"model\.activation=relu.*silu"),
        ({"attention_soft_cap": -1.0}, r"model\.attention_soft_cap=-1"),
        ({"query_scale": float("nan")}, r"model\.query_scale=nan"),
        ({"embedding_scale": 0.0}, r"model\.embedding_scale=0"),
        ({"shared_experts": 1}, r"model\.shared_experts=1.*no experts"),
        ({"experts": 4, "experts_per_token": 5}, r"model\.experts_per_token=5"),
        ({"experts": 4, "experts_per_token": 2, "dense_layers": 4}, r"model\.dense_layers=4.*layers=3"),
        ({"experts": 4, "experts_per_token": 2, "routing": Routing(groups=3)}, r"routing\.groups=3.*experts=4"),
        ({"experts": 4, "experts_per_token": 3, "routing": Routing(groups=2)}, "experts_per_token=3.*1 of 2 groups"),
        ({"latent": Latent(8, 4, 4, 4)}, r"model\.kv_heads=2.*heads=6"),
        ({"latent": Latent(8, 4, 4, 4), "kv_heads": 6}, r"model\.head_dim=16.*8"),
        ({"latent": Latent(8, 4, 12, 4), "kv_heads": 6, "qk_norm": True}, r"model\.qk_norm=True"),
    ],
)
def test_shapes_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SHAPES["llama"], **changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rope(scaling="spiral"), r"rope\.scaling=spiral.*yarn"),
        (lambda: Rope(theta=0.0), r"rope\.theta=0"),
        (lambda: Rope(scaling="yarn", factor=2.0), r"rope\.original_context_tokens=0"),
        (lambda: Rope(scaling="llama3", original_context_tokens=8, high_frequency_factor=1.0), "high_frequency"),
        (lambda: Latent(8, 3, 4, 4), r"latent\.rope_dim=3.*even"),
        (lambda: Latent(0, 4, 4, 4), r"latent\.kv_rank=0"),
        (lambda: Routing(scores="max"), r"routing\.scores=max.*sigmoid"),
        (lambda: Routing(groups=2, groups_per_token=3), r"groups_per_token=3.*groups=2"),
    ],
)
def test_parts_that_cannot_be_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_full_attention_is_as_before() -> None:
    """A model without a window: the sums that the constants were fitted to."""
    shape = model("llama3-70b")
    assert formulas.attention_flops_per_pair(shape) == 80 * 4 * 64 * 128
    assert Roofline(shape, hardware("a800x8")).prefill_ns(1000, 1000) == 113_944_859
