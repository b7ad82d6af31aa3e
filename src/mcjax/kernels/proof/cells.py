"""What there is to show: a cell is one kernel's body, for one shape and dtype, on one rung of the ladder."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from mcjax.cost import catalogue
from mcjax.errors import ConfigError
from mcjax.kernels.pages import LARGEST
from mcjax.kernels.proof.cover import pairwise

BODIES = {
    "prefill-tpu": "mcjax.kernels.prefill.tpu:prefill",
    "prefill-gpu": "mcjax.kernels.prefill.gpu:prefill",
    "prefill-gpu_mosaic": "mcjax.kernels.prefill.gpu_mosaic:prefill",
    "decode-tpu": "mcjax.kernels.decode.tpu:decode",
    "decode-gpu": "mcjax.kernels.decode.gpu:decode",
    "kv_pack-tpu": "mcjax.kernels.kv_pack.tpu:kv_pack",
    "kv_pack-gpu": "mcjax.kernels.kv_pack.gpu:kv_pack",
    "kv_unpack-tpu": "mcjax.kernels.kv_pack.tpu:kv_unpack",
    "kv_unpack-gpu": "mcjax.kernels.kv_pack.gpu:kv_unpack",
}
"""KERNEL-BODY, and where the function is."""

TAKES: dict[str, dict[str, tuple[Any, ...]]] = {
    "prefill-gpu_mosaic": {"dtype": ("bfloat16",), "head_dim": (64, 128)},
}
"""Of bodies that take some cases only, which: the rest is another body's."""

INTERPRETED = ("interpret", "races")
TPUS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2"}
"""Rungs that compile for a TPU, and the topology that they compile for."""
RUNGS = (*INTERPRETED, *TPUS, "h200")

DTYPES = ("bfloat16", "float32", *LARGEST)
HEAD_DIMS = (64, 80, 96, 128, 256)
PAGES = (16, 32, 64, 128, 256, 512)
DEVICES = {"llama3-8b": 1, "llama3-70b": 8, "qwen3-32b": 4}
"""Models, and over how many devices their heads are shared out."""
HEADS = (*DEVICES, "ungrouped")
"""Whose query and key heads a device has; `ungrouped`: as many of one as of the other."""
ATTENTION_FEATURES = ("plain", "window", "soft_cap")
DECODE_FEATURES = (*ATTENTION_FEATURES, "several")
"""`several`: query tokens a row."""
PACK_FEATURES = ("plain", "part", "encoded")
"""`part`: a range of heads. `encoded`: blocks are of another dtype than pages."""
CONTEXTS = ("ragged", "8k", "128k")
"""`ragged`: small sequences at every edge of a page."""
CONTEXT_TOKENS = {"8k": 8 << 10, "128k": 128 << 10}


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to show. Its name is its fields, so it stays the same whatever is added to the axes."""

    body: str
    rung: str
    dtype: str
    """Of the pages. Queries, new keys and values are float32 where pages are, and bfloat16 elsewhere."""
    head_dim: int
    page_tokens: int
    heads: str
    feature: str = "plain"
    context: str = "ragged"

    @property
    def name(self) -> str:
        width, page = f"D={self.head_dim}", f"page={self.page_tokens}"
        return "/".join((self.body, self.rung, self.dtype, width, page, self.heads, self.feature, self.context))

    @classmethod
    def of(cls, name: str) -> Cell:
        """The cell of that name. Raises `ConfigError` where it is none."""
        parts = name.split("/")
        if len(parts) != len(fields(cls)):
            raise ConfigError("cell", name, f"has {len(parts)} parts, not {len(fields(cls))}")
        body, rung, dtype, width, page, heads, feature, context = parts
        try:
            widths = int(width.removeprefix("D=")), int(page.removeprefix("page="))
        except ValueError as error:
            raise ConfigError("cell", name, str(error)) from error
        cell = cls(body, rung, dtype, *widths, heads, feature, context)
        if cell.name != name or cell.body not in BODIES or not goes_together(asdict(cell)):
            raise ConfigError("cell", name, "is no cell")
        return cell

    @property
    def kernel(self) -> str:
        return self.body.partition("-")[0]

    @property
    def platform(self) -> Literal["tpu", "gpu"]:
        return "tpu" if self.body.endswith("-tpu") else "gpu"

    @property
    def compute_dtype(self) -> str:
        """Of queries, new keys and values."""
        return "float32" if self.dtype == "float32" else "bfloat16"

    @property
    def device_heads(self) -> tuple[int, int]:
        """Query and key heads of one device; interpreted: as many queries a key, at most two keys."""
        if self.heads == "ungrouped":
            query, key = 8, 8
        else:
            shape = catalogue.model(self.heads)
            query, key = shape.heads // DEVICES[self.heads], shape.kv_heads // DEVICES[self.heads]
        if self.rung in INTERPRETED:
            return query // key * min(key, 2), min(key, 2)
        return query, key

    def function(self) -> Callable[..., Any]:
        """The body. Raises `ImportError` or `AttributeError` where it is not there."""
        module, _, name = BODIES[self.body].partition(":")
        return getattr(importlib.import_module(module), name)


def goes_together(part: Mapping[str, Any]) -> bool:
    """Whether a cell may have these values, of some of its fields."""
    body, rung, feature, context = (part.get(name) for name in ("body", "rung", "feature", "context"))
    if body is not None and rung is not None and rung not in rungs_of(body):
        return False
    if body is not None and feature is not None and feature not in features_of(body):
        return False
    if any(part.get(name, values[0]) not in values for name, values in TAKES.get(body or "", {}).items()):
        return False
    if body is not None and context == "128k" and "pack" in body:
        return False  # they move pages, whatever the context
    return rung is None or context is None or (rung in INTERPRETED) == (context == "ragged")


def rungs_of(body: str) -> tuple[str, ...]:
    """Where a body can be shown anything. Mosaic GPU's bodies are compiled only: its interpreter takes minutes."""
    if body.endswith("-tpu"):
        return (*INTERPRETED, *TPUS)
    return ("h200",) if body.endswith("-gpu_mosaic") else ("interpret", "h200")


def features_of(body: str) -> tuple[str, ...]:
    if "pack" in body:
        return PACK_FEATURES
    return DECODE_FEATURES if body.startswith("decode") else ATTENTION_FEATURES


def cover() -> list[Cell]:
    """Every pair of values that may go together, in as few cells as a simple search finds."""
    axes = {
        "body": tuple(BODIES),
        "rung": RUNGS,
        "dtype": DTYPES,
        "head_dim": HEAD_DIMS,
        "page_tokens": PAGES,
        "heads": HEADS,
        "feature": tuple(dict.fromkeys((*DECODE_FEATURES, *PACK_FEATURES))),
        "context": CONTEXTS,
    }
    return [Cell(**combination) for combination in pairwise(axes, goes_together)]


def models() -> list[Cell]:
    """Compiled at the shapes of real models: pages of 64 tokens, every dtype that pages are kept in there."""
    return [
        Cell(body, rung, dtype, catalogue.model(heads).head_dim, 64, heads, "plain", context)
        for body in BODIES
        for rung in rungs_of(body)
        if rung not in INTERPRETED
        for heads in DEVICES
        for dtype in DTYPES
        if dtype != "float32" and dtype in TAKES.get(body, {}).get("dtype", DTYPES)
        for context in CONTEXT_TOKENS
        if context == "8k" or "pack" not in body
    ]


def product() -> list[Cell]:
    """Every dtype, head dim and page size of every body on every rung but `races`; heads and features in turn.

    Bodies and rungs take turns, so that the first part of it is a sample of all.
    """
    found: list[Cell] = []
    shapes = [(dtype, width, page) for width in HEAD_DIMS for page in PAGES for dtype in DTYPES]
    # Steps that are no divisor of an axis' length, so that neither shapes nor heads nor features go with the same ones.
    for index in range(len(shapes)):
        dtype, width, page = shapes[index * 37 % len(shapes)]
        heads = HEADS[(index + index // 5) % len(HEADS)]
        for body in BODIES:
            feature = features_of(body)[index // 7 % len(features_of(body))]
            for rung in rungs_of(body):
                context = "ragged" if rung in INTERPRETED else "8k"
                found.append(Cell(body, rung, dtype, width, page, heads, feature, context))
    return [cell for cell in found if cell.rung != "races" and goes_together(asdict(cell))]


SCOPES = {"cover": cover, "models": models, "product": product}


def cells(scopes: Iterable[str] = tuple(SCOPES)) -> list[Cell]:
    """Of these scopes, each once, in this order."""
    return list(dict.fromkeys(cell for scope in scopes for cell in SCOPES[scope]()))


def missing_for(rung: str) -> tuple[str, str] | None:
    """The package that a rung needs and that is not here, and the extra that brings it."""
    package, extra = {"h200": ("jax_cuda13_plugin", "aot-gpu")}.get(rung, ("libtpu", "aot-tpu"))
    if rung in INTERPRETED or importlib.util.find_spec(package):
        return None
    return package, extra
