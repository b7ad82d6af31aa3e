"""transformers loads what `mcjax convert` writes, and answers as we do (marker `parity`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoding_rows import DecodingRows, relative_error
from seeded_checkpoint import shape_of, tokens_of

from mcjax import cli
from mcjax.cost import catalogue as shapes
from mcjax.models import catalogue
from mcjax.models.convert import Target, convert

pytestmark = [pytest.mark.parity, pytest.mark.timeout(600)]

ANSWER_IDS = [504, 3575, 282, 4649, 314, 7042, 30, 2]
"""Greedily, after QUESTION, from the GGUF file (`tests/app/test_smollm2.py`)."""
QUESTION = "What is the capital of France? Answer in one sentence."
CASES = ("llama-yarn", "qwen2", "gemma3", "mixtral", "qwen3_moe", "deepseek_v3")


@pytest.mark.parametrize("case", CASES)
def test_every_family_is_loaded(tmp_path: Path, case: str) -> None:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    shape = replace(shape_of(case), checkpoint="")
    convert(shape, Target(tmp_path / "out", tokenizer=False), seed=3)
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager"
    )
    tokens = tokens_of(case, 1)[0][:24]
    with torch.no_grad():
        wanted = theirs.eval()(torch.tensor(tokens[None].astype(np.int64))).logits[0, -1].float().numpy()
    found = DecodingRows(catalogue.load(shape, 3, 64).model, 1, 24, 64).feed([tokens])[0]
    assert relative_error(found, wanted) < 2e-5


def test_smollm2_answers_the_same(tmp_path: Path, smollm2: str) -> None:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer  # pyright: ignore[reportMissingImports]

    source, out = shapes.model(smollm2).checkpoint, tmp_path / "out"
    assert cli._command("convert", [source, str(out), "--dtype", "float32", "--shard-gb", "0.2"]) == 0
    model: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    talk = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert answer.tolist() == ANSWER_IDS
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
