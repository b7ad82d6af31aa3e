"""The cards of the models that ship with mcjax. Free of jax."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def card(name: str) -> dict[str, Any]:
    """How `model=NAME` was trained."""
    return json.loads(files("mcjax").joinpath("models", "trained", name, "card.json").read_text(encoding="utf-8"))
