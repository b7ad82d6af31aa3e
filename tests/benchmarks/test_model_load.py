"""Weights pass through the host's memory one at a time: what is taken beside them does not grow with the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import pytest

import directory_fixtures as small

ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 8000, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.check_long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("devices", [1, 4])
def test_extra_memory_is_that_of_one_parameter(tmp_path: Path, devices: int) -> None:
    small.write(tmp_path, CONFIG, small.tensors(CONFIG, dtype=ml_dtypes.bfloat16), files=3)
    command = [sys.executable, ROOT / "benchmarks/model_load.py", "model=hf", f"model.path={tmp_path}"]
    answer = subprocess.run([*command, f"--devices={devices}"], check=True, capture_output=True, text=True, timeout=100)
    found = json.loads(answer.stdout)
    assert found["weights_mb"] > 200
    assert found["extra_mb"] < found["largest_parameter_mb"] + 50  # the allocator's share, and what JAX does first
