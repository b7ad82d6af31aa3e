"""A run on a machine that is known, read back: its steps, its hand-offs, and a cost with wrong figures set right."""

from __future__ import annotations

from dataclasses import replace

import pytest

import mcjax
from mcjax.app.validation.comparison import regime_of, regimes
from mcjax.app.validation.steps import overheads_of, predicted_ns, refitted, steps_of
from mcjax.cost.measured import Copies, Line, Machine, Measured, Overheads, Sizes, write
from mcjax.cost.measurements import Measurement
from mcjax.track.run import Run

ROWS = (
    Measurement("prefill", 0, 32, 0, 0, 0.004),
    Measurement("prefill", 0, 256, 0, 0, 0.006),
    Measurement("prefill", 1408, 32, 0, 0, 0.016),
    Measurement("prefill", 1408, 256, 0, 0, 0.020),
    Measurement("decode", 0, 0, 1, 0, 0.001),
    Measurement("decode", 0, 0, 1, 1600, 0.004),
    Measurement("decode", 0, 0, 8, 0, 0.002),
    Measurement("decode", 0, 0, 8, 12800, 0.008),
)
OVERHEADS = Overheads(prefill_idle_ns=2_000_000, prefill_plan_ns=300_000, decode_plan_ns=400_000, copy_ns=100_000)
MACHINE = Machine(
    hardware="cpu",
    model="builtin-tiny",
    sizes=Sizes(512, 32, 8, 256, 1664, 2048, shares_decoded=False),
    steps=ROWS,
    slowdown={"prefill": {"decode": 1.5}, "decode": {"prefill": 1.3}},
    copies=Copies(Line(100_000, 10_000), Line(150_000, 15_000), Line(50_000, 2_000)),
    overheads=OVERHEADS,
)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("machine") / "m.json"
    write(MACHINE, path)
    own = ["workload.sessions=25", "workload.rate_per_s=3", "track=none"]
    return mcjax.run(["backend=sim", "cost=measured", f"cost.path='{path}'", *own])


def test_every_step_took_what_the_machine_says(played: Run) -> None:
    steps = steps_of(played)
    assert sum(step.length for step in steps) == sum(
        row["prompt_tokens"] - row["local_tokens"] - row["remote_tokens"] for row in played.requests.to_pylist()
    )
    produced = sum(played.requests.column("output_tokens").to_pylist())
    assert sum(step.batch for step in steps) == produced - played.requests.num_rows  # prefill gives the first of each
    cost = Measured(MACHINE)
    alone = [step for step in steps if not step.shared]
    assert {step.kind for step in alone} == {"prefill", "decode"}
    exact = [step for step in alone if abs(step.duration_ns - predicted_ns(cost, step)) <= 1]
    assert len(exact) > 0.9 * len(alone)  # the others began with a copy
    assert any(step.shared == 1 for step in steps)
    for regime in regimes([(cost, steps)]):
        assert abs(regime.error) < 0.02, regime


def test_hand_offs_come_back(played: Run) -> None:
    found = overheads_of([played], MACHINE.copies, 32)
    assert found.prefill_plan_ns == OVERHEADS.prefill_plan_ns
    assert found.decode_plan_ns == OVERHEADS.decode_plan_ns
    assert found.copy_ns == OVERHEADS.copy_ns
    assert found.prefill_idle_ns == OVERHEADS.prefill_idle_ns


def test_a_wrong_cost_is_set_right_by_a_run(played: Run) -> None:
    scaled = tuple(replace(row, seconds=row.seconds * (3 if row.kind == "decode" else 0.5)) for row in ROWS)
    wrong = Measured(replace(MACHINE, steps=scaled, slowdown={"prefill": {"decode": 4.0}}))
    found = refitted(wrong, steps_of(played), OVERHEADS)
    for row, true in zip(found.machine.steps, ROWS, strict=True):
        assert row.seconds == pytest.approx(true.seconds, rel=0.01)
    assert found.machine.slowdown["prefill"]["decode"] == pytest.approx(1.5, rel=0.03)
    assert found.machine.slowdown["decode"]["prefill"] == pytest.approx(1.3, rel=0.03)
    assert found.machine.spread["decode"].fleeting[256] == pytest.approx(1, rel=0.01)


def test_regimes_have_names(played: Run) -> None:
    step = steps_of(played)[0]
    assert regime_of(replace(step, kind="prefill", batch=0, shared=0.0)) == "prefill chunk, alone"
    assert regime_of(replace(step, kind="decode", batch=1, shared=1.0)) == "decode, batch 1, beside the other role"
    assert regime_of(replace(step, kind="decode", batch=6, shared=0.5)) == "decode, batch 4 to 7, partly beside it"
