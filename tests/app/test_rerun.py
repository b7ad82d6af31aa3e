"""`mcjax rerun`: a run comes out the same from what it kept, and what stands in the way is named."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest_app import BARE, SMALL, Answer, runs

import mcjax as package
from mcjax.app import rerun as module
from mcjax.app.rerun import rerun
from mcjax.errors import RunError
from mcjax.sched.base import PrefillChoice
from mcjax.track.run import Run
from mcjax.track.run import load as load_one

Command = Callable[..., Answer]
OWN = ("sched/prefill=custom", "sched.prefill._target_=my_policy.Mine", "+sched.prefill.alpha=2.5")


def play(*overrides: str, **strategies: Any) -> Run:
    return package.run([*SMALL, *overrides], progress=False, **strategies)


class Weighted:
    """A strategy with an array and a list among its parameters."""

    def __init__(self, weights: Any, seen: list[int] | None = None):
        self.weights, self.seen = weights, seen or []

    def choose(self, request: Any, view: Any, rng: np.random.Generator) -> PrefillChoice:
        self.seen.append(1)
        return PrefillChoice(int((view.queue_s * self.weights[: len(view.queue_s)]).argmin()))


def first(request: Any, view: Any, rng: np.random.Generator) -> PrefillChoice:
    return PrefillChoice(0)


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> Answer:
    capsys.readouterr()
    status = module.command(arguments)
    captured = capsys.readouterr()
    return Answer(status, captured.out, captured.err)


def test_a_run_agrees_with_its_repetition(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = play("sched/prefill=random", "seed=3")
    answer = command(capsys, run.record.run_key[:8])
    assert (answer.status, answer.err) == (0, "")
    assert answer.out.strip().endswith("agrees")
    assert run.summary["digest"][:12] in answer.out
    assert "changed since" not in answer.out
    _, again = [load_one(directory) for directory in runs(place)]
    assert again.record.run_key == run.record.run_key
    assert again.record.choices == run.record.choices
    assert {**again.config, "rerun": False, "track": None} == {**run.config, "track": None}


def test_its_own_code_is_used_and_not_what_lies_there_now(mcjax: Command, place: Path) -> None:
    assert mcjax(*SMALL, *OWN).status == 0
    run = load_one(runs(place)[0])
    text = (place / "my_policy.py").read_text()
    (place / "my_policy.py").write_text(text.replace(".argmin()", ".argmax()"))
    repeated = rerun(run)
    assert repeated.agrees
    assert repeated.changed == []
    assert mcjax(*SMALL, *OWN, "rerun=true").status == 0
    (place / "my_policy.py").unlink()
    assert rerun(run).agrees


def test_objects_from_python_are_made_again(place: Path) -> None:
    repeated = rerun(play(prefill=Weighted(np.array([1.0, 3.0]))))
    assert repeated.agrees
    assert repeated.changed == []
    assert rerun(play(prefill=first)).agrees


def test_an_object_that_cannot_be_made_again_is_asked_for(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = Weighted(np.ones(2))
    vars(own)["lock"] = threading.Lock()
    run = play(prefill=own)
    assert run.directory is not None
    with pytest.raises(RunError, match=r"mcjax.rerun\(run, prefill=Weighted\(\) \(lock: what a _thread.lock"):
        rerun(run)
    answer = command(capsys, str(run.directory))
    assert answer.status == 2
    assert "have to be given again" in answer.err


def test_what_is_given_is_used_and_a_difference_is_told(place: Path) -> None:
    run = play("cluster=3p1d", prefill=Weighted(np.array([1.0, 5.0, 9.0])))
    assert rerun(run, prefill=Weighted(np.array([1.0, 5.0, 9.0]))).agrees
    other = rerun(run, prefill=first)
    assert not other.agrees
    assert other.changed == ["prefill: the code or parameters of Weighted()"]
    assert "DIFFERS" in str(other)
    assert "row" in other.differences[0]


def test_an_input_that_changed_or_is_gone_is_named(
    trace: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for word in SMALL if not word.startswith("workload")]
    run = package.run([*words, "workload=mooncake", f"workload.path='{trace}'"], progress=False)
    assert rerun(run).agrees
    text = trace.read_text()
    trace.write_text(text.replace("1200", "1201"))
    changed = command(capsys, str(run.directory))
    assert changed.status == 2
    assert f"{trace} has changed" in changed.err
    trace.unlink()
    gone = command(capsys, str(run.directory))
    assert gone.status == 2
    assert f"{trace} is not there" in gone.err
    trace.write_text(text)
    assert command(capsys, str(run.directory)).status == 0


def test_a_digest_that_differs_is_told_with_the_first_row(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = play()
    assert run.directory is not None
    summary = json.loads((run.directory / "summary.json").read_text())
    (run.directory / "summary.json").write_text(json.dumps({**summary, "digest": "0" * 64}))
    answer = command(capsys, str(run.directory))
    assert answer.status == 1
    assert "DIFFERS" in answer.out
    assert "the tables were changed afterwards" in answer.out


def test_what_changed_since_is_said(place: Path) -> None:
    run = play()
    assert run.directory is not None
    environment = json.loads((run.directory / "environment.json").read_text())
    environment["packages"]["numpy"] = "0.1"
    (run.directory / "environment.json").write_text(json.dumps(environment))
    record = json.loads((run.directory / "run.json").read_text())
    (run.directory / "run.json").write_text(json.dumps({**record, "code": "0" * 64}))
    changed = rerun(load_one(run.directory)).changed
    assert len(changed) == 2
    assert changed[0].startswith("mcjax's code (000000000000, now ")
    assert changed[1].startswith("numpy 0.1, now ")


def test_what_did_not_end_or_was_kept_nowhere_is_refused(place: Path) -> None:
    run = play()
    assert run.directory is not None
    (run.directory / "DONE").rename(run.directory / "FAILED")
    with pytest.raises(RunError, match="did not end by itself"):
        rerun(load_one(run.directory))
    with pytest.raises(RunError, match="kept nowhere"):
        rerun(package.run([*BARE, "seed=2"], progress=False))


def test_a_secret_that_was_not_kept_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "least_loaded")
    run = play("question=least_loaded")
    assert run.directory is not None
    with pytest.raises(RunError, match="held a secret, which was not kept"):
        rerun(load_one(run.directory))


def test_the_kept_modules_do_not_stay(place: Path) -> None:
    import sys

    run = play(prefill=first)
    before = dict(sys.modules)
    path = list(sys.path)
    rerun(run)
    assert sys.path == path
    assert sys.modules.get(__name__) is before[__name__]


@pytest.mark.check_long
def test_a_real_run_is_compared_token_by_token(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["workload.sessions=3", "workload.rate_per_s=50", "verify=false", "track.sinks.0.overview=false"]
    run = package.run(words, progress=False)
    answer = command(capsys, str(run.directory))
    assert answer.status == 0, answer.err
    assert "real times differ by nature; every output token (" in answer.out


def test_the_first_token_that_differs(place: Path) -> None:
    import pyarrow as pa

    run = play()
    rows = [
        {"request_id": index, "state": "completed", "output": [1, 2, 3], "output_tokens": 3, "n": 0}
        for index in range(3)
    ]
    other = [dict(row) for row in rows]
    other[1]["output"] = [1, 5, 3]
    other[2]["state"] = "failed"
    schema = run.requests.select(["request_id", "state", "output", "output_tokens"]).schema

    def with_rows(these: list[dict[str, Any]]) -> Run:
        table = pa.Table.from_pylist(these, schema=schema)
        return Run(run.directory, {}, {}, {"requests": table})

    counted, differences = module._outputs(with_rows(rows), with_rows(other))
    assert counted == "9 of 3 requests"
    assert differences == ["  request 1, token 1: 2, now 5", "  request 2: completed, now failed"]
    assert module._outputs(with_rows(rows), with_rows(rows))[1] == []
    rows[0]["output"] = []
    with pytest.raises(RunError, match="tokens were not kept"):
        module._outputs(with_rows(rows), with_rows(rows))
