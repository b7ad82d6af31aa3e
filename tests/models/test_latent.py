"""Latent attention in absorbed form, over pages, against the formula of the paper: keys and values of every head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_fixtures import Drawn

from mcjax.cost.architecture import Latent
from mcjax.cost.model_shape import ModelShape
from mcjax.kernels.base import Site
from mcjax.kernels.choice import KernelChoice
from mcjax.kernels.sets import kernel_set
from mcjax.kernels.target import Target
from mcjax.models.layers.latent import LatentAttention
from mcjax.models.layers.rotary import rotary_table
from mcjax.models.layers.step import Step
from mcjax.models.weights import Maker

LATENT = Latent(kv_rank=32, rope_dim=8, nope_dim=16, value_dim=12, query_rank=40)
HEADS, WIDTH, PAGE = 5, 48, 4


def shape(query_rank: int, query_scale: float) -> ModelShape:
    latent = Latent(LATENT.kv_rank, LATENT.rope_dim, LATENT.nope_dim, LATENT.value_dim, query_rank)
    sizes: dict[str, Any] = {
        "layers": 2, "d_model": WIDTH, "heads": HEADS, "kv_heads": HEADS, "head_dim": 24, "d_ff": 80, "vocab": 31,
        "dtype_bytes": 4, "kv_dtype_bytes": 4,
    }  # fmt: skip
    return ModelShape("latent", **sizes, latent=latent, query_scale=query_scale)


def by_the_paper(x: np.ndarray, weight: dict[str, np.ndarray], scale: float, eps: float) -> np.ndarray:
    """`[T, E]` in float64: DeepSeek-V2 (arXiv:2405.04434), equations 9 to 19, with nothing absorbed."""

    def norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain

    def turned(x: np.ndarray) -> np.ndarray:  # [T, H, D], pairs (i, i + D/2)
        half = x.shape[-1] // 2
        angle = np.arange(len(x))[:, None] * 10_000.0 ** (-np.arange(half) / half)
        pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
        return np.concatenate([pairs.real, pairs.imag], -1)

    rank, nope = LATENT.kv_rank, LATENT.nope_dim
    into_query = norm(x @ weight["query_down"], weight["query_norm.gain"]) if "query_down" in weight else x
    query = np.einsum("ti,ihd->thd", into_query, weight["query"])
    down = x @ weight["latent_down"]
    latent, shared = norm(down[:, :rank], weight["latent_norm.gain"]), turned(down[:, None, rank:])
    keys = np.einsum("tr,hnr->thn", latent, weight["key_up"])
    keys = np.concatenate([keys, np.repeat(shared, HEADS, axis=1)], -1)
    values = np.einsum("tr,hrd->thd", latent, weight["value_up"])
    query = np.concatenate([query[..., :nope], turned(query[..., nope:])], -1)
    scores = np.einsum("thd,shd->hts", query, keys) * scale
    scores[:, np.triu(np.ones((len(x), len(x)), bool), 1)] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("hts,shd->thd", shares / shares.sum(-1, keepdims=True), values)
    return np.einsum("thd,hde->te", mixed, weight["output"])


@pytest.mark.parametrize(("query_rank", "query_scale"), [(40, 0.0), (0, 0.3)])
def test_absorbed_attention_in_chunks_is_that_of_the_paper(query_rank: int, query_scale: float) -> None:
    """Two rows of unequal lengths, in chunks and then token by token; a layer that is not the first."""
    wanted = shape(query_rank, query_scale)
    source = Drawn()
    layer = LatentAttention(wanted, Maker(wanted, source), "blocks.1.attention", 1)
    kernels = kernel_set(KernelChoice(prefill="reference", decode="reference"), Site(Target("tpu", interpret=True)))
    table = rotary_table(wanted.rotary, LATENT.rope_dim, 64)
    lengths, chunk = [23, 15], 6
    x = np.random.default_rng(3).normal(size=(2, 23, WIDTH)).astype(np.float32)
    pages = jnp.full((15, *wanted.page_shape(PAGE)), jnp.nan)
    page_table = jnp.asarray(np.random.default_rng(4).permutation(14).reshape(2, 7), jnp.int32)

    @jax.jit
    def call(x: Any, positions: Any, pages: Any) -> Any:
        turn = table[jnp.maximum(positions, 0)]
        attend = kernels.decode if x.shape[1] == 1 else kernels.prefill
        return layer(x, pages, Step(positions, page_table, turn, turn, attend, True))

    weight = {name.removeprefix("blocks.1.attention."): value for name, value in source.wide.items()}
    scale = query_scale or 24**-0.5
    want = [by_the_paper(x[row, :length].astype(np.float64), weight, scale, 1e-5) for row, length in enumerate(lengths)]
    got = np.full_like(x, np.nan)
    start = 0
    while start < 23:
        width = chunk if start < 18 else 1
        place = start + np.arange(width)
        positions = np.where(place < np.array(lengths)[:, None], place, -1).astype(np.int32)
        given = np.where(positions[..., None] < 0, 0, x[:, start : start + width])
        found, pages = call(given, positions, pages)
        got[:, start : start + width] = found
        start += width
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(got[row, :length], want[row], rtol=3e-5, atol=3e-5)
    assert pages.shape[2:] == (1, PAGE, 1, 40)
    assert np.isnan(np.asarray(pages)[:, 0]).all(), "another layer's pages are touched"
