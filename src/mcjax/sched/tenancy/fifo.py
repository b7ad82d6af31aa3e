"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcjax.types import Request


@dataclass(frozen=True)
class FIFO:
    """One class for everybody, in order of arrival at the instance."""

    def classify(self, request: Request) -> str:
        return "all"

    def next(self, waiting: Sequence[Request]) -> int:
        return 0

    def charge(self, request: Request, tokens: int) -> None:
        pass
