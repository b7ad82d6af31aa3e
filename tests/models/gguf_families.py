"""Small GGUF files of every architecture that is read, as llama.cpp's converter lays them out, written anew here.

From pieces as the models have them: row by row, where the reader works on whole arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from mcjax.cost.model_shape import ModelShape
from mcjax.cost.parameters import parameters
from mcjax.models.pieces import pieces

F32 = gguf.GGMLQuantizationType.F32
ARCHITECTURES = {
    "llama": "llama", "mistral-full": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "gemma2": "gemma2", "gemma3": "gemma3", "deepseek_v3": "deepseek2",
    "deepseek_v3-yarn": "deepseek2",
}  # fmt: skip
"""By the name of a config in `family_cases`."""
NAMES = {
    "attention_norm.gain": "attn_norm.weight", "attention.query": "attn_q.weight", "attention.key": "attn_k.weight",
    "attention.value": "attn_v.weight", "attention.query_bias": "attn_q.bias", "attention.key_bias": "attn_k.bias",
    "attention.value_bias": "attn_v.bias", "attention.query_norm.gain": "attn_q_norm.weight",
    "attention.key_norm.gain": "attn_k_norm.weight", "attention.output": "attn_output.weight",
    "attention_post_norm.gain": "post_attention_norm.weight", "feed_forward_norm.gain": "ffn_norm.weight",
    "feed_forward_post_norm.gain": "post_ffw_norm.weight", "feed_forward.gate": "ffn_gate.weight",
    "feed_forward.up": "ffn_up.weight", "feed_forward.down": "ffn_down.weight",
    "feed_forward.router": "ffn_gate_inp.weight", "feed_forward.router_bias": "exp_probs_b.bias",
    "feed_forward.shared.gate": "ffn_gate_shexp.weight", "feed_forward.shared.up": "ffn_up_shexp.weight",
    "feed_forward.shared.down": "ffn_down_shexp.weight", "attention.query_down": "attn_q_a.weight",
    "attention.latent_down": "attn_kv_a_mqa.weight", "attention.latent_norm.gain": "attn_kv_a_norm.weight",
}  # fmt: skip


def weights(shape: ModelShape, seed: int = 5) -> dict[str, np.ndarray]:
    """Every piece, in float32; small, so that nothing overflows on the way through a model."""
    random = np.random.default_rng(seed)
    return {
        piece.name: (random.standard_normal(piece.shape) * (max(piece.fan_in, 4) ** -0.5)).astype(np.float32)
        for name, parameter in parameters(shape).items()
        for piece in pieces(name, parameter)
    }


def metadata(config: Mapping[str, Any], architecture: str, older: bool = False) -> dict[str, Any]:
    """What the converter makes of a `config.json`; `older`: as it did before MLA was absorbed."""
    said: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }
    rope = config["rope_parameters"]
    if architecture == "gemma3":
        rope = rope["full_attention"]
    said["rope.freq_base"] = rope["rope_theta"]
    if rope["rope_type"] in ("linear", "yarn"):
        said |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        said["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if "head_dim" in config:
        said |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    if architecture.startswith("gemma"):
        said["attention.sliding_window"] = config["sliding_window"]
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if config[key]:
                said[key] = config[key]
    experts = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts")
    if experts:
        said |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
    if "moe_intermediate_size" in config:
        said["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if architecture == "deepseek2":
        said |= _latent(config, older)
        if "mscale_all_dim" in rope:
            said["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return {f"{architecture}.{key}": value for key, value in said.items()}


def _latent(config: Mapping[str, Any], older: bool) -> dict[str, Any]:
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    key, value = config["qk_nope_head_dim"] + turned, config["v_head_dim"]
    said = {
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": turned,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_gating_func": 2,
    }
    if config["q_lora_rank"]:
        said["attention.q_lora_rank"] = config["q_lora_rank"]
    if older:
        return said | {"attention.key_length": key, "attention.value_length": value}
    return said | {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + turned,
        "attention.value_length": rank,
        "attention.key_length_mla": key,
        "attention.value_length_mla": value,
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
    }


def tensors(
    shape: ModelShape, architecture: str, older: bool = False, given: Mapping[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """By name, rows first; `older`: a tensor an expert, and keys and values of a latent in one. `given`: the pieces."""
    result: dict[str, np.ndarray] = {}
    given = weights(shape) if given is None else given
    for name, weight in given.items():
        if name in ("embedding", "head"):
            result[{"embedding": "token_embd.weight", "head": "output.weight"}[name]] = weight
            continue
        gain = weight + 1 if shape.unit_offset_norms else weight
        if name == "final_norm.gain":
            result["output_norm.weight"] = gain
            continue
        _, layer, part = name.split(".", 2)
        block = f"blk.{layer}."
        if part == "attention.key_up":
            keys, values = weight, given[name.replace("key_up", "value_up")]
            if older:
                heads = [np.concatenate([key, value.T]) for key, value in zip(keys, values)]
                result[f"{block}attn_kv_b.weight"] = np.concatenate(heads)
            else:
                result[f"{block}attn_k_b.weight"] = np.stack([key.T for key in keys])
                result[f"{block}attn_v_b.weight"] = np.stack([value.T for value in values])
        elif part == "attention.value_up":
            continue
        elif weight.ndim == 3 and part.split(".")[-1] in ("gate", "up", "down"):
            stem = NAMES[part].removesuffix(".weight")
            if older:
                result |= {f"{block}{stem}.{index}.weight": expert.T for index, expert in enumerate(weight)}
            else:
                result[f"{block}{stem}_exps.weight"] = np.stack([expert.T for expert in weight])
        else:
            inside = NAMES[part]
            if shape.latent and part == "attention.query" and shape.latent.query_rank:
                inside = "attn_q_b.weight"
            if shape.latent and part == "attention.query_norm.gain":
                inside = "attn_q_a_norm.weight"
            result[block + inside] = gain if part.endswith("gain") else _rows(shape, architecture, part, weight)
    return {name: np.ascontiguousarray(array, np.float32) for name, array in result.items()}


def _rows(shape: ModelShape, architecture: str, part: str, weight: np.ndarray) -> np.ndarray:
    kind = part.rpartition(".")[2]
    if kind == "router_bias":
        return weight
    if kind == "output":
        return weight.reshape(-1, weight.shape[-1]).T
    if kind.endswith("_bias"):
        rows = [row[None] for row in weight.reshape(-1)]
    else:
        rows = list(weight.reshape(weight.shape[0], -1).T)
    if architecture in ("llama", "deepseek2") and kind.removesuffix("_bias") in ("query", "key", "latent_down"):
        heads = 1 if kind == "latent_down" else weight.shape[-2]
        width = len(rows) // heads
        turned = shape.latent.rope_dim if shape.latent else width
        rows = [row for head in range(heads) for row in _paired(rows[head * width : (head + 1) * width], turned)]
    stacked = np.stack(rows)
    return stacked[:, 0] if kind.endswith("_bias") else stacked


def _paired(rows: list[np.ndarray], turned: int) -> list[np.ndarray]:
    still, low, high = rows[: len(rows) - turned], rows[-turned : -turned // 2], rows[-turned // 2 :]
    return [*still, *(row for pair in zip(low, high) for row in pair)]


def write(
    path: Path,
    architecture: str,
    said: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """A file; `kinds`: of tensors that are not to be float32."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in said.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, array in arrays.items():
        kind = (kinds or {}).get(name, F32)
        if kind == F32:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
