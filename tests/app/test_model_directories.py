"""`model=hf model.path=DIR` on the real engine: prefill and decode apart and together give the same tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest_app import Answer

import directory_fixtures as small
from family_cases import CONFIGS
from mcjax.cost.catalogue import model
from mcjax.cost.parameters import parameters
from mcjax.models.checkpoint import locate
from mcjax.models.gguf_file import GGUFFile
from mcjax.models.gguf_weights import GGUFWeights
from mcjax.models.hugging_face import Dialect, stored
from mcjax.models.pieces import pieces, whole

Command = Callable[..., Answer]

CODE = """
import sys, mcjax
sizes = "max_batch=2 chunk_tokens=64 pages=16 max_context_tokens=128 pool_blocks=16".split()
for cluster in ("1p1d", "1m"):
    run = mcjax.run(
        ["model=hf", "workload=text", "workload.max_tokens=16", "track.sinks.0.overview=false", f"cluster={cluster}",
         *(f"backend.{each}" for each in sizes), *sys.argv[1:]]
    )
    print(run.requests.sort_by("request_id")["output"].to_pylist())
"""


def answers(fresh: Command, path: Path, *overrides: str) -> list[list[int]]:
    """The outputs of all requests, which two runs agree on."""
    answer = fresh(f"model.path={path}", *overrides, code=CODE, timeout_s=280)
    assert answer.status == 0, answer.err
    apart, together = map(json.loads, answer.out.splitlines())
    assert apart == together
    return apart


def directory(path: Path, family: str) -> Path:
    config = {**CONFIGS[family], "vocab_size": 300, "eos_token_id": 0}
    return small.write_tokenizer(small.write(path, config, files=2))


def test_a_directory_is_served(fresh: Command, tmp_path: Path) -> None:
    outputs = answers(fresh, directory(tmp_path / "small", "llama"), "workload.limit=2", "workload.max_tokens=8")
    assert [len(output) for output in outputs] == [8, 8]
    assert len(set(outputs[0])) > 2


@pytest.mark.check_long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3", "mixtral", "qwen3_moe", "deepseek_v3"])
def test_directories_of_every_family_are_served(fresh: Command, tmp_path: Path, family: str) -> None:
    outputs = answers(fresh, directory(tmp_path / "small", family), "workload.limit=2", "workload.max_tokens=8")
    assert [len(output) for output in outputs] == [8, 8]


def smollm2_directory(path: Path, checkpoint: str) -> Path:
    """SmolLM2 as transformers saves it, in bfloat16, from its GGUF file."""
    shape = model("smollm2")
    file = GGUFFile(locate(checkpoint))
    source, named = GGUFWeights(file, shape), stored(shape, Dialect())
    tensors: dict[str, np.ndarray] = {}
    for name, parameter in parameters(shape).items():
        for piece in pieces(name, parameter):
            numbers = np.concatenate(list(source.read(piece, whole(piece.shape))))
            (tensor,) = named[piece.name].tensors
            matrix = piece.fan_in > 1
            rows = numbers.reshape(piece.fan_in, -1).T if matrix else numbers
            tensors[tensor] = np.ascontiguousarray(rows.astype(ml_dtypes.bfloat16))
    config: dict[str, Any] = {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192, "tie_word_embeddings": True, "dtype": "bfloat16", "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    small.write(path, config, tensors)
    texts, types = file.texts("tokenizer.ggml.tokens"), file.wholes("tokenizer.ggml.token_type")
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    digits = {"type": "Digits", "individual_digits": True}
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    content = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": at, "content": texts[at], **plain} for at, kind in enumerate(types) if kind == 3],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, letters]}, "decoder": letters,
        "model": {"type": "BPE", "vocab": {text: at for at, text in enumerate(texts)},
                  "merges": file.texts("tokenizer.ggml.merges")},
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(content))
    (path / "chat_template.jinja").write_text(file.value("tokenizer.chat_template", str))
    said = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(said))
    return path


@pytest.mark.check_long
@pytest.mark.timeout(300)
def test_smollm2_as_a_directory(fresh: Command, smollm2: str, tmp_path: Path) -> None:
    path = smollm2_directory(tmp_path / "smollm2", model(smollm2).checkpoint)
    outputs = answers(fresh, path, "workload.limit=1")
    assert outputs == [[504, 3575, 282, 4649, 314, 7042, 30, 2]]  # The capital of France is Paris.
