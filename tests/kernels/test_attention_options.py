"""Windows, soft caps, scales and latent pages: XLA's attentions against a dense formula, NaN where nobody may look."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcjax.kernels.attention import blockwise, reference
from mcjax.kernels.xla import WriteThenRead

# Blocks and tiles so small that a case has several of each.
SMALL: dict[str, Any] = {"DECODE_BLOCKS": ((2, 8), (None, 24)), "CHUNK_BLOCKS": ((None, 16),), "TILE_TOKENS": 2}
HEADS, HEAD_DIM, PAGE, WIDTH, LAYERS = 4, 8, 4, 40, 2
ATTENTIONS = {"reference": reference.paged_attention, "blockwise": blockwise.paged_attention}
KINDS = {"keys and values": (2, 2), "latents": (1, 1)}
"""Entries a token, and key heads."""

Case = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int32], NDArray[np.int32]]


def dense(
    queries: NDArray[Any],
    entries: NDArray[Any],
    positions: NDArray[np.int32],
    window: int | None,
    soft_cap: float | None,
    scale: float,
) -> NDArray[np.float64]:
    """Of whole rows of keys, in float64: scores, cap, mask, softmax. `entries: [B, S, C, Hkv, D]`, by position."""
    wide = entries.astype(np.float64).repeat(HEADS // entries.shape[3], axis=3)
    keys, values = wide[:, :, 0], wide[:, :, -1]
    at, place = positions[:, :, None], np.arange(entries.shape[1])
    visible = (place <= at) & (place > at - (window or entries.shape[1]))  # [B, T, S]
    seen = visible.any(axis=1)[:, :, None, None]
    scores = np.einsum("bthd,bshd->bhts", queries.astype(np.float64), np.where(seen, keys, 0)) * scale
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    weights = np.where(visible[:, None], np.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
    weights /= np.maximum(weights.sum(axis=-1, keepdims=True), np.finfo(np.float64).tiny)
    return np.einsum("bhts,bshd->bthd", weights, np.where(seen, values, 0))


def case(
    rng: np.random.Generator, rows: list[tuple[int, int]], steps: int, kind: str, window: int | None
) -> tuple[Case, NDArray[np.float32]]:
    """`rows` of (start, count). Pages hold NaN wherever no query sees; and the entries by position."""
    count, heads = KINDS[kind]
    positions = np.full((len(rows), steps), -1, np.int32)
    entries = np.full((len(rows), WIDTH * PAGE, count, heads, HEAD_DIM), np.nan, np.float32)
    for row, (start, length) in enumerate(rows):
        positions[row, :length] = np.arange(start, start + length)
        first = max(0, start - window + 1) if window else 0
        if length:
            entries[row, first : start + length] = rng.normal(size=(start + length - first, count, heads, HEAD_DIM)) * 3
    table = rng.permutation(len(rows) * WIDTH).reshape(len(rows), WIDTH).astype(np.int32)
    pages = np.full((len(rows) * WIDTH + 1, LAYERS, count, PAGE, heads, HEAD_DIM), np.nan, np.float32)
    by_page = entries.reshape(len(rows), WIDTH, PAGE, count, heads, HEAD_DIM)
    pages[table, 1] = np.moveaxis(by_page, 2, 3)
    queries = rng.normal(size=(len(rows), steps, HEADS, HEAD_DIM)).astype(np.float32)
    return (queries, pages, table, positions), entries


@functools.cache
def attention(name: str, layout: Any, capped: bool = False, windowed: bool = True) -> Any:
    """Compiled once for all numbers that the options may have."""

    def attend(arrays: Any, window: Any, soft_cap: Any, scale: Any) -> Any:
        queries, pages, table, positions = arrays
        laid = pages if layout == "tokens_first" else jnp.swapaxes(pages, 3, 4)
        options = {"window": window if windowed else None, "soft_cap": soft_cap if capped else None, "scale": scale}
        return ATTENTIONS[name](queries, laid, 1, table, positions, layout, **options)

    return jax.jit(attend)


@pytest.fixture(scope="module", autouse=True)
def small() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(blockwise, name, value)
        yield


ROWS = st.lists(st.tuples(st.integers(0, 155), st.integers(0, 5)), min_size=3, max_size=3)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("layout", ["tokens_first", "heads_first"])
@pytest.mark.parametrize("name", list(ATTENTIONS))
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=ROWS,
    window=st.one_of(st.none(), st.integers(1, 12), st.integers(1, 200)),
    soft_cap=st.one_of(st.none(), st.floats(0.5, 60)),
    scale=st.floats(0.05, 1.5),
)
def test_against_a_dense_formula(
    name: str,
    layout: str,
    kind: str,
    seed: int,
    rows: list[tuple[int, int]],
    window: int | None,
    soft_cap: float | None,
    scale: float,
) -> None:
    arrays, entries = case(np.random.default_rng(seed), rows, 5, kind, window)
    attend = attention(name, layout, soft_cap is not None, window is not None)
    got = np.asarray(attend(arrays, window or 0, soft_cap or 0.0, scale))
    np.testing.assert_allclose(got, dense(arrays[0], entries, arrays[3], window, soft_cap, scale), rtol=1e-4, atol=2e-5)
    assert not got[arrays[3] < 0].any()


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("steps", [1, 7])
def test_blocks_outside_of_every_window_change_no_bit(steps: int, merged: bool) -> None:
    """Rows by themselves, where the loop begins late; and with a mate at the start, whose blocks they all go past."""
    rows, window = [(140, steps), (101, steps), (0, steps)], 21
    (queries, pages, table, positions), _ = case(np.random.default_rng(1), rows, steps, "keys and values", window)

    @jax.jit
    def attend(positions: Any) -> Any:
        return blockwise.paged_attention(
            jnp.asarray(queries), jnp.asarray(pages), 1, jnp.asarray(table), positions, window=window
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "MERGED_TOKENS", 7 if merged else 0)
        together = np.asarray(attend(positions))
        assert np.isfinite(together).all()
        for row in range(len(rows)):
            alone = np.where(np.arange(len(rows))[:, None] == row, positions, -1)
            np.testing.assert_array_equal(np.asarray(attend(alone))[row].view(np.uint32), together[row].view(np.uint32))


def test_a_place_in_the_chunk_changes_no_bit() -> None:
    """A chunk that starts later sees fewer old keys: other tiles, other loops, the same bits."""
    (queries, pages, table, positions), _ = case(np.random.default_rng(2), [(60, 12)], 12, "latents", 9)

    @jax.jit
    def attend(queries: Any, positions: Any) -> Any:
        return blockwise.paged_attention(
            queries, jnp.asarray(pages), 1, jnp.asarray(table), positions, window=9, soft_cap=20.0
        )

    whole = np.asarray(attend(queries, positions))
    for skipped in (1, 2, 5):
        left = 12 - skipped
        later = attend(np.roll(queries, -skipped, axis=1), np.where(np.arange(12) < left, positions + skipped, -1))
        np.testing.assert_array_equal(
            np.asarray(later)[:, :left].view(np.uint32), whole[:, skipped:].view(np.uint32), strict=True
        )


@pytest.mark.parametrize("tokens", [5, 150])
def test_only_blocks_that_a_window_reaches_are_read(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted as they are read: of a context of 150 tokens as many as of a short one, and one more at the most."""
    read: list[int] = []

    def counted(*arguments: Any) -> Any:
        jax.debug.callback(lambda: read.append(1))
        return original(*arguments)

    original = blockwise.read
    monkeypatch.setattr(blockwise, "read", counted)
    arrays, _ = case(np.random.default_rng(3), [(tokens, 1)], 1, "keys and values", 10)
    queries, pages, table, positions = map(jnp.asarray, arrays)
    jax.jit(lambda: blockwise.paged_attention(queries, pages, 1, table, positions, window=10))().block_until_ready()
    jax.effects_barrier()
    assert 1 <= len(read) <= 2


@pytest.mark.parametrize("layout", ["tokens_first", "heads_first"])
def test_latents_are_written_once_and_read_as_keys_and_values(layout: Any) -> None:
    arrays, entries = case(np.random.default_rng(4), [(33, 6), (0, 3)], 6, "latents", None)
    queries, pages, table, positions = arrays
    for row, (start, length) in enumerate([(33, 6), (0, 3)]):
        for position in range(start, start + length):
            pages[table[row, position // PAGE], :, :, position % PAGE] = np.nan
    rows = np.arange(2)[:, None]
    keys = np.where(positions[..., None, None] >= 0, entries[rows, np.maximum(positions, 0), 0], 0)
    laid = jnp.asarray(pages if layout == "tokens_first" else np.swapaxes(pages, 3, 4))
    for attend in ATTENTIONS.values():
        attention = jax.jit(functools.partial(WriteThenRead(attend, layout)), static_argnums=4)
        got, written = attention(queries, keys, np.full_like(keys, np.nan), laid, 1, table, positions)
        want = dense(queries, entries, positions, None, None, HEAD_DIM**-0.5)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)
        assert written.shape == laid.shape
