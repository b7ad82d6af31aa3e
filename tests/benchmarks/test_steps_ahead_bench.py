"""`benchmarks/steps_ahead.py`: whole steps compiled for chips that are not there, as a table."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

SMALL = ["--layers", "1", "--pages", "64", "--batch", "8", "--chunk-tokens", "256", "--context-tokens", "1024"]


@pytest.mark.aot_tpu
@pytest.mark.timeout(300)
def test_both_steps_are_in_the_table_and_in_the_file(module, tmp_path: Path, capsys) -> None:
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs the aot-tpu extra")
    assert module("steps_ahead").main(["llama3-8b", "v6e:2x2", *SMALL, "--out", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "| decode of 8 x 1 |" in table
    assert "| prefill of 1 x 256 |" in table
    rows = json.loads((tmp_path / "steps_ahead.json").read_text())
    decode = rows["llama3-8b/1/v6e:2x2/decode of 8 x 1"]
    assert decode["collectives"] == {"all-reduce": 3, "all-gather": 1}
    assert decode["hbm_bytes"] > decode["argument_bytes"] > 0


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="the extra is installed")
def test_without_the_extra_the_error_names_it(module, tmp_path: Path, capsys) -> None:
    assert module("steps_ahead").main(["llama3-8b", "v6e:2x2", "--out", str(tmp_path)]) == 2
    assert "aot-tpu" in capsys.readouterr().err


def test_an_unknown_model_is_refused_with_those_there_are(module, tmp_path: Path, capsys) -> None:
    assert module("steps_ahead").main(["llama3-9b", "v6e:2x2", "--out", str(tmp_path)]) == 2
    assert "llama3-8b" in capsys.readouterr().err
