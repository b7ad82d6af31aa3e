"""Experts and latent attention in the engine: a sequence's bits depend on its tokens only, and P/D equals colocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mcjax
from family_cases import CONFIGS
from mcjax.cost.model_shape import ModelShape
from mcjax.engine.base import Kind, StepPlan

PAGES, OTHER_PAGES = list(range(8)), [39, 3, 22, 17, 8, 30, 1, 12]
SMALL = {"vocab_size": 259, "num_hidden_layers": 2, "max_position_embeddings": 2048}
"""Bytes as tokens; one dense layer and one with experts, if there are dense ones."""


def test_chunks_pages_and_batch_mates_change_nothing(lab: Any) -> None:
    shape = ModelShape.from_hugging_face(CONFIGS["deepseek_v3"] | SMALL)
    lab = type(lab)(shape)
    prompt = lab.prompt(1, 50)

    async def main() -> Any:
        results = []
        for cuts, pages in (((), PAGES), ((1, 2, 30), OTHER_PAGES)):
            executor = lab.executor(f"e{len(results)}")
            token = await lab.prefill(executor, prompt, pages, cuts)
            alone = [token, *await lab.decode(executor, token, 50, pages, 10)]
            results.append((alone, await lab.kv(executor, pages, 60)))
        mates = [(20, [10, 11, 13, 14]), (9, [20, 21, 23])]
        await lab.prefill(executor, prompt, OTHER_PAGES)
        items = [lab.item(Kind.DECODE, [token], 50, OTHER_PAGES)]
        for length, pages in mates:
            other = lab.prompt(length, length)
            first = await lab.prefill(executor, other, pages)
            items.insert(0, lab.item(Kind.DECODE, [first], length, pages))
        progress = await executor.run(StepPlan(items), 10)
        results.append(([token, *progress.tokens[-1].tolist()], await lab.kv(executor, OTHER_PAGES, 60)))
        return results

    (tokens, kv), *others = lab.run(main)
    assert kv.shape == (2, 1, 60, 1, 40)
    assert not np.isnan(kv.view(np.float32)).any()
    assert len(set(tokens)) > 3
    for other_tokens, other_kv in others:
        assert other_tokens == tokens
        np.testing.assert_array_equal(other_kv, kv)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("deepseek_v3", "float32"),
        pytest.param("deepseek_v3", "bfloat16", marks=pytest.mark.check_long),
        pytest.param("mixtral", "float32", marks=pytest.mark.check_long),
        pytest.param("qwen3_moe", "bfloat16", marks=pytest.mark.check_long),
    ],
)
@pytest.mark.timeout(300)
def test_disaggregated_equals_colocated(tmp_path: Path, family: str, dtype: str) -> None:
    """Random weights, from a directory that has no others; tokens and KV bytes, with poison in what is released."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[family] | SMALL | {"dtype": dtype}))
    done = mcjax.run(
        [
            "model=hf",
            f"model.path={tmp_path}",
            "verify=true",
            "backend.poison=true",
            "workload.sessions=2",
            "workload.turns=2",
            "workload.think_time_s=0.05",
            "workload.rate_per_s=20",
            f"track.sinks.0.directory={tmp_path / 'runs'}",
        ],
        progress=False,
    )
    assert done.state == "done"
    verified = done.summary["verified"]
    assert verified["requests"] == done.summary["requests"]["completed"] == 4
    assert verified["kv_blocks"] > 4
    assert len({token for output in done.requests["output"].to_pylist() for token in output}) > 10
