"""The paged model against a dense one written without pages, chunks or masks of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError
from mcjax.kernels.attention.pages import page_dtype
from mcjax.kernels.base import Site
from mcjax.kernels.choice import KernelChoice
from mcjax.kernels.sets import kernel_set
from mcjax.kernels.target import Target
from mcjax.models import builtin
from mcjax.models.decoder import Decoder, check_served
from mcjax.models.layers.linear import einsum
from mcjax.models.pieces import whole

SHAPE = ModelShape(
    "small", layers=2, d_model=48, heads=6, kv_heads=2, head_dim=16, d_ff=80, vocab=97,
    tied_embeddings=True, dtype_bytes=4, kv_dtype_bytes=4,
)  # fmt: skip


class Recorded(builtin.SeededWeights):
    """Keeps the pieces by name, for the dense model. Gains are made unlike one another."""

    def drawn(self, piece):
        return np.concatenate(list(super().read(piece, whole(piece.shape))))

    def __init__(self, shape, seed):
        super().__init__(shape, seed)
        self.by_name = {}

    def read(self, piece, window):
        weight = self.drawn(piece) if piece.init != "ones" else 1 + np.arange(piece.shape[0]) / piece.shape[0]
        self.by_name[piece.name] = weight.astype(np.float32).astype(np.float64)
        yield weight


def dense(shape, weights, tokens):
    """`[T, V]` logits of every position, in NumPy float64, straight from the papers' formulas."""

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + shape.norm_eps) * weights[name]

    def turned(x):  # [T, H, D], pairs (i, i + D/2)
        half = shape.head_dim // 2
        angle = np.arange(len(x))[:, None] * shape.rope_theta ** (-np.arange(half) / half)
        rotation = np.exp(1j * angle)[:, None, :]
        pairs = (x[..., :half] + 1j * x[..., half:]) * rotation
        return np.concatenate([pairs.real, pairs.imag], -1)

    x = weights["embedding"][tokens]
    for layer in range(shape.layers):
        name = f"blocks.{layer}"
        h = norm(x, f"{name}.attention_norm.gain")
        query = turned(np.einsum("te,ehd->thd", h, weights[f"{name}.attention.query"]))
        key = turned(np.einsum("te,ehd->thd", h, weights[f"{name}.attention.key"]))
        value = np.einsum("te,ehd->thd", h, weights[f"{name}.attention.value"])
        out = np.zeros((len(tokens), shape.heads, shape.head_dim))
        for head in range(shape.heads):
            shared = head // (shape.heads // shape.kv_heads)
            scores = query[:, head] @ key[:, shared].T / np.sqrt(shape.head_dim)
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
    shape = dataclasses.replace(SHAPE, tied_embeddings=tied)
    source = Recorded(shape, 3)
    model = Decoder(shape, 96, source)
    attend = attention(kernel, layout)
    rng = np.random.default_rng(0)
    lengths = [83, 70]
    prompts = [rng.integers(0, shape.vocab, length) for length in lengths]
    want = [dense(shape, source.by_name, prompt) for prompt in prompts]

    page_tokens, width = 8, 12
    pages = jnp.full((2 * width + 1, *shape.page_shape(page_tokens)), jnp.nan)
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
    product = jax.jit(lambda x: einsum("bi,io->bo" if summed_axis == 0 else "bi,oi->bo", x, weight))
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
    narrow = dataclasses.replace(SHAPE, dtype_bytes=2, kv_dtype_bytes=2)
    tokens = np.random.default_rng(1).integers(0, SHAPE.vocab, 41).astype(np.int32)

    def logits_of_last(shape):
        model, attend = builtin.build(shape, seed=3, max_positions=96), attention("xla")
        pages = jnp.zeros((13, *shape.page_shape(8)), page_dtype(shape.dtype, "tokens_first", "cpu"))
        table = jnp.arange(12, dtype=jnp.int32)[None]
        out = []
        for start, end in ((0, 40), (40, 41)):
            chunk, positions = tokens[None, start:end], np.arange(start, end, dtype=np.int32)[None]
            length = jnp.array([end - start], jnp.int32)
            logits, pages = jax.jit(model, static_argnums=5)(chunk, positions, pages, table, length, attend)
            out.append(np.asarray(logits[0]))
        return np.stack(out)

    wide = logits_of_last(SHAPE)
    assert (logits_of_last(narrow) - wide).std() < 0.05 * wide.std()


@pytest.mark.parametrize("changes", [{"dtype_bytes": 1, "kv_dtype_bytes": 1}, {"kv_dtype_bytes": 2}, {"head_dim": 15}])
def test_shapes_that_no_model_computes_are_refused(changes):
    with pytest.raises(ConfigError):
        check_served(dataclasses.replace(SHAPE, **changes))
