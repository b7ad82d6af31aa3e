"""The one door to pyarrow: imported when a table is made or read, never with the package."""

from __future__ import annotations

import importlib
from typing import Any, TypeAlias

Table: TypeAlias = Any
"""A `pyarrow.Table` (pyarrow ships no type stubs)."""


def arrow() -> Any:
    return importlib.import_module("pyarrow")


def compute() -> Any:
    return importlib.import_module("pyarrow.compute")


def parquet() -> Any:
    return importlib.import_module("pyarrow.parquet")


def give_back() -> None:
    """Arrow keeps memory that it has freed, for itself: give it to the rest of the process."""
    arrow().default_memory_pool().release_unused()
