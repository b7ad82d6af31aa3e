"""Rows of tokens through a decoder over pages, fed in any chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from mcjax.kernels.attention.blockwise import paged_attention
from mcjax.kernels.attention.pages import page_dtype
from mcjax.kernels.xla import WriteThenRead
from mcjax.models.decoder import Decoder

PAGE_TOKENS = 8


class DecodingRows:
    """`rows` sequences of at most `context` tokens, `width` of them in a call.

    `decode_apart`: a call of one token a row is compiled by itself, as engines do.
    """

    def __init__(self, model: Decoder, rows: int, width: int, context: int, decode_apart: bool = True):
        graph, self._state = nnx.split(model)
        attend = WriteThenRead(paged_attention, "tokens_first")
        self._call = jax.jit(lambda state, *arrays: nnx.merge(graph, state)(*arrays, attend=attend))
        self._shape, self._width, self._decode_width = model.shape, width, 1 if decode_apart else width
        # Pages of a row are anywhere.
        count = rows * (context // PAGE_TOKENS)
        self._table = np.random.default_rng(0).permutation(count).reshape(rows, -1).astype(np.int32)
        self.reset()

    def reset(self) -> None:
        """Every row is empty again. What pages hold is NaN: nobody may look at it."""
        dtype = page_dtype(self._shape.dtype, "tokens_first", "cpu")
        blank = np.uint16(0x7FC0) if dtype == np.uint16 else np.nan
        self._pages: Any = jnp.full((self._table.size + 1, *self._shape.page_shape(PAGE_TOKENS)), blank, dtype)
        self._done = np.zeros(len(self._table), np.int32)

    def feed(self, chunks: Sequence[NDArray[np.int32]]) -> NDArray[np.float32]:
        """`[B, V]` logits after each row's chunk; of an empty one they mean nothing."""
        counts = np.array([len(chunk) for chunk in chunks], np.int32)
        width = self._decode_width if counts.max() <= 1 else self._width
        tokens = np.zeros((len(chunks), width), np.int32)
        positions = np.full((len(chunks), width), -1, np.int32)
        for row, chunk in enumerate(chunks):
            tokens[row, : len(chunk)] = chunk
            positions[row, : len(chunk)] = self._done[row] + np.arange(len(chunk))
        logits, self._pages = self._call(self._state, tokens, positions, self._pages, self._table, counts)
        self._done += counts
        return np.asarray(logits)


def relative_error(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """The norm of the difference by the norm of what is wanted."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
