"""How far another engine's tokens fall short of what the reference engine would have chosen in their place.

The reference is `numerics=invariant` on one device: one prefill shape, one decode shape. It is fed the other engine's
own tokens throughout (teacher forcing), so one difference does not make all that follows incomparable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray

from mcjax.backends.jax.numerics import Answer
from mcjax.backends.jax.placement import Device
from mcjax.backends.jax.programs import HEADER, Geometry, Programs, pack_row
from mcjax.backends.jax.sampler_input import seed_words
from mcjax.backends.jax.sampling import noise
from mcjax.types import Tokens


def reference_geometry(geometry: Geometry) -> Geometry:
    """One shape a phase, and pages for a full batch of the longest contexts."""
    return dataclasses.replace(geometry, pages=geometry.max_batch * geometry.table_width, widths=(), batches=())


class Judge:
    """Reads answers on one device. `programs` are of a `reference_geometry`."""

    def __init__(self, programs: Programs, device: Device):
        self._geometry = programs.geometry
        self._programs = programs.on(device)
        self._shortfall = jax.jit(shortfall)
        self._pages: jax.Array | None = None

    def shortfalls(self, answers: Sequence[Answer]) -> list[NDArray[np.float32]]:
        """By how much each output token's logit lies below the best one's (`[T]`, 0: the reference chooses the same).

        With a temperature the noise of the request's seed counts too, in units of the logits.
        """
        found: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(answers)
        by_length = sorted(range(len(answers)), key=lambda index: -len(answers[index].output))
        batch = self._geometry.max_batch
        for first in range(0, len(answers), batch):
            indices = by_length[first : first + batch]
            together = self._read([answers[index] for index in indices])
            for index, falls in zip(indices, together, strict=True):
                found[index] = falls
        return found

    def _read(self, answers: Sequence[Answer]) -> list[NDArray[np.float32]]:
        """Answers that fit one batch, the longest first."""
        self._pages = self._programs.new_pages()
        found = [np.zeros(len(answer.output), np.float32) for answer in answers]
        for slot, answer in enumerate(answers):
            logits = self._prompt(answer, slot)
            found[slot][0] = self._fall(logits, [answer], 0)[0]
        geometry = self._geometry
        for step in range(1, len(answers[0].output)):
            alive = [answer for answer in answers if len(answer.output) > step]  # the first ones, as they are sorted
            rows = np.zeros((geometry.max_batch, HEADER + 1 + geometry.table_width), np.int32)
            rows[:, HEADER + 1 :] = geometry.pages
            for slot, answer in enumerate(alive):
                fed, start = answer.output[step - 1 : step], len(answer.prompt) + step - 1
                rows[slot] = pack_row(1, 1, start, fed, self._pages_of(slot), geometry)
            falls = self._fall(self._step(rows, 1), alive, step)
            for slot in range(len(alive)):
                found[slot][step] = falls[slot]
        self._pages = None
        return found

    def _prompt(self, answer: Answer, slot: int) -> jax.Array:
        """Logits after the whole prompt."""
        logits: jax.Array | None = None
        for start, tokens in _chunks(answer.prompt, self._geometry.chunk_tokens):
            width = self._geometry.chunk_tokens
            row = pack_row(width, len(tokens), start, tokens, self._pages_of(slot), self._geometry)
            logits = self._step(row[None], width)
        assert logits is not None, "an empty prompt"
        return logits

    def _step(self, rows: NDArray[np.int32], width: int) -> jax.Array:
        programs = self._programs
        logits, self._pages = programs.model(len(rows), width)(programs.weights, self._pages, rows)
        return logits

    def _fall(self, logits: jax.Array, answers: Sequence[Answer], step: int) -> NDArray[np.float32]:
        batch = len(logits)
        words, temperatures = np.zeros((batch, 3), np.int32), np.zeros(batch, np.float32)
        chosen = np.zeros(batch, np.int32)
        for slot, answer in enumerate(answers):
            words[slot] = seed_words(answer.sampling.seed, len(answer.prompt) + step)
            temperatures[slot] = answer.sampling.temperature
            chosen[slot] = answer.output[step]
        return np.asarray(self._shortfall(logits, chosen, words, temperatures))

    def _pages_of(self, slot: int) -> list[int]:
        wide = self._geometry.table_width
        return list(range(slot * wide, (slot + 1) * wide))


def shortfall(
    logits: Float[Array, "B V"],
    chosen: Int[Array, " B"],
    words: Int[Array, "B 3"],
    temperatures: Float[Array, " B"],
) -> Float[Array, " B"]:
    """By how much the chosen token's score lies below the best. `words` and `temperatures` as in `sampling.sample`."""
    seeds = jax.lax.bitcast_convert_type(words[:, :2], jnp.uint32)
    drawn = jax.vmap(lambda seed, position: noise(seed, position, logits.shape[1]))(seeds, words[:, 2])
    scores = jnp.where(temperatures[:, None] > 0, logits + temperatures[:, None] * drawn, logits)
    return scores.max(axis=1) - jnp.take_along_axis(scores, chosen[:, None], axis=1)[:, 0]


def _chunks(tokens: Tokens, width: int) -> Iterator[tuple[int, Tokens]]:
    for start in range(0, len(tokens), width):
        yield start, tokens[start : start + width]
