"""Eight CPU devices, before anything here computes; importing JAX fixes neither."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

if jax.config.jax_num_cpu_devices < 8:  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def measured() -> Callable[..., None]:
    """Takes what a test measured, for the support matrix (`support_matrix.py`)."""
    file = os.environ.get("MCJAX_SUPPORT")

    def keep(**line: object) -> None:
        if file:
            with Path(file).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(line) + "\n")

    return keep
