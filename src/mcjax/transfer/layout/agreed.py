"""The layout that all memories of a run agree on: one that lies otherwise is refused by name when it joins."""

from __future__ import annotations

from dataclasses import replace

from mcjax.errors import ConfigError
from mcjax.transfer.layout.describe import Layout


class Agreed:
    """What the first memory says holds for all. Encodings may differ: a copy between two converts on its way."""

    def __init__(self) -> None:
        self._first = ""
        self._layout: Layout | None = None

    def admit(self, memory: str, layout: Layout | None) -> None:
        """Let a memory in, by its name; one that does not say how its blocks lie (it has no bytes) always may.

        Raises `ConfigError` for one whose blocks would be read wrongly: it names both memories and all that differs.
        """
        agreed = self._layout
        if layout is None or layout is agreed:
            return
        if agreed is None:
            self._first, self._layout = memory, layout
            return
        differences = agreed.differences(replace(layout, encoding=agreed.encoding))
        if differences:
            problem = f"its blocks do not lie as those of {self._first} do: {'; '.join(differences)}"
            raise ConfigError("layout", memory, problem)
