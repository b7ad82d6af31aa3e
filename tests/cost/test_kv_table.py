"""The table of KV bytes in docs/models.md is what the command prints, and says what sums by hand say."""

from __future__ import annotations

from pathlib import Path

from mcjax.cost.catalogue import model
from mcjax.cost.kv_table import lines

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_has_the_table() -> None:
    assert "\n".join(lines()) in PAGE.read_text(encoding="utf-8"), "run: python -m mcjax.cost.kv_table"


def test_rows_by_hand() -> None:
    tokens = 131_072
    assert model("llama3-70b").kv_bytes(tokens) == 80 * 2 * 8 * 128 * 2 * tokens == 42_949_672_960
    assert model("deepseek-v3").kv_bytes(tokens) == 61 * (512 + 64) * 2 * tokens
    gemma = model("gemma3-27b")
    assert gemma.kv_bytes(tokens) == 2 * 16 * 128 * 2 * (10 * tokens + 52 * 1024)
    assert gemma.kv_bytes(1000) == 1000 * gemma.kv_bytes_per_token
    table = list(lines())
    assert len(table) == 7
    assert "42.95 GB | 21.47 GB | 86 x | 43 x" in table[3]
