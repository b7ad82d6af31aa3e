"""`numerics=fast` and meshes of unequal sizes: a token may be another one than the reference's only by rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import mcjax
from mcjax.app.runner import Result
from mcjax.app.verify import within_margin
from mcjax.backends.jax.judge import Judge, reference_geometry
from mcjax.backends.jax.meshes import MeshAxes
from mcjax.backends.jax.numerics import Answer, common_mesh, comparable
from mcjax.backends.jax.programs import Geometry, Programs
from mcjax.engine.base import Kind, StepPlan
from mcjax.errors import VerificationError
from mcjax.track.arrow import arrow
from mcjax.types import Request, RequestRow, RequestState, Role, Sampling

PAGES = list(range(16))
WARM = Sampling(temperature=1.3, seed=2**40 + 5)


@pytest.fixture(scope="module")
def judge(lab: Any) -> Judge:
    return Judge(Programs(lab.model, reference_geometry(lab.geometry)), jax.local_devices()[0])


@pytest.fixture(scope="module")
def answers(lab: Any) -> list[Answer]:
    """What the invariant engine says, greedy and warm, to prompts of a few lengths."""

    async def main() -> list[Answer]:
        executor = lab.executor()
        found = []
        for length, sampling, steps in [(5, Sampling(), 12), (33, WARM, 20), (90, Sampling(), 1), (64, WARM, 7)]:
            prompt = lab.prompt(length, length)
            first = await lab.prefill(executor, prompt, PAGES, sampling=sampling)
            rest = await lab.decode(executor, first, length, PAGES, steps, sampling=sampling)
            found.append(Answer(prompt, np.array([first, *rest], np.int32), sampling))
        return found

    return lab.run(main)


def test_the_reference_engine_finds_its_own_tokens_the_best(judge: Judge, answers: list[Answer]) -> None:
    falls = judge.shortfalls([*answers, *answers])  # more than one batch
    assert [len(found) for found in falls] == [13, 21, 2, 8] * 2
    assert not np.concatenate(falls).any()


def test_a_wrong_token_falls_short_and_what_follows_is_judged_behind_it(judge: Judge, answers: list[Answer]) -> None:
    for answer in answers[:2]:
        output = answer.output.copy()
        output[4] = (output[4] + 1) % 256
        [falls] = judge.shortfalls([Answer(answer.prompt, output, answer.sampling)])
        assert not falls[:4].any()
        assert falls[4] > 0.01
        after = Answer(np.append(answer.prompt, output[:5]).astype(np.int32), output[5:], answer.sampling)
        [alone] = judge.shortfalls([after])
        np.testing.assert_allclose(falls[5:], alone, atol=1e-3)  # a prompt is computed by another program


def test_which_samplers_a_margin_bounds() -> None:
    assert comparable(Sampling(temperature=0.7, seed=3, logprobs=2, stop_tokens=(1,)))
    for sampling in (Sampling(top_k=4), Sampling(top_p=0.5), Sampling(presence_penalty=1.0)):
        assert not comparable(sampling)


def test_when_engines_agree_to_the_bit() -> None:
    both = [Role.PREFILL, Role.DECODE]
    assert common_mesh("invariant", 2, both) == MeshAxes(2)
    assert common_mesh("invariant", {"prefill": 2}, both) is None
    assert common_mesh("invariant", {"prefill": 2}, [Role.MIXED]) == MeshAxes()
    assert common_mesh("fast", 1, both) is None


class Says:
    def __init__(self, *falls: list[float]):
        self._falls = [np.array(found, np.float32) for found in falls]

    def shortfalls(self, answers: Any) -> list[np.ndarray]:
        assert [len(answer.output) for answer in answers] == [len(found) for found in self._falls]
        return self._falls


def judged(*falls: list[float], sampling: Sampling = Sampling(), tolerance: float = 0.1) -> Any:
    prompt = np.arange(4, dtype=np.int32)
    rows = [
        RequestRow(
            Request(index, 0, 4, 8, prompt, sampling=sampling),
            state=RequestState.COMPLETED,
            output=[0] * max(1, len(found)),
            local_tokens=4,
        )
        for index, found in enumerate(falls)
    ]
    kinds = ["prefill_step", "prefill_step", "decode_step"]
    events = arrow().table({"kind": kinds, "request_id": [0, 0, -1], "blocks": [1, 1, 2]})
    run = Result(rows=rows, bytes_by_transport={"device": 1, "local": 1})
    return within_margin(run, events, True, Says(*falls), tolerance)


def test_differences_within_twice_the_tolerance_are_counted() -> None:
    found = judged([0, 0, 0.125], [0.0, 0.0625])
    assert (found.requests, found.tokens, found.differing, found.largest_gap) == (2, 5, 2, 0.125)


@pytest.mark.parametrize("fall", [0.21, float("nan")])
def test_a_larger_one_fails_and_is_named(fall: float) -> None:
    with pytest.raises(VerificationError, match=r"request 1 .* output token 2: .* below .* allows 0\.2"):
        judged([0.0], [0, 0, fall])


def test_a_run_that_nothing_can_be_said_of_proves_nothing() -> None:
    with pytest.raises(VerificationError, match="no token could be compared"):
        judged(sampling=Sampling(top_k=3))


def test_fused_steps_give_the_tokens_of_single_ones_and_stop_where_they_do(lab: Any) -> None:
    """Also where the plan is no multiple of them, and where an output ends inside of one call."""
    fused = Programs(lab.model, Geometry(40, 8, 4, 32, 200, fused_steps=4, batches=(1,)))

    async def main() -> Any:
        single, many = lab.executor("single"), lab.executor("many", programs=fused)
        told: list[tuple[int, list[int | None]]] = []
        results = []
        for executor in (single, many):
            first = await lab.prefill(executor, lab.prompt(3, 30), PAGES)
            free = await lab.decode(executor, first, 30, PAGES, 11)
            sampling = Sampling(stop_tokens=(free[5],))
            items = [lab.item(Kind.DECODE, [first], 30, PAGES, sampling=sampling)]
            told.clear()
            stopped = await executor.run(StepPlan(items), 11, lambda step, tokens, end: told.append((step, tokens)))
            results.append((free, stopped.tokens[0].tolist(), stopped.steps, stopped.finished, list(told)))
            ends = stopped.ends_ns.tolist()
            known = await lab.decode(executor, first, 30, PAGES, 6, forced=0)
            results[-1] += (known,)
        return results, ends, many.tally

    results, ends, tally = lab.run(main)
    assert results[0] == results[1]
    assert results[0][2] == results[0][1].index(results[0][1][-1]) + 1
    assert ends[0] == ends[1] == ends[2] == ends[3] < ends[4] == ends[5]
    assert tally.decode.computed == tally.decode.asked == 11 + 6 + 6  # no row of padding: the batch of one is there


def run(runs: Path, *overrides: str, **strategies: Any) -> mcjax.Run:
    fixed = ["workload.sessions=4", "workload.turns=2", "workload.think_time_s=0.05", "workload.rate_per_s=50"]
    place = [f"track.sinks.0.directory={runs}", "track.sinks.0.overview=false", "backend.poison=true"]
    return mcjax.run([*fixed, *place, *overrides], progress=False, **strategies)


@pytest.mark.check_long
def test_a_fast_run_is_judged_and_shares_what_was_decoded(tmp_path: Path) -> None:
    exact = run(tmp_path, "cluster=1m", "verify=false")
    fast = run(tmp_path, "cluster=1m", "backend.numerics=fast", "backend.fused_steps=2")
    assert fast.summary["verified"]["requests"] == 8
    assert fast.summary["verified"]["tokens"] >= 8 * 64
    assert fast.summary["verified"]["not_compared"] == 0
    assert fast.summary["compilations_after_warm_up"] == 0
    assert fast.summary["tokens_by_tier"]["dram_local"] > exact.summary["tokens_by_tier"]["dram_local"]
    padding = fast.summary["padding"]["prefill"]
    assert len(padding["widths"]) > 1
    assert padding["actual"] < exact.summary["padding"]["prefill"]["actual"]
    assert 0 <= padding["expected"] < 1
    assert mcjax.replay(fast).agrees


@pytest.mark.check_long
def test_decoded_blocks_that_meet_prefilled_ones_of_the_same_tokens_are_no_corruption(tmp_path: Path) -> None:
    """The decode instance holds the last turn's answer as it decoded it; the next turn's prefill sends its own."""
    done = run(tmp_path, "backend.numerics=fast", "verify=false")
    turns = done.requests.column("turn").to_pylist()
    assert max(turns) > 0
    assert done.requests.column("attempts").to_pylist() == [1] * 8


@pytest.mark.check_long
@pytest.mark.parametrize(("mesh", "bitwise"), [("2", True), ("{prefill: 2, decode: 1}", False)])
def test_a_run_over_meshes(tmp_path: Path, mesh: str, bitwise: bool) -> None:
    done = run(tmp_path, f"backend.mesh={mesh}")
    verified = done.summary["verified"]
    assert verified["requests"] == 8
    assert ("kv_blocks" in verified) == bitwise
    assert [len(memory["devices"]) for memory in done.summary["device_memory"].values()] == [2, 2 if bitwise else 1]
    assert done.summary["compilations_after_warm_up"] == 0


@pytest.mark.check_long
def test_a_wrong_token_of_a_fast_run_fails_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mcjax.app import run as app

    def tampered(ours: Result, *arguments: Any) -> Any:
        output = ours.rows[3].output
        assert output is not None
        output[10] ^= 1
        return within_margin(ours, *arguments)

    monkeypatch.setattr(app, "within_margin", tampered)
    with pytest.raises(VerificationError, match="at output token 10"):
        run(tmp_path, "backend.numerics=fast")
