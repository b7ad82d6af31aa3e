"""From a Hugging Face `config.json` to a `ModelShape`: a file a family. Free of jax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mcjax.cost.families import deepseek, gemma, llama, mistral, mixtral, qwen, qwen3_moe
from mcjax.cost.families.fields import Fields
from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError

READERS: Mapping[str, Callable[[Fields], ModelShape]] = {
    "llama": llama.read,
    "qwen2": qwen.read_qwen2,
    "qwen3": qwen.read_qwen3,
    "mistral": mistral.read,
    "gemma2": gemma.read_gemma2,
    "gemma3_text": gemma.read_gemma3,
    "gemma3": gemma.read_multimodal,
    "mixtral": mixtral.read,
    "qwen3_moe": qwen3_moe.read,
    "deepseek_v3": deepseek.read,
    "kimi_k2": deepseek.read,
}
"""By `model_type`."""

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def read(config: Mapping[str, Any], dtype_bytes: int | None, kv_dtype_bytes: int | None) -> ModelShape:
    """The shape that `config` describes, named as the config names it.

    Raises `ConfigError` for another family, for a field that is missing or of another kind, for a value that turns on
    what no model here has, and for a field that is not known to be without effect.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in READERS:
        raise ConfigError("model_type", kind, "is not a family that is known here", READERS)
    fields = Fields(config)
    fields.ignore("model_type", "quantization_config")
    width = _dtype_bytes(fields)
    if dtype_bytes is None and config.get("quantization_config"):
        raise ConfigError("quantization_config", "...", "weights are quantised; say dtype_bytes and kv_dtype_bytes")
    if dtype_bytes is None:
        if isinstance(width, str):
            raise ConfigError("dtype", width, "has no known width; say dtype_bytes", _DTYPE_BYTES)
        dtype_bytes = width
    shape = READERS[kind](fields)
    fields.refuse_the_rest()
    return replace(
        shape,
        name=fields.text("_name_or_path", "") or kind,
        dtype_bytes=dtype_bytes,
        kv_dtype_bytes=kv_dtype_bytes or dtype_bytes,
    )


def _dtype_bytes(fields: Fields) -> int | str:
    """Of a weight; a dtype of no known width, as the config names it."""
    older = fields.text("torch_dtype", "bfloat16")
    dtype = fields.text("dtype", older).removeprefix("torch.")
    return _DTYPE_BYTES.get(dtype, dtype)
