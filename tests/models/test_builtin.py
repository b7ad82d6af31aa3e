from __future__ import annotations

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mcjax.kernels.attention.blockwise import paged_attention
from mcjax.kernels.xla import WriteThenRead
from mcjax.models import builtin
from mcjax.models.byte_tokenizer import ByteTokenizer
from mcjax.models.pieces import Piece


def test_weights_are_these_bits_everywhere():
    """Integers, one double product, one rounding: a machine that differs here breaks every block key's promise."""
    source = builtin.SeededWeights(builtin.DEFAULT_SHAPE, 0)
    weight = source.drawn(Piece("blocks.0.attention.query", (128, 4, 32), 128, "uniform")).astype(np.float32)
    digest = hashlib.sha256(weight.tobytes()).hexdigest()
    assert digest == "9231aba823f88085ba066c24e0e0f131959f28ff0f38d8c19f5c897d1199286c"
    assert abs(float(weight.std()) - builtin.GAINS["query"] / 128**0.5) < 1e-3


def test_seed_and_name_matter_and_nothing_else_does():
    first, second = (builtin.SeededWeights(builtin.DEFAULT_SHAPE, seed) for seed in (0, 1))
    here, there = (Piece(f"blocks.{layer}.feed_forward.up", (8, 8), 8, "uniform") for layer in (0, 1))
    one = first.drawn(here)
    assert not np.array_equal(one, second.drawn(here))
    assert not np.array_equal(one, first.drawn(there))
    np.testing.assert_array_equal(one, first.drawn(here))


def test_fingerprint_names_shape_seed_and_dtype():
    shape = builtin.DEFAULT_SHAPE
    prints = {
        builtin.fingerprint(shape, 0),
        builtin.fingerprint(shape, 1),
        builtin.fingerprint(dataclasses.replace(shape, dtype_bytes=2, kv_dtype_bytes=2), 0),
        builtin.fingerprint(dataclasses.replace(shape, rope_theta=5e5), 0),
    }
    assert len(prints) == 4
    assert all(len(name) == 64 for name in prints)


def test_greedy_answers_are_not_degenerate():
    """Different prompts get different answers, and none falls into one token or a short cycle."""
    model = builtin.build(max_positions=256)
    graph, state = nnx.split(model)
    page, width, chunk = 16, 16, 96
    table = jnp.arange(width, dtype=jnp.int32)[None]

    @jax.jit
    def step(tokens, positions, pages, length):
        attend = WriteThenRead(paged_attention, "tokens_first")
        return nnx.merge(graph, state)(
            tokens,
            positions,
            pages,
            table,
            length,
            attend,
        )

    def answer(text):
        pages = jnp.full((width + 1, *model.shape.page_shape(page)), jnp.nan)
        fed, start, output = ByteTokenizer().encode(text), 0, []
        for _ in range(64):
            tokens, positions = np.zeros((1, chunk), np.int32), np.full((1, chunk), -1, np.int32)
            tokens[0, : len(fed)], positions[0, : len(fed)] = fed, np.arange(start, start + len(fed))
            logits, pages = step(tokens, positions, pages, np.array([len(fed)], np.int32))
            start += len(fed)
            fed = [int(logits[0].argmax())]
            output += fed
        return output

    texts = ["Hello, what is the capital of France? ", "Hello, what is the capital of Spain? ", "a", "fox " * 20]
    answers = [answer(text) for text in texts]
    assert len({tuple(output[:16]) for output in answers}) == len(texts)
    for output in answers:
        assert len(set(output)) > 20
        assert len(set(output[-32:])) > 10
