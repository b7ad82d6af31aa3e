"""Logits of every family against transformers on torch (marker `parity`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from decoding_rows import DecodingRows, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from seeded_checkpoint import (
    CASES,
    CONTEXT_TOKENS,
    FURTHER_TOKENS,
    GOLDEN_ROWS,
    PROMPT_TOKENS,
    SeededCheckpoint,
    golden_file,
    shape_of,
    tokens_of,
)

from family_cases import CONFIGS
from mcjax.models.decoder import Decoder

pytestmark = [pytest.mark.parity, pytest.mark.timeout(600)]

FLOAT32_BOUND, BFLOAT16_BOUND = 2e-5, 2e-2
ROWS = 4

# What is compiled and computed for a case stays in one process.
for_every_case = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.xdist_group(case)) for case in CASES]
)


@cache
def ours(case: str, dtype: str) -> DecodingRows:
    shape = shape_of(case, dtype)
    return DecodingRows(Decoder(shape, CONTEXT_TOKENS, SeededCheckpoint(shape)), ROWS, PROMPT_TOKENS, CONTEXT_TOKENS)


@cache
def wanted(case: str, dtype: str) -> NDArray[np.float32]:
    """`[ROWS, T, V]`"""
    from transformers_side import transformers_logits, transformers_model

    model = transformers_model(case, dtype)
    return np.stack([transformers_logits(model, row) for row in tokens_of(case, ROWS)])


def prefill_and_decode(case: str, dtype: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Our logits and theirs, `[ROWS, further tokens + 1, V]`: prompts of unequal lengths, then token by token."""
    rows, tokens, theirs = ours(case, dtype), tokens_of(case, ROWS), wanted(case, dtype)
    rows.reset()
    ends = np.array([PROMPT_TOKENS, 23, 9, 1])
    found = [rows.feed([tokens[row, :end] for row, end in enumerate(ends)])]
    wants = [theirs[np.arange(ROWS), ends - 1]]
    for _ in range(FURTHER_TOKENS):
        found.append(rows.feed([tokens[row, end : end + 1] for row, end in enumerate(ends)]))
        ends += 1
        wants.append(theirs[np.arange(ROWS), ends - 1])
    return np.stack(found, axis=1), np.stack(wants, axis=1)


@for_every_case
def test_prefill_of_unequal_lengths_and_then_decode(case: str, measured: Callable[..., None]) -> None:
    found, theirs = prefill_and_decode(case, "float32")
    error = max(relative_error(found[at], theirs[at]) for at in np.ndindex(found.shape[:2]))
    assert error < FLOAT32_BOUND
    note(measured, case, "float32", error)


@for_every_case
def test_bfloat16_by_its_own_precision(case: str, measured: Callable[..., None]) -> None:
    """All logits together: single ones of transformers are up to 3e-2 from its own float32 result.

    Of experts half of the single ones: rounding tips a choice between two that are almost equal now and then, on either
    side, and whatever follows such a token differs.
    """
    found, theirs = prefill_and_decode(case, "bfloat16")
    if shape_of(case).experts:
        error = float(np.median([relative_error(found[at], theirs[at]) for at in np.ndindex(found.shape[:2])]))
    else:
        error = relative_error(found, theirs)
    assert error < BFLOAT16_BOUND
    note(measured, case, "bfloat16", error)


def note(measured: Callable[..., None], case: str, dtype: str, error: float) -> None:
    if case in CONFIGS:
        measured(case=case, path="random", mesh="one device", dtype=dtype, against="transformers", error=error)


@for_every_case
def test_golden_logits_are_those_of_today(case: str) -> None:
    if case not in CONFIGS:
        pytest.skip("has none")
    with np.load(golden_file(case)) as golden:
        for row, fed in enumerate(GOLDEN_ROWS):
            np.testing.assert_allclose(golden[f"row{row}"], wanted(case, "float32")[row, fed.positions], atol=1e-4)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("llama", {"rope_theta": 10_100.0}),
        ("mistral", {"layer_windows": (9, 9, 10)}),
        ("gemma2", {"attention_soft_cap": 5.1}),
        ("qwen2", {"norm_eps": 1e-3}),
    ],
)
def test_a_number_that_is_slightly_wrong_is_seen(case: str, changes: dict[str, Any]) -> None:
    shape = dataclasses.replace(shape_of(case), **changes)
    model = Decoder(shape, CONTEXT_TOKENS, SeededCheckpoint(shape))
    rows = DecodingRows(model, 1, PROMPT_TOKENS, CONTEXT_TOKENS)
    logits = rows.feed([tokens_of(case)[0, :PROMPT_TOKENS]])
    assert relative_error(logits[0], wanted(case, "float32")[0, PROMPT_TOKENS - 1]) > 2 * FLOAT32_BOUND


def feed_and_compare(case: str, cuts: list[list[int]]) -> None:
    """Each row's prompt in chunks that end at its cuts, and at its end."""
    rows, tokens, theirs = ours(case, "float32"), tokens_of(case, ROWS), wanted(case, "float32")
    rows.reset()
    ends = [[*sorted(row), PROMPT_TOKENS] for row in cuts]
    starts = [[0, *row] for row in ends]
    for turn in range(max(map(len, ends))):
        spans = [slice(*bounds) for bounds in _spans(starts, ends, turn)]
        logits = rows.feed([tokens[row, span] for row, span in enumerate(spans)])
        for row, span in enumerate(spans):
            if span.stop > span.start:
                assert relative_error(logits[row], theirs[row, span.stop - 1]) < FLOAT32_BOUND, (row, span)


def _spans(starts: list[list[int]], ends: list[list[int]], turn: int) -> list[tuple[int, int]]:
    return [
        (first[turn], last[turn]) if turn < len(last) else (PROMPT_TOKENS, PROMPT_TOKENS)
        for first, last in zip(starts, ends, strict=True)
    ]


@for_every_case
def test_every_split_of_a_prompt_in_two(case: str) -> None:
    for first in range(1, PROMPT_TOKENS, ROWS):
        feed_and_compare(case, [[min(first + row, PROMPT_TOKENS - 1)] for row in range(ROWS)])


@for_every_case
def test_splits_into_any_chunks(case: str) -> None:
    cuts = st.sets(st.integers(1, PROMPT_TOKENS - 1), max_size=12).map(sorted)

    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(st.lists(cuts, min_size=ROWS, max_size=ROWS))
    def every_split(cuts: list[list[int]]) -> None:
        feed_and_compare(case, cuts)

    every_split()
