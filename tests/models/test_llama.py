"""The paged model against a dense one written without pages, chunks or masks of its own."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mcjax.errors import ConfigError
from mcjax.kernels.attention.pages import page_dtype
from mcjax.kernels.base import Site
from mcjax.kernels.choice import KernelChoice
from mcjax.kernels.sets import kernel_set
from mcjax.kernels.target import Target
from mcjax.models import builtin
from mcjax.models.llama import LlamaConfig, wide_product

CONFIG = LlamaConfig(layers=2, d_model=48, heads=6, kv_heads=2, head_dim=16, d_ff=80, vocab=97)


class Recorded(builtin.SeededWeights):
    """Keeps the weights by name, in float64, for the dense model. Gains are made unlike one another."""

    def __init__(self, config, seed):
        super().__init__(config, seed)
        self.by_name = {}

    def __call__(self, name, shape, fan_in):
        weight = super().__call__(name, shape, fan_in)
        if fan_in == 0:
            weight = weight * (1 + jnp.arange(shape[0]) / shape[0])
        self.by_name[name] = np.asarray(weight, dtype=np.float64)
        return weight


def dense(config, weights, tokens):
    """`[T, V]` logits of every position, in NumPy float64, straight from the papers' formulas."""

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * weights[name]

    def turned(x):  # [T, H, D], pairs (i, i + D/2)
        half = config.head_dim // 2
        angle = np.arange(len(x))[:, None] * config.rope_theta ** (-np.arange(half) / half)
        rotation = np.exp(1j * angle)[:, None, :]
        pairs = (x[..., :half] + 1j * x[..., half:]) * rotation
        return np.concatenate([pairs.real, pairs.imag], -1)

    x = weights["embedding"][tokens]
    for layer in range(config.layers):
        name = f"blocks.{layer}"
        h = norm(x, f"{name}.attention_norm.gain")
        query = turned(np.einsum("te,ehd->thd", h, weights[f"{name}.attention.query"]))
        key = turned(np.einsum("te,ehd->thd", h, weights[f"{name}.attention.key"]))
        value = np.einsum("te,ehd->thd", h, weights[f"{name}.attention.value"])
        out = np.zeros((len(tokens), config.heads, config.head_dim))
        for head in range(config.heads):
            shared = head // (config.heads // config.kv_heads)
            scores = query[:, head] @ key[:, shared].T / np.sqrt(config.head_dim)
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            weight = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = weight / weight.sum(-1, keepdims=True) @ value[:, shared]
        x = x + np.einsum("thd,hde->te", out, weights[f"{name}.attention.output"])
        h = norm(x, f"{name}.feed_forward_norm.gain")
        gate = h @ weights[f"{name}.feed_forward.gate"]
        up = h @ weights[f"{name}.feed_forward.up"]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{name}.feed_forward.down"]
    return norm(x, "final_norm.gain") @ weights.get("head", weights["embedding"]).T


def attention(name, layout: Any = "tokens_first"):
    return kernel_set(KernelChoice(prefill=name, pages=layout), Site(Target("tpu", interpret=True))).prefill


@pytest.mark.parametrize("kernel", ["reference", "xla"])
@pytest.mark.parametrize("layout", ["tokens_first", "heads_first"])
@pytest.mark.parametrize("tied", [True, False])
def test_paged_logits_agree_with_a_dense_model(kernel, layout, tied):
    config = dataclasses.replace(CONFIG, tied_embeddings=tied)
    source = Recorded(config, 3)
    model = builtin.Llama(config, 96, source)
    attend = attention(kernel, layout)
    rng = np.random.default_rng(0)
    lengths = [83, 70]
    prompts = [rng.integers(0, config.vocab, length) for length in lengths]
    want = [dense(config, source.by_name, prompt) for prompt in prompts]

    page_tokens, width = 8, 12
    pages = jnp.full((2 * width + 1, *config.page_shape(page_tokens)), jnp.nan)
    pages = pages if layout == "tokens_first" else jnp.swapaxes(pages, 3, 4)
    table = rng.permutation(2 * width).reshape(2, width).astype(np.int32)

    @jax.jit
    def step(tokens, positions, pages, table, lengths):
        return model(tokens, positions, pages, table, lengths, attend)

    chunk, done = 30, [0, 0]
    while done != lengths:
        count = np.array([min(chunk, length - at) for length, at in zip(lengths, done, strict=True)], dtype=np.int32)
        tokens = np.zeros((2, chunk), dtype=np.int32)
        positions = np.full((2, chunk), -1, dtype=np.int32)
        for row in range(2):
            tokens[row, : count[row]] = prompts[row][done[row] : done[row] + count[row]]
            positions[row, : count[row]] = np.arange(done[row], done[row] + count[row])
        logits, pages = step(tokens, positions, pages, table, count)
        done = [int(at + n) for at, n in zip(done, count, strict=True)]
        for row in range(2):
            if count[row]:
                np.testing.assert_allclose(logits[row], want[row][done[row] - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 7, 32])
@pytest.mark.parametrize("summed_axis", [0, 1])
def test_a_row_of_a_product_depends_on_no_other(dtype, rows, summed_axis):
    draw = np.random.default_rng(rows)
    x = jnp.asarray(draw.normal(size=(rows, 96)), dtype)
    weight = jnp.asarray(draw.normal(size=(96, 200) if summed_axis == 0 else (200, 96)), dtype)
    product = jax.jit(lambda x: wide_product(x, weight, summed_axis))
    got = np.asarray(product(x))
    assert got.dtype == np.float32
    wide = np.asarray(weight.astype(jnp.float32)).astype(np.float64)
    want = np.asarray(x.astype(jnp.float32)).astype(np.float64) @ (wide if summed_axis == 0 else wide.T)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)  # float32 sums, also of bfloat16
    order = draw.permutation(rows)
    np.testing.assert_array_equal(np.asarray(product(x[order])), got[order])
    np.testing.assert_array_equal(np.asarray(product(x.at[1:].set(jnp.nan)))[0], got[0])


def test_a_bfloat16_model_follows_the_float32_one():
    """Through pages of words, a chunk of many tokens and single ones; logits agree to bfloat16's precision."""
    narrow = dataclasses.replace(CONFIG, dtype="bfloat16")
    tokens = np.random.default_rng(1).integers(0, CONFIG.vocab, 41).astype(np.int32)

    def logits_of_last(config):
        model, attend = builtin.build(config, seed=3, max_positions=96), attention("xla")
        pages = jnp.zeros((13, *config.page_shape(8)), page_dtype(config.dtype, "tokens_first", "cpu"))
        table = jnp.arange(12, dtype=jnp.int32)[None]
        out = []
        for start, end in ((0, 40), (40, 41)):
            chunk, positions = tokens[None, start:end], np.arange(start, end, dtype=np.int32)[None]
            length = jnp.array([end - start], jnp.int32)
            logits, pages = jax.jit(model, static_argnums=5)(chunk, positions, pages, table, length, attend)
            out.append(np.asarray(logits[0]))
        return np.stack(out)

    wide = logits_of_last(CONFIG)
    assert (logits_of_last(narrow) - wide).std() < 0.05 * wide.std()


SHAPE = {
    "layers": 1,
    "d_model": 8,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 4,
    "d_ff": 8,
    "vocab": 9,
    "experts": 0,
    "tied_embeddings": True,
    "dtype_bytes": 2,
    "kv_dtype_bytes": 2,
    "qk_norm": False,
    "rope_theta": 5e5,
    "norm_eps": 1e-6,
}


def shape(**changes: Any) -> Any:
    return SimpleNamespace(**(SHAPE | changes))


def test_config_from_a_shape():
    config = LlamaConfig.from_shape(shape())
    assert (config.dtype, config.rope_theta, config.norm_eps, config.heads) == ("bfloat16", 5e5, 1e-6, 2)
    assert config.kv_bytes_per_token == 2 * 1 * 1 * 4 * 2


@pytest.mark.parametrize(
    "changes", [{"experts": 8}, {"qk_norm": True}, {"dtype_bytes": 1}, {"kv_dtype_bytes": 4}, {"kv_heads": 3}]
)
def test_shapes_that_are_no_llama_are_refused(changes):
    with pytest.raises(ConfigError):
        LlamaConfig.from_shape(shape(**changes))
