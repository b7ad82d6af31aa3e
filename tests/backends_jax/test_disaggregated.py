"""Real prefill and decode instances give, bit for bit, what one colocated engine gives: tokens and KV bytes.

`verify=true` compares; `backend.poison=true` overwrites pages and slots with NaN as soon as they are released, so that
a transfer that was only an alias, or a page read after its release, cannot go unnoticed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mcjax
from mcjax.app import verify
from mcjax.app.runner import Result
from mcjax.errors import VerificationError
from mcjax.sched.base import PrefillChoice
from mcjax.sched.view import ClusterView
from mcjax.types import Request

CHANGES = "cluster_changes=[{at_s: 0.3, join: decode}, {at_s: 0.9, drain: d0}]"


class PullAlways:
    """Instances in turn, each with the longest prefix that anybody has."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: Request, view: ClusterView, rng: np.random.Generator) -> PrefillChoice:
        self._turn += 1
        here, holder = self._turn % len(view.names), int(view.prefix_tokens.argmax())
        longest = int(view.prefix_tokens[holder])
        pull = longest > view.prefix_tokens[here]
        return PrefillChoice(here, source=holder if pull else None, reused_tokens=longest)


def run(runs: Path, *overrides: str, **strategies: Any) -> mcjax.Run:
    fixed = ["verify=true", "backend.poison=true", "workload.think_time_s=0.05", f"track.sinks.0.directory={runs}"]
    return mcjax.run([*fixed, *overrides], progress=False, **strategies)


def test_disaggregated_equals_colocated_while_decode_instances_come_and_go(tmp_path: Path) -> None:
    done = run(tmp_path, "workload.sessions=6", "workload.turns=3", "workload.rate_per_s=20", CHANGES)
    check(done, 18)
    decoded_by = set(done.requests.column("decode_instance").to_pylist())
    assert len(decoded_by) == 2
    kinds = done.events.column("kind").to_pylist()
    assert kinds.count("join") == 3
    assert kinds.count("leave") == 1


def test_prefixes_pulled_between_prefill_instances_are_equal_too(tmp_path: Path) -> None:
    overrides = ["cluster=2p1d", "workload.sessions=6", "workload.turns=2", "workload.rate_per_s=50"]
    done = run(tmp_path, *overrides, prefill=PullAlways())
    check(done, 12)
    assert done.summary["tokens_by_tier"]["dram_remote"] > 0


@pytest.mark.check_long
@pytest.mark.timeout(900)
def test_three_hundred_requests(tmp_path: Path) -> None:
    changes = "cluster_changes=[{at_s: 2, join: decode}, {at_s: 8, drain: d0}]"
    done = run(tmp_path, "workload.sessions=75", "workload.rate_per_s=20", changes)
    check(done, 300)


def check(done: mcjax.Run, requests: int) -> None:
    assert done.state == "done"
    assert done.summary["requests"]["completed"] == requests
    verified = done.summary["verified"]
    assert verified["requests"] == requests
    assert verified["tokens"] >= 64 * requests
    assert verified["kv_blocks"] > requests


def test_a_wrong_token_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = verify.compare

    def tampered(ours: Result, theirs: Result) -> verify.Verified:
        output = ours.rows[3].output
        assert output is not None
        output[10] ^= 1
        return compare(ours, theirs)

    monkeypatch.setattr(verify, "compare", tampered)
    with pytest.raises(VerificationError, match="output token 10"):
        run(tmp_path, "workload.sessions=2", "workload.turns=2")
    (directory,) = tmp_path.iterdir()
    assert (directory / "FAILED").read_text().startswith("verification")
