"""The real engine with blocks that rest encoded: everybody is served, and who wants exact blocks gets those."""

from __future__ import annotations

from pathlib import Path

import pytest

import mcjax
from mcjax.app.replay import replay

pytestmark = [pytest.mark.check_long, pytest.mark.timeout(600)]


def run(place: Path, *overrides: str) -> mcjax.Run:
    fixed = ["backend.poison=true", "workload.sessions=6", "workload.turns=3", "workload.rate_per_s=20"]
    where = ["workload.think_time_s=0.05", f"track.sinks.0.directory={place / 'runs'}"]
    done = mcjax.run([*fixed, *where, *overrides], progress=False)
    assert done.summary["requests"]["completed"] == 18
    assert done.summary["compilations_after_warm_up"] == 0, "encodings are compiled beforehand"
    return done


@pytest.mark.parametrize(("encoding", "cluster"), [("int8", "1p1d"), ("fp8", "2p1d"), ("int8", "1m")])
def test_host_memory_may_round_for_who_accepts_it_and_the_run_is_replayed(encoding, cluster, tmp_path):
    done = run(tmp_path, f"kvpool.dram_encoding={encoding}", f"cluster={cluster}", "workload.accepts_lossy=true")
    assert done.summary["hit_tokens"]["delivered"] > 0
    assert {one["encoding"] for one in done.summary["host_memory"].values()} == {encoding}
    result = replay(done)
    assert result.agrees, (result.differing_placements, [str(difference) for difference in result.differences])


def test_requests_that_want_exact_blocks_are_bit_for_bit_the_reference_beside_an_ssd_that_rounds(tmp_path):
    """`verify` compares tokens and blocks; host memory is too small, and the SSD may not help."""
    tiers = ["kvpool.ssd_encoding=int8", f"kvpool.ssd_path={tmp_path / 'ssd'}", "kvpool.ssd_bytes=6e7"]
    done = run(tmp_path, *tiers, "backend.pool_blocks=40", "cluster=1m", "verify=true")
    assert done.summary["verified"]["requests"] == 18
    assert done.summary["missed_tokens"]["lossy"] > 0
    assert done.summary["tokens_by_tier"]["ssd"] == 0


def test_where_pages_run_out_both_kinds_of_requests_come_to_their_end(tmp_path):
    """Rounded on their way out and back, or computed again."""
    tight = ["cluster=1m", "kvpool.dram_encoding=int8", "backend.pages=130", "engine.headroom_tokens=8"]
    for accepts in ("true", "false"):
        done = run(tmp_path, *tight, f"workload.accepts_lossy={accepts}")
        assert done.summary.get("verified") is None
        assert (done.summary["hit_tokens"]["delivered"] > 0) == (accepts == "true")
