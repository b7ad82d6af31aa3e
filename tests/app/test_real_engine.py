"""One small run of the real engine from Python, inside a running loop, as in a notebook."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest_app import Answer

Command = Callable[..., Answer]

HERE = str(Path(__file__).parent)
CODE = f"""
import asyncio, sys
sys.path.insert(0, {HERE!r})
import block_life, mcjax
from mcjax.sched.base import PrefillChoice

def pick(request, view, rng):
    return PrefillChoice(0)

names = block_life.watch()

async def main():
    return mcjax.run(["workload.sessions=2", "workload.rate_per_s=50", "track.sinks.0.overview=false"], prefill=pick)

run = asyncio.run(main())
assert run.state == "done", run
assert run.summary["verified"]["requests"] == run.summary["requests"]["completed"] == 8
assert run.summary["verified"]["kv_blocks"] > 0
assert run.summary["slo_attainment"] is not None
assert run.outcomes.num_rows > 0
assert run.summary["compilations_after_warm_up"] == 0
assert run.summary["padding"]["prefill"]["widths"] == [256]
assert 0 < run.summary["padding"]["prefill"]["actual"] < 1
assert sorted(run.summary["device_memory"]) == ["d0", "p0"]
assert mcjax.load(run.directory).summary == run.summary
counts = block_life.follow(run, names)
assert min(counts[kind] for kind in ("insert", "hit", "transfer", "release", "prefill_step")) > 5, counts
print(run)
"""


@pytest.mark.check_long
def test_real_engine_in_a_running_loop(fresh: Command) -> None:
    answer = fresh(code=CODE)
    assert answer.status == 0, answer.err
    assert "8 of 8 requests completed" in answer.out
