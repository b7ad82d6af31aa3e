"""KV bytes of published models, as Markdown: `python -m mcjax.cost.kv_table` (the table in docs/models.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mcjax.cost.catalogue import model
from mcjax.cost.model_shape import ModelShape

MODELS = ("llama3-8b", "llama3-70b", "qwen3-32b", "gemma3-27b", "deepseek-v3")
CONTEXT_TOKENS = 131_072
HUNDREDS_OF_MB = 500_000_000
"""What "hundreds of MB" is taken for."""
WIDTHS = {"bf16": 2, "fp8": 1}
"""Bytes of a cached number. Scales of quantised vectors are left out."""


def lines() -> Iterator[str]:
    """The table: what the next token of a context needs, in each width; and what blocks of all layers hold."""
    header = ["model", "KV groups: layers x bytes a token, bf16"]
    header += [f"128k tokens, {width}" for width in WIDTHS]
    header += [f"over 500 MB, {width}" for width in WIDTHS]
    yield _row([*header, "128k in blocks, bf16"])
    yield "|" + "---|" * (len(header) + 1)
    for name in MODELS:
        shapes = [replace(model(name), kv_dtype_bytes=width) for width in WIDTHS.values()]
        needed = [shape.kv_bytes(CONTEXT_TOKENS) for shape in shapes]
        yield _row(
            [
                name,
                _groups(shapes[0]),
                *(f"{nbytes / 1e9:.2f} GB" for nbytes in needed),
                *(f"{nbytes / HUNDREDS_OF_MB:.0f} x" for nbytes in needed),
                f"{CONTEXT_TOKENS * shapes[0].kv_bytes_per_token / 1e9:.2f} GB",
            ]
        )


def _groups(shape: ModelShape) -> str:
    each = shape.layer_kv_bytes
    words = [
        f"{group.name}: {group.bytes_per_token // each} x {each:,}"
        + (f", last {group.window_tokens:,} tokens" if group.window_tokens else "")
        for group in shape.kv_groups
    ]
    return "; ".join(words)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    print("\n".join(lines()))
