"""Strict priority."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcjax.types import Request


@dataclass(frozen=True)
class Priority:
    """The highest `request.priority` first, in order of arrival among equals. Low priorities may starve."""

    def classify(self, request: Request) -> str:
        return f"priority {request.priority}"

    def next(self, waiting: Sequence[Request]) -> int:
        return max(range(len(waiting)), key=lambda index: (waiting[index].priority, -index))

    def charge(self, request: Request, tokens: int) -> None:
        pass
