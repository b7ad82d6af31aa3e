"""Logits of every family against those that transformers gave once (`make_golden.py`), without torch."""

from __future__ import annotations

import numpy as np
import pytest
from decoding_rows import DecodingRows, relative_error
from seeded_checkpoint import (
    CONTEXT_TOKENS,
    GOLDEN_CHUNK,
    GOLDEN_ROWS,
    SeededCheckpoint,
    golden_file,
    shape_of,
    tokens_of,
)

from family_cases import CONFIGS
from mcjax.models.decoder import Decoder


@pytest.mark.parametrize("case", CONFIGS)
def test_chunks_of_a_prompt_and_then_single_tokens(case: str) -> None:
    shape = shape_of(case)
    model = Decoder(shape, CONTEXT_TOKENS, SeededCheckpoint(shape))
    rows = DecodingRows(model, len(GOLDEN_ROWS), GOLDEN_CHUNK, CONTEXT_TOKENS, decode_apart=False)
    tokens = tokens_of(case)
    with np.load(golden_file(case)) as golden:
        wanted = [golden[f"row{row}"] for row in range(len(GOLDEN_ROWS))]
    ends = np.zeros(len(GOLDEN_ROWS), int)
    for turn, sizes in enumerate(zip(*(row.chunks for row in GOLDEN_ROWS), strict=True)):
        chunks = [tokens[row, ends[row] : ends[row] + size] for row, size in enumerate(sizes)]
        logits = rows.feed(chunks)
        ends += sizes
        for row in range(len(chunks)):
            assert relative_error(logits[row], wanted[row][turn]) < 2e-5, (row, ends[row])
