"""A real model answers a real question, and its answer is known: transformers gives these ids for the same weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest_app import Answer

pytestmark = [pytest.mark.check_long, pytest.mark.timeout(300)]  # each compiles 30 layers

Command = Callable[..., Answer]

ANSWER_IDS = [504, 3575, 282, 4649, 314, 7042, 30, 2]
"""`The capital of France is Paris.` and the end token, greedily."""

CODE = """
import sys, mcjax
from mcjax.cost.catalogue import model
from mcjax.models.tokenizer import tokenizer_for

small = "max_batch=2 chunk_tokens=64 pages=16 max_context_tokens=128 pool_blocks=16".split()
run = mcjax.run(
    ["model=smollm2", "workload=text", "workload.limit=1", "workload.max_tokens=16", "track.sinks.0.overview=false",
     *(f"backend.{each}" for each in small), *sys.argv[1:]]
)
(ids,) = run.requests["output"].to_pylist()
print(ids)
print(tokenizer_for(model("smollm2")).decode(ids))
"""


@pytest.mark.parametrize("cluster", ["1p1d", "1m"])
def test_the_capital_of_france(fresh: Command, smollm2: str, cluster: str) -> None:
    answer = fresh(f"cluster={cluster}", code=CODE, timeout_s=280)
    assert answer.status == 0, answer.err
    assert answer.out.splitlines() == [str(ANSWER_IDS), "The capital of France is Paris."]


def test_the_same_in_bfloat16(fresh: Command, smollm2: str) -> None:
    answer = fresh("cluster=1m", "model.dtype_bytes=2", "model.kv_dtype_bytes=2", code=CODE, timeout_s=280)
    assert answer.status == 0, answer.err
    assert answer.out.splitlines() == [str(ANSWER_IDS), "The capital of France is Paris."]
