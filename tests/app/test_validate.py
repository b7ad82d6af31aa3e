"""`mcjax validate`: a quick one from end to end, going on in its folder, refusals; never how large an error is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest_app import Answer

from mcjax.app import validate
from mcjax.app.validation.comparison import FIGURES, JUDGED, Row, rows
from mcjax.app.validation.found import Found, line
from mcjax.app.validation.page import table
from mcjax.cost.measured import Line, read

Fresh = Callable[..., Answer]

SMALL = (
    "workload.turns=2",
    "workload.note_tokens=[0,0]",
    "workload.output_tokens=[12,16]",
    "workload.max_prompt_tokens=600",
    "backend.max_batch=2",
    "backend.max_context_tokens=640",
    "backend.pages=64",
    "backend.pool_blocks=128",
)


TWICE = """
import sys
from pathlib import Path
from mcjax.app import validate

def made():
    kept = [*Path("out").glob("calibrations/*"), *Path("out").glob("runs/*/*/DONE")]
    return {path: path.stat().st_mtime_ns for path in kept}

arguments = ["--quick", "--sessions", "2", "--output", "out", *sys.argv[1:]]
assert validate.command(arguments) == 0
before, result = made(), Path("out/validation.json").read_text()
assert len(before) == 2 + 4, before
assert validate.command(arguments) == 0
assert made() == before
assert Path("out/validation.json").read_text() == result
assert validate.command([*arguments, "backend.poison=true"]) == 2
"""


@pytest.mark.check_long
def test_a_quick_validation_twice_in_one_folder(fresh: Fresh, place: Path) -> None:
    answer = fresh(*SMALL, code=TWICE)
    assert answer.status == 0, answer.err
    assert "holds a validation of other settings" in answer.err
    out = place / "out"
    result = json.loads((out / "validation.json").read_text())
    assert [(row["load"], row["figure"]) for row in result["figures"]] == [("saturated", name) for name in FIGURES]
    for row in result["figures"]:
        assert min(row["real"], row["simulated"], row["own_costs"]) > 0
        assert row["within"] == (abs(row["error"]) <= 0.1 if row["figure"] in JUDGED else None)
    names = {regime["name"] for regime in result["steps"]}
    assert any(name.startswith("prefill chunk, ") for name in names)
    assert any(name.startswith("decode, batch 1, ") for name in names)
    assert (out / "validation.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "validation.md").read_text()
    assert "| saturated | TTFT p50 |" in page
    assert "| saturated | output tokens/s |" in page

    machine = read(str(out / "measured.json")).machine
    assert (machine.sizes.max_batch, machine.sizes.max_context_tokens, machine.sizes.pool_blocks) == (2, 640, 128)
    assert not machine.sizes.shares_decoded
    assert {row.kind for row in machine.steps} == {"prefill", "decode"}
    assert set(machine.slowdown) == set(machine.spread) == {"prefill", "decode"}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["backend=sim"], "a validation sets this itself"),
        (["workload.rate_per_s=3"], "a validation sets this itself"),
        (["--loads", "0.3,much"], "must be numbers between commas"),
        (["--loads", "0.3,-1"], "must be shares of the capacity"),
        (["--repeats", "0"], "must be at least 1"),
        (["workload=mooncake", "workload.path=x"], "has no rate_per_s, by which loads are set"),
        (["no.such=1"], "Could not override 'no.such'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    arguments: list[str], problem: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validate.command([*arguments, "--output", "out"]) == 2
    assert problem in capsys.readouterr().err
    assert not (place / "out").exists()


def test_figures_are_medians_over_repeats_with_their_span() -> None:
    def point(load: str, real: float, simulated: float) -> dict[str, object]:
        sides = {"real": real, "simulated": simulated, "own_costs": real}
        return {"load": load, **{side: dict.fromkeys(FIGURES, value) for side, value in sides.items()}}

    points = [point("0.3", 1.0, 1.2), point("0.3", 2.0, 2.1), point("0.3", 4.0, 2.5), point("0.6", 1.0, 1.0)]
    found = rows(points)
    assert found[0] == Row("0.3", "ttft_p50", 2.0, 1.0, 4.0, 2.1, 2.0)
    assert found[0].error == pytest.approx(0.05)
    assert (found[0].within, found[1].within) == (True, None)
    assert len(table(found)) == 1 + 2 * len(FIGURES)


def test_a_calibration_gives_medians_factors_and_lines() -> None:
    found = Found()
    found.prefill_alone[0, 16].extend([[1e6, 2e6, 9e6], [8e6], [2e6, 2e6]])
    found.prefill_beside[0, 16].extend([[3e6]])
    found.decode_alone[2, 100].extend([[1e6]])
    found.decode_beside[2, 100].extend([[0.5e6]])
    assert [(row.start_tokens, row.batch, row.context_tokens, row.seconds) for row in found.measurements()] == [
        (0, 0, 0, 0.002),
        (0, 2, 200, 0.001),
    ]
    assert found.slowdown() == {"prefill": {"decode": 1.5}, "decode": {"prefill": 1.0}}  # nobody is sped up
    spread = found.spread()["prefill"]  # the pass of 8 ms was slow as a whole
    assert (spread.fleeting[0], spread.fleeting[-1]) == (0.5, 4.5)
    assert (spread.lasting[0], spread.lasting[-1]) == (1.0, 4.0)
    assert 0.5 <= spread.least < 0.6
    assert Found.of_json(json.loads(json.dumps(found.as_json()))) == found
    assert found.merged(found).prefill_beside == {(0, 16): [[3e6], [3e6]]}
    assert line({1: [110.0], 2: [120.0, 900.0, 100.0], 4: [140.0]}) == Line(100, 10)
    assert line({1: [10.0], 2: [9.0]}) == Line(10, 0)
