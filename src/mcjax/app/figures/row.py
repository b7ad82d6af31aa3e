"""One line of the page: a published value beside ours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """`anchor` is the figure's short name, such as A7; `why` says why ours differs, where that is known."""

    anchor: str
    what: str
    published: float
    ours: float
    unit: str = ""
    why: str = ""

    @property
    def difference(self) -> float:
        """Ours less the published value, in the row's unit."""
        return self.ours - self.published

    @property
    def error(self) -> float:
        """Ours over the published value, less one."""
        return self.ours / self.published - 1
