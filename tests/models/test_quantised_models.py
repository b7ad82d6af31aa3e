"""What int8 weights cost a model: its logits beside those of the same weights, and of which token it chooses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from decoding_rows import DecodingRows
from golden_engine import golden, largest_error, logits, place, programs

from mcjax.cost.catalogue import model
from mcjax.models import catalogue
from mcjax.models.decoder import Decoder
from mcjax.models.tokenizer import tokenizer_for

TEXT = (
    "The harbour lies where two rivers meet. In the morning the boats wait for the tide, and their crews mend nets on "
    "the quay. By noon most of them are out at sea, and nobody is left but the keeper of the lighthouse."
)


@pytest.mark.check_long
@pytest.mark.parametrize(
    ("case", "most"), [("llama", 0.08), ("gemma3", 0.08), ("qwen3_moe", 0.15), ("deepseek_v3", 0.15)]
)
def test_logits_of_small_models(case: str, most: float) -> None:
    """Random weights have no outliers, and few channels: a token that goes to another expert is another token."""
    found, wanted = logits(programs(case, "int8"), place(1), case), golden(case)
    assert 1e-4 < np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < most
    assert largest_error(found, wanted) < 4 * most


@pytest.mark.check_long
@pytest.mark.timeout(600)
def test_choices_of_a_real_model(smollm2: str) -> None:
    shape = model(smollm2)
    ids = np.array(tokenizer_for(shape).encode(TEXT), np.int32)
    assert len(ids) > 40
    found = {}
    for kind in ("none", "int8"):
        loaded: Decoder = catalogue.load(replace(shape, quantisation=kind), 0, 64).model
        rows = DecodingRows(loaded, 1, 64, 64)
        found[kind] = np.concatenate([rows.feed([ids[at : at + 1]]) for at in range(len(ids))])
        # Each token by itself: a decode step takes the way in blocks that CPUs have for it.
    off = np.linalg.norm(found["int8"] - found["none"]) / np.linalg.norm(found["none"])
    assert 1e-4 < off < 0.05
    assert (found["int8"].argmax(1) == found["none"].argmax(1)).mean() > 0.9
