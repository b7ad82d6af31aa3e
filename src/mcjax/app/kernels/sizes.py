"""The sizes that `mcjax kernels` is asked about, and the cases that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from mcjax.app.mistakes import close_to
from mcjax.cost.hardware import Hardware
from mcjax.cost.kernel_cases import DTYPES, KernelCase, device_heads
from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError

COUNTS = ("context_tokens", "batch", "page_tokens", "chunk_tokens", "query_tokens", "window")
FLAGS: Mapping[str, bool] = {"true": True, "false": False}
MOST = 1 << 30
"""No count is above it: a mistyped one would otherwise be reckoned with for a long time."""
PLAIN: Mapping[int, str] = {4: "float32", 2: "bfloat16"}
"""The dtype of so many bytes, of weights and unquantised pages."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Keys of the command line, by their names there."""

    context_tokens: int = 8192
    """Of a sequence: the prompt that is prefilled, the context of decode, the pages that are packed."""
    batch: int = 32
    """Sequences of a decode step."""
    page_tokens: int = 64
    chunk_tokens: int | None = None
    """New tokens of prefill, the last ones of the context. None: all of it."""
    query_tokens: int = 1
    """Of each sequence in a decode step: more than one where a speculation is verified."""
    kv_dtype: str = ""
    """Of the pages. Empty: the model's."""
    block_dtype: str = ""
    """Of packed blocks. Empty: that of the pages."""
    window: int | None = None
    """None: those of the model's layers."""
    soft_cap: bool = False


def keys_of(words: Sequence[str]) -> tuple[Sizes, list[str]]:
    """The sizes, and the words that choose model and hardware. Raises `ConfigError`."""
    known = [field.name for field in fields(Sizes)]
    given: dict[str, str] = {}
    chosen: list[str] = []
    for word in words:
        key, sign, value = word.partition("=")
        if sign and key.split(".")[0] in ("model", "hardware"):
            chosen.append(word)
            continue
        if not sign or key not in known:
            allowed = ["model", "hardware", *known]
            raise ConfigError(key, value, f"mcjax kernels takes no such key{close_to(key, allowed)}", allowed)
        if key in given:
            raise ConfigError(key, value, "is there twice")
        given[key] = value
    return _sizes(given), chosen


def _sizes(given: Mapping[str, str]) -> Sizes:
    values: dict[str, Any] = {key: _count(key, given[key]) for key in COUNTS if key in given}
    values |= {key: _dtype(key, given[key]) for key in ("kv_dtype", "block_dtype") if key in given}
    if "soft_cap" in given:
        values["soft_cap"] = _flag("soft_cap", given["soft_cap"])
    sizes = Sizes(**values)
    if sizes.chunk_tokens is not None and sizes.chunk_tokens > sizes.context_tokens:
        raise ConfigError("chunk_tokens", sizes.chunk_tokens, f"is more than context_tokens={sizes.context_tokens}")
    if sizes.query_tokens > sizes.context_tokens:
        raise ConfigError("query_tokens", sizes.query_tokens, f"is more than context_tokens={sizes.context_tokens}")
    return sizes


def _count(key: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(key, text, "must be a whole number") from None
    if not 1 <= value <= MOST:
        raise ConfigError(key, text, f"must be 1 to {MOST}")
    return value


def _dtype(key: str, text: str) -> str:
    if text not in DTYPES:
        raise ConfigError(key, text, f"is no dtype of pages or blocks{close_to(text, DTYPES)}", DTYPES)
    return text


def _flag(key: str, text: str) -> bool:
    if text not in FLAGS:
        raise ConfigError(key, text, "must be true or false")
    return FLAGS[text]


def cases_of(model: ModelShape, hardware: Hardware, sizes: Sizes) -> list[KernelCase]:
    """One case a kernel, of attention one a window of the model: what one device does. Raises `ConfigError`."""
    heads, kv_heads = device_heads(model, hardware.count)
    if model.hidden_dtype_bytes not in PLAIN:
        raise ConfigError("model.dtype_bytes", model.dtype_bytes, "no dtype of queries has so many bytes", PLAIN)
    if not sizes.kv_dtype and model.kv_dtype_bytes not in PLAIN:
        raise ConfigError("kv_dtype", "", f"which one, of {model.kv_dtype_bytes} bytes a number", DTYPES)
    shape = (heads, kv_heads, model.cache_dim, sizes.page_tokens, PLAIN[model.hidden_dtype_bytes])
    kv_dtype = sizes.kv_dtype or PLAIN[model.kv_dtype_bytes]
    context = sizes.context_tokens
    chunk = sizes.chunk_tokens or context
    cached = {"entries": model.cache_entries, "value_dim": model.value_dim if model.latent else 0}
    soft_cap = sizes.soft_cap or model.attention_soft_cap > 0
    windows = [window for window, _ in model.window_layers] if sizes.window is None else [sizes.window]
    seen: list[dict[str, Any]] = [{"window": window, "soft_cap": soft_cap, **cached} for window in windows]
    block_dtype = "" if sizes.block_dtype == kv_dtype else sizes.block_dtype
    pages = -(-context // sizes.page_tokens)
    moved: dict[str, Any] = {"layers": model.layers, "pages": pages, "block_dtype": block_dtype, **cached}
    return [
        *(KernelCase("prefill", *shape, kv_dtype, ((1, context - chunk, chunk),), **each) for each in seen),
        *(
            KernelCase("decode", *shape, kv_dtype, ((sizes.batch, context, sizes.query_tokens),), **each)
            for each in seen
        ),
        KernelCase("kv_pack", *shape, kv_dtype, **moved),
        KernelCase("kv_unpack", *shape, kv_dtype, **moved),
    ]
