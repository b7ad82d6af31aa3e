"""A call of a kernel at stated sizes: what it costs, and how fast an accelerator could be at best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from mcjax.cost.hardware import Hardware
from mcjax.cost.kernels import (
    AttentionShape,
    KernelCost,
    decode_cost,
    kv_pack_cost,
    kv_unpack_cost,
    prefill_cost,
    stored_token_bytes,
)
from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError

Kernel = Literal["prefill", "decode", "kv_pack", "kv_unpack"]
KERNELS: tuple[Kernel, ...] = ("prefill", "decode", "kv_pack", "kv_unpack")

DTYPES: Mapping[str, tuple[int, int]] = {
    "float32": (4, 0),
    "bfloat16": (2, 0),
    "int8": (1, 4),
    "float8_e4m3fn": (1, 4),
}
"""Bytes of a number in pages or blocks of each dtype, and of the scale of each vector."""


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One call on one device. Attention is of one layer; packing takes `pages` pages of `layers` layers."""

    kernel: Kernel
    heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: str = "bfloat16"
    """Of queries, new keys and values, results."""
    kv_dtype: str = "bfloat16"
    """Of the pages."""
    sequences: tuple[tuple[int, int, int], ...] = ()
    """How many, and of each: for `prefill`, its prefix and new tokens; for `decode`, its context and query tokens."""
    layers: int = 1
    pages: int = 0
    block_dtype: str = ""
    """Of the blocks; empty: that of the pages."""
    window: int | None = None
    soft_cap: bool = False
    entries: int = 2
    """Vectors stored of a token and key head: 1 where keys are the values too (latents)."""
    value_dim: int = 0
    """Numbers of a value that are summed up; 0: `head_dim`."""

    @property
    def shape(self) -> AttentionShape:
        kv_dtype_bytes, scale_bytes = DTYPES[self.kv_dtype]
        return AttentionShape(
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.page_tokens,
            DTYPES[self.dtype][0],
            kv_dtype_bytes,
            scale_bytes,
            self.window,
            self.soft_cap,
            self.entries,
            self.value_dim,
        )

    def cost(self) -> KernelCost:
        if self.kernel in ("prefill", "decode"):
            of = prefill_cost if self.kernel == "prefill" else decode_cost
            parts = [of(self.shape, [(before, new)]).times(count) for count, before, new in self.sequences]
            return sum(parts, start=KernelCost(0, 0, 0))
        number_bytes, scale_bytes = DTYPES[self.block_dtype or self.kv_dtype]
        block_token_bytes = stored_token_bytes(self.kv_heads, self.head_dim, number_bytes, scale_bytes, self.entries)
        make = kv_pack_cost if self.kernel == "kv_pack" else kv_unpack_cost
        return make(self.shape, self.layers, self.pages, block_token_bytes)

    def text(self) -> str:
        """Its sizes in words."""
        if self.kernel in ("kv_pack", "kv_unpack"):
            other = f", blocks {self.block_dtype}" if self.block_dtype not in ("", self.kv_dtype) else ""
            return f"{self.pages:,} pages of {_layers(self.layers)}{other}"
        parts: list[str] = []
        for count, before, new in self.sequences:
            tokens = f"{count:,} x {new:,} token{'' if new == 1 else 's'}"
            if self.kernel == "decode":
                parts.append(f"{tokens}, context {before:,}")
            else:
                parts.append(f"{tokens} after {before:,}" if before else tokens)
        return "; ".join(parts) + (f"; window {self.window:,}" if self.window else "")

    def values(self) -> dict[str, Any]:
        """As JSON; `of_values` reads it."""
        return {**asdict(self), "sequences": [list(sequence) for sequence in self.sequences]}

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> KernelCase:
        """Raises `ValueError` for what is no case."""
        known = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or not set(values) <= known:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"a case has {', '.join(sorted(known))}")
        made = dict(values)
        made["sequences"] = tuple(tuple(int(number) for number in one) for one in values.get("sequences", ()))
        case = cls(**made)
        if case.kernel not in KERNELS or any(len(one) != 3 for one in case.sequences):
            raise ValueError(f"no case of {', '.join(KERNELS)}")
        for dtype in (case.dtype, case.kv_dtype, case.block_dtype or case.kv_dtype):
            if dtype not in DTYPES:
                raise ValueError(f"{dtype} is none of {', '.join(DTYPES)}")
        return case


def _layers(count: int) -> str:
    return "one layer" if count == 1 else f"{count} layers"


@dataclass(frozen=True, slots=True)
class Limit:
    """The least time that a cost can take on one accelerator at its peaks. No kernel reaches it."""

    compute_s: float
    memory_s: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.memory_s)

    @property
    def bound_by(self) -> Literal["compute", "memory"]:
        return "compute" if self.compute_s > self.memory_s else "memory"


def limit(cost: KernelCost, hardware: Hardware) -> Limit:
    """Of one of its accelerators. Exponentials are left out: hardware's catalogue has no rate of theirs."""
    return Limit(cost.flops / hardware.peak_flops, cost.bytes / hardware.hbm_bytes_per_s)


def device_heads(model: ModelShape, ways: int) -> tuple[int, int]:
    """Query heads and key heads of one of `ways` tensor-parallel devices. Of too few key heads each holds a copy, and
    of latents.

    Raises `ConfigError` where the heads do not divide.
    """
    if model.heads % ways:
        raise ConfigError("hardware.count", ways, f"cannot share the {model.heads} query heads of {model.name} evenly")
    if model.latent:
        return model.heads // ways, 1
    if max(model.kv_heads, ways) % min(model.kv_heads, ways):
        problem = f"neither divides the {model.kv_heads} key heads of {model.name}, nor is it a multiple of them"
        raise ConfigError("hardware.count", ways, problem)
    return model.heads // ways, max(model.kv_heads // ways, 1)
