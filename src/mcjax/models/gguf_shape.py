"""The shape that a GGUF file's metadata states: as a Hugging Face config, hence as a `ModelShape`. Free of jax.

So a family is read in one place, `ModelShape.from_hugging_face`, whatever the file. What the format leaves out is what
llama.cpp itself takes for granted; `UNSTATED` lists it, and a shape that comes from elsewhere may say otherwise.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError
from mcjax.models.checkpoint import KEY, locate
from mcjax.models.gguf_file import GGUFFile
from mcjax.models.gguf_names import ARCHITECTURES, OUTSIDE

FREQUENCY_FACTORS = "rope_freqs.weight"
"""What Llama 3.1's scaling divides each rotary frequency by."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of every model published with that scaling; the file has its result alone."""
UNSTATED: dict[str, dict[str, str | None]] = {
    "llama": {"layer_windows": "attention.sliding_window"},  # llama.cpp runs Mistral without its window
    "qwen3moe": {"routing.normalised": None},
    "gemma2": {"query_scale": None},
    "gemma3": {"query_scale": None},
    "deepseek2": {
        "rope.mscale": None,
        "routing.groups": "expert_group_count",
        "routing.groups_per_token": "expert_group_used_count",
    },
}
"""Fields of a shape that a file does not state, or only by this key, by architecture."""
TOKENS = "tokenizer.ggml.tokens"
NOT_COMPARED = {"name", "checkpoint", "max_context_tokens", "dtype_bytes", "kv_dtype_bytes", "quantisation"}
"""Fields of a shape that are not the checkpoint's own."""
SOFTMAX, SIGMOID = 1, 2
"""llama.cpp's numbers of the functions that weight experts."""
EXPERTS_OF_V3 = 256


def read(
    path: str,
    name: str = "",
    dtype_bytes: int | None = None,
    kv_dtype_bytes: int | None = None,
    quantisation: str = "none",
) -> ModelShape:
    """The shape of the GGUF file at `path` (as `model.checkpoint` says it), which is its checkpoint too.

    Raises `ConfigError` for an architecture that is not read here, and for metadata that is missing.
    """
    file = GGUFFile(locate(path))
    stated = file.value("general.name", str, Path(path).stem)
    return dataclasses.replace(
        shape_of(file, name or stated, dtype_bytes, kv_dtype_bytes, path), quantisation=quantisation
    )


def shape_of(
    file: GGUFFile, name: str = "", dtype_bytes: int | None = None, kv_dtype_bytes: int | None = None, at: str = ""
) -> ModelShape:
    """The shape that the metadata states; `dtype_bytes` None: float32 if all tensors are, else bfloat16."""
    width = dtype_bytes or (4 if file.all_float32 else 2)
    config = hugging_face_config(file)
    try:
        return ModelShape.from_hugging_face(
            config, name or file.path.stem, width, kv_dtype_bytes or width, at or str(file.path)
        )
    except ConfigError as problem:
        raise ConfigError(KEY, file.path, f"its metadata make no shape: {problem}") from None


def hugging_face_config(file: GGUFFile) -> dict[str, Any]:
    """What a `config.json` of the file's model would say."""
    architecture = file.value("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise ConfigError(KEY, file.path, f"holds a model of the architecture {architecture!r}", ARCHITECTURES)
    said = _Metadata(file, architecture)
    config = _common(said)
    if architecture == "llama":
        return config | _llama(said)
    if architecture in ("gemma2", "gemma3"):
        return config | _gemma(said, config)
    if architecture == "deepseek2":
        return config | _deepseek(said)
    if architecture == "qwen3moe":
        return config | {
            "model_type": "qwen3_moe",
            "norm_topk_prob": True,
            **_experts(said, "num_experts"),
            **_width(said),
        }
    return config | {"model_type": architecture, "use_sliding_window": False}


class _Metadata:
    """Values of one architecture by their short keys."""

    def __init__(self, file: GGUFFile, architecture: str):
        self.file, self.architecture = file, architecture

    def whole(self, key: str, default: int | None = None) -> int:
        return self.file.value(f"{self.architecture}.{key}", int, default)

    def number(self, key: str, default: float | None = None) -> float:
        return _decimal(self.file.value(f"{self.architecture}.{key}", float, default))

    def text(self, key: str, default: str) -> str:
        return self.file.value(f"{self.architecture}.{key}", str, default)

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.file.metadata


def _decimal(value: float) -> float:
    """The shortest decimal of what the file has in float32: 1e-5 again, and not 9.99999975e-6."""
    return float(str(np.float32(value)))


def _common(said: _Metadata) -> dict[str, Any]:
    heads, width = said.whole("attention.head_count"), said.whole("embedding_length")
    names = frozenset(said.file.tensor_names)
    rotary = said.whole("rope.dimension_count", width // max(heads, 1))
    return {
        "num_hidden_layers": said.whole("block_count"),
        "hidden_size": width,
        "intermediate_size": said.whole("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": said.whole("attention.head_count_kv", heads),
        "head_dim": said.whole("attention.key_length", rotary),
        "vocab_size": said.file.tensor_shape(OUTSIDE["embedding"])[0],
        "max_position_embeddings": said.whole("context_length", 4096),
        "rms_norm_eps": said.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": OUTSIDE["head"] not in names,
        "rope_parameters": _rope(said),
    }


def _rope(said: _Metadata) -> dict[str, Any]:
    theta, kind = said.number("rope.freq_base", 10_000.0), said.text("rope.scaling.type", "none")
    if FREQUENCY_FACTORS in said.file.tensor_names:
        return {"rope_theta": theta, **_llama3(said, theta)}
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    scaling = {"rope_type": kind, "rope_theta": theta, "factor": said.number("rope.scaling.factor")}
    if kind == "linear":
        return scaling
    if kind != "yarn":
        problem = f"scales its rotary positions ({kind}), which is not supported"
        raise ConfigError(KEY, said.file.path, problem, ("linear", "yarn"))
    scaling["original_max_position_embeddings"] = said.whole("rope.scaling.original_context_length")
    for key, name in {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}.items():
        if said.has(f"rope.scaling.{key}"):
            scaling[name] = said.number(f"rope.scaling.{key}")
    if said.has("rope.scaling.yarn_log_multiplier"):  # 0.1 times this; `mscale` is the same in every such model
        scale = _decimal(said.number("rope.scaling.yarn_log_multiplier") / 0.1)
        scaling |= {"mscale": scale, "mscale_all_dim": scale}
    return scaling


def _llama3(said: _Metadata, theta: float) -> dict[str, Any]:
    """The scaling whose factors the file has. Raises `ConfigError` if it is not the one we know."""
    factors = said.file.tensor(FREQUENCY_FACTORS)
    scaling = {"rope_type": "llama3", "factor": _decimal(float(factors.max())), **LLAMA3}
    wanted = frequency_factors(theta, 2 * factors.size, scaling)
    if not np.allclose(factors, wanted, rtol=1e-4):
        raise ConfigError(KEY, said.file.path, f"its {FREQUENCY_FACTORS} are not those of Llama 3.1's scaling")
    return scaling


def frequency_factors(theta: float, dim: int, scaling: dict[str, Any]) -> np.ndarray:
    """`[D/2]`: what Llama 3.1's scaling divides each frequency by.

    Source: https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py (apply_scaling).
    """
    frequencies = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / (kept + (1 - kept) / factor)


def _experts(said: _Metadata, count: str) -> dict[str, Any]:
    return {count: said.whole("expert_count"), "num_experts_per_tok": said.whole("expert_used_count")}


def _width(said: _Metadata) -> dict[str, Any]:
    """Of one expert."""
    return {"moe_intermediate_size": said.whole("expert_feed_forward_length")}


def _llama(said: _Metadata) -> dict[str, Any]:
    window = said.whole("attention.sliding_window", 0)
    if said.whole("expert_count", 0):
        return {"model_type": "mixtral", **_experts(said, "num_local_experts"), "sliding_window": window or None}
    return {"model_type": "mistral", "sliding_window": window} if window else {"model_type": "llama"}


def _gemma(said: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    layers, width, heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
    second = said.architecture == "gemma2"
    largest = layers == (46 if second else 62)  # of 27B alone, scores are scaled by the width of a head's share
    window = said.whole("attention.sliding_window", 4096 if second else None)
    every = said.whole("attention.sliding_window_pattern", 2 if second else 6)
    local = {"rope_type": "default", "rope_theta": said.number("rope.freq_base_swa", 10_000.0)}
    kinds = ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(layers)]
    cap = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} if second else {}
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if said.has(name):
            cap[name] = said.number(name)
    both = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return {
        "model_type": "gemma2" if second else "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width // heads if largest else config["head_dim"],
        "sliding_window": window,
        "layer_types": kinds,
        "rope_parameters": config["rope_parameters"] if second else both,
        **cap,
    }


def _deepseek(said: _Metadata) -> dict[str, Any]:
    if said.whole("nextn_predict_layers", 0):
        raise ConfigError(KEY, said.file.path, "has layers that predict further tokens, which are not supported")
    if said.whole("expert_gating_func", SOFTMAX) != SIGMOID:
        problem = "weights its experts by a softmax, as DeepSeek-V2 does; DeepSeek-V3's sigmoid is supported"
        raise ConfigError(KEY, said.file.path, problem)
    turned, heads = said.whole("rope.dimension_count"), said.whole("attention.head_count")
    key = said.whole("attention.key_length_mla", said.whole("attention.key_length", 0))
    grouped = said.whole("expert_count") == EXPERTS_OF_V3  # files from before there was a key for it
    return {
        "model_type": "deepseek_v3",
        **_experts(said, "n_routed_experts"),
        **_width(said),
        "num_key_value_heads": heads,
        "head_dim": turned,  # as transformers has it
        "q_lora_rank": said.whole("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": said.whole("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": key - turned,
        "v_head_dim": said.whole("attention.value_length_mla", said.whole("attention.value_length", 0)),
        "n_shared_experts": said.whole("expert_shared_count", 0),
        "first_k_dense_replace": said.whole("leading_dense_block_count", 0),
        "n_group": said.whole("expert_group_count", 8 if grouped else 1),
        "topk_group": said.whole("expert_group_used_count", 4 if grouped else 1),
        "routed_scaling_factor": said.number("expert_weights_scale", 1.0),
        "norm_topk_prob": said.file.value("deepseek2.expert_weights_norm", bool, False),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_interleave": True,
    }


def check(file: GGUFFile, shape: ModelShape) -> None:
    """Raises `ConfigError`, by field, where the file states another shape than `shape`."""
    said = shape_of(file, dtype_bytes=shape.dtype_bytes, kv_dtype_bytes=shape.kv_dtype_bytes)
    architecture = file.value("general.architecture", str)
    if TOKENS in file.metadata and len(file.texts(TOKENS)) > said.vocab:
        raise file.damaged(f"it has {len(file.texts(TOKENS))} tokens and embeddings of {said.vocab}")
    unstated = {
        field
        for field, key in UNSTATED.get(architecture, {}).items()
        if key is None or f"{architecture}.{key}" not in file.metadata
    }
    for field in dataclasses.fields(ModelShape):
        if field.name in NOT_COMPARED:
            continue
        ours, theirs = getattr(shape, field.name), getattr(said, field.name)
        if field.name == "rope":
            ours, theirs = shape.rotary, said.rotary
        for name, mine, other in _leaves(field.name, ours, theirs):
            if name not in unstated and not _same(mine, other):
                shown = f"{other:g}" if isinstance(other, float) else other
                raise ConfigError(f"model.{name}", mine, f"the checkpoint {file.path.name} has {shown}")


def _leaves(name: str, ours: Any, theirs: Any) -> list[tuple[str, Any, Any]]:
    """Field by field, where both are dataclasses."""
    if not (dataclasses.is_dataclass(ours) and dataclasses.is_dataclass(theirs)):
        return [(name, ours, theirs)]
    fields = [field.name for field in dataclasses.fields(ours)]
    return [
        leaf for field in fields for leaf in _leaves(f"{name}.{field}", getattr(ours, field), getattr(theirs, field))
    ]


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, float) and isinstance(ours, int | float):
        return bool(np.isclose(ours, theirs, rtol=1e-6))
    return ours == theirs
