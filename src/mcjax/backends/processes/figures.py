"""What workers say of their work, put together as one engine would say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def together(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of all workers that said their last words (`Hosted`): counts added, memories side by side."""
    worlds = [figures["world"] for figures in told]
    if not worlds:
        return {}
    padding: dict[str, Any] = {}
    for phase, first in worlds[0]["padding"].items():
        asked, computed = (sum(figures["padding"][phase][at] for figures in told) for at in (0, 1))
        padding[phase] = {**first, "actual": 1 - asked / computed if computed else None}
    return {
        "compilations_after_warm_up": sum(world["compilations_after_warm_up"] for world in worlds),
        "host_memory": {node: memory for world in worlds for node, memory in world["host_memory"].items()},
        "device_memory": {name: memory for world in worlds for name, memory in world["device_memory"].items()},
        "padding": padding,
        "ssd": None,
    }
