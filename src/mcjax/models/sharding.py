"""Which logical axis each dimension of a parameter is. Free of jax: what is spread over devices, the backend says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PARAMETERS: dict[str, tuple[str | None, ...]] = {
    "embedding": ("vocab", None),
    "head": ("vocab", None),
    "gain": (None,),
    "mix": (None, "kv_heads", None, None),
    "output": ("heads", None, None),
    "gate_up": (None, None, "d_ff"),
    "down": ("d_ff", None),
    "rotary": (None, None, None),
}
"""By the last name of a parameter."""

PAGES: dict[str, tuple[str | None, ...]] = {
    "tokens_first": (None, None, None, None, "kv_heads", None),  # [P, L, 2, page, Hkv, D]
    "heads_first": (None, None, None, "kv_heads", None, None),  # [P, L, 2, Hkv, page, D]
}
"""By layout (`kernels.choice.Layout`). Canonical blocks lie as pages whose tokens come first."""


def axes_of(path: Sequence[Any]) -> tuple[str | None, ...]:
    """The axes of the parameter at a path of the model's state: its last name counts."""
    names = [str(key.key) for key in path if hasattr(key, "key")]  # the path ends in an attribute that holds the array
    if not names or names[-1] not in PARAMETERS:
        raise ValueError(f"no axes are declared for the parameter {'.'.join(names)}: see mcjax/models/sharding.py")
    return PARAMETERS[names[-1]]
