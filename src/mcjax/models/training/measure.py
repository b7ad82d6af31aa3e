"""What a model has learnt, on the text that was held out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray

from mcjax.models.training.text import Corpus

ROW_TOKENS = 512
ROWS_AT_ONCE = 8

Guess = Callable[[Int[Array, "B T"], Int[Array, "B T"]], Float[Array, "B T V"]]
"""A model with its parameters: tokens and positions -> logits."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one model, over rows of `ROW_TOKENS` tokens, each read from its first token on."""

    bits_per_byte: float
    """Bits that all tokens take, the control tokens too, over the bytes of the text."""
    right: float
    """Share of tokens that are the likeliest."""
    median_margin: float
    """Between the best two logits."""
    narrow: float
    """Share of margins below 0.01."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of a draft with its target, both reading the same text."""

    same: float
    """Share of tokens after which both find the same token likeliest: what a greedy target accepts."""
    accepted: float
    """Mean of `sum(min(p, q))`: what speculative sampling accepts (arXiv:2211.17192, 3.2)."""


def held_out_rows(text: Corpus, count: int | None = None) -> NDArray[np.int32]:
    """`[R, ROW_TOKENS + 1]`; of a shorter text one row."""
    length = min(ROW_TOKENS, text.held_out.size - 1)
    rows = min((text.held_out.size - 1) // length, count or text.held_out.size)
    return text.held_out[np.arange(rows)[:, None] * length + np.arange(length + 1)]


def _batches(rows: NDArray[np.int32]) -> list[NDArray[np.int32]]:
    """All of one size, so that one program does; the last ones are filled up with rows that count no more."""
    filled = np.concatenate([rows, np.repeat(rows[:1], -len(rows) % ROWS_AT_ONCE, axis=0)])
    return list(filled.reshape(-1, ROWS_AT_ONCE, rows.shape[1]))


def _positions(rows: Array) -> Array:
    return jnp.broadcast_to(jnp.arange(rows.shape[1] - 1, dtype=jnp.int32), (rows.shape[0], rows.shape[1] - 1))


def measured(guess: Guess, rows: NDArray[np.int32]) -> Measured:
    """Of a model on rows `[R, T + 1]`."""

    @jax.jit
    def each(batch: Array) -> tuple[Array, Array, Array]:
        logits, after = guess(batch[:, :-1], _positions(batch)), batch[:, 1:]
        best = jax.lax.top_k(logits, 2)[0]
        chosen = jnp.take_along_axis(logits, after[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - chosen, logits.argmax(-1) == after, best[..., 0] - best[..., 1]

    found = [jax.device_get(each(batch)) for batch in _batches(rows)]
    nats, right, margins = (np.concatenate(part)[: len(rows)] for part in zip(*found, strict=True))
    text_bytes = int((rows[:, 1:] < 256).sum())
    return Measured(
        float(nats.sum(dtype=np.float64)) / math.log(2) / text_bytes,
        float(right.mean()),
        float(np.median(margins)),
        float((margins < 0.01).mean()),
    )


def agreement(target: Guess, draft: Guess, rows: NDArray[np.int32]) -> Agreement:
    """Of two models on rows `[R, T + 1]`."""

    @jax.jit
    def each(batch: Array) -> tuple[Array, Array]:
        ours, theirs = (guess(batch[:, :-1], _positions(batch)) for guess in (target, draft))
        both = jnp.minimum(jax.nn.softmax(ours), jax.nn.softmax(theirs)).sum(-1)
        return ours.argmax(-1) == theirs.argmax(-1), both

    found = [jax.device_get(each(batch)) for batch in _batches(rows)]
    same, accepted = (np.concatenate(part)[: len(rows)] for part in zip(*found, strict=True))
    return Agreement(float(same.mean()), float(accepted.mean()))
