"""Logits of GGUF files against transformers on torch (marker `parity`).

Files are made of transformers' own weights under the names that llama.cpp's package has for them, as its converter
describes; and transformers reads what of them it knows (no latent attention, no Mixtral).
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import gguf_families as families
import numpy as np
import pytest
from decoding_rows import DecodingRows, relative_error
from seeded_checkpoint import shape_of, tokens_of

from family_cases import CONFIGS
from mcjax.models import catalogue, gguf_shape

pytestmark = [pytest.mark.parity, pytest.mark.timeout(300)]

KNOWN = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3")
TOKENS = 24


def converted(state: dict[str, np.ndarray], case: str) -> dict[str, np.ndarray]:
    """Of transformers' tensors, as llama.cpp's convert_hf_to_gguf.py has them."""
    config, architecture = CONFIGS[case], families.ARCHITECTURES[case]
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    split: dict[str, np.ndarray] = {}
    for name, array in state.items():
        stem = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            split[f"{stem}.gate_proj.weight"], split[f"{stem}.up_proj.weight"] = np.split(array, 2, axis=1)
        elif name.endswith("experts.down_proj"):
            split[f"{name}.weight"] = array
        elif name.endswith("kv_b_proj.weight"):
            heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
            both = array.reshape(heads, nope + config["v_head_dim"], config["kv_lora_rank"])
            split[name.replace("kv_b", "k_b")] = both[:, :nope].swapaxes(1, 2)
            split[name.replace("kv_b", "v_b")] = both[:, nope:]
        elif name.endswith("e_score_correction_bias"):
            split[name.replace("_bias", ".bias")] = array
        elif not (name == "lm_head.weight" and config["tie_word_embeddings"]):
            split[name] = array
    result: dict[str, np.ndarray] = {}
    for name, array in split.items():
        if architecture == "llama" and (found := re.search(r"\.(q|k)_proj\.", name)):
            heads = config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        inside = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert inside is not None, name
        result[inside] = np.ascontiguousarray(array, np.float32)
    return result


@pytest.mark.parametrize("case", families.ARCHITECTURES)
def test_logits_of_converted_weights(tmp_path: Path, case: str) -> None:
    from transformers_side import transformers_logits, transformers_model

    theirs, architecture = transformers_model(case), families.ARCHITECTURES[case]
    state = {name: value.numpy() for name, value in theirs.state_dict().items()}
    said = families.metadata(CONFIGS[case], architecture)
    path = families.write(tmp_path / "m.gguf", architecture, said, converted(state, case))
    tokens = tokens_of(case, 1)[0][:TOKENS]
    model = catalogue.load(replace(shape_of(case), checkpoint=str(path)), 0, 64).model
    found = DecodingRows(model, 1, TOKENS, 64).feed([tokens])[0]
    assert relative_error(found, transformers_logits(theirs, tokens)[-1]) < 2e-5


@pytest.mark.parametrize("case", KNOWN)
def test_logits_of_what_transformers_reads(tmp_path: Path, case: str) -> None:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoConfig, AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    config, architecture = dict(CONFIGS[case]), families.ARCHITECTURES[case]
    if case.startswith("gemma"):
        config["query_pre_attn_scalar"] = config["head_dim"]  # the format cannot say another
    said = families.metadata(config, architecture) | {"tokenizer.ggml.tokens": ["a"] * config["vocab_size"]}
    path = families.write(tmp_path / "m.gguf", architecture, said, families.tensors(shape_of(case), architecture))
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file="m.gguf",
        config=AutoConfig.for_model(**copy.deepcopy(config)),  # of hyper-parameters it reads some
        dtype=torch.float32,
        attn_implementation="eager",
    )
    tokens = tokens_of(case, 1)[0][:TOKENS]
    with torch.no_grad():
        wanted = theirs.eval()(torch.tensor(tokens[None].astype(np.int64))).logits[0, -1].float().numpy()
    model = catalogue.load(gguf_shape.read(str(path)), 0, 64).model
    assert relative_error(DecodingRows(model, 1, TOKENS, 64).feed([tokens])[0], wanted) < 2e-5
