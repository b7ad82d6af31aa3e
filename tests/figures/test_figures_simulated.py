"""A8 to A12: the traces through the simulated cluster, prompts only. Minutes of CPU, so with `-m check_long`."""

from __future__ import annotations

import pytest

from mcjax.app.compose import compose
from mcjax.app.figures import analytic, published, simulated
from mcjax.app.run import run


def rows_by_name(rows):
    return {row.what: row for row in rows}


def test_the_experiment_computes_prompts_only(trace_paths) -> None:
    overrides = [
        "experiment=fast25_prefill_only",
        f"workload.path='{trace_paths['conversation']}'",
        "workload.limit=40",
    ]
    done = run([*overrides, "cluster=2p1d", "track=none"], progress=False)
    requests = done.requests.to_pandas()
    assert done.summary["requests"]["completed"] == 40
    assert done.summary["decode_busy_s"] == 0
    assert (requests.output_tokens == 1).all()
    assert (requests.first_token_ns <= requests.finish_ns).all()
    # The GPU time that A8 to A10 compare is the cost model's, of exactly what was not found in a pool.
    found = requests.local_tokens + requests.remote_tokens
    cost = analytic.fitted()
    expected = sum(cost.prefill_ns(int(h), int(n - h)) for h, n in zip(found, requests.prompt_tokens, strict=True))
    assert done.summary["prefill_busy_s"] == pytest.approx(expected / 1e9, abs=1e-6)
    assert found.sum() > 0


def test_the_experiments_have_16_nodes() -> None:
    assert compose(["experiment=fast25_prefill_only"]).cluster == simulated.split(10) == "10p6d"
    figure5 = compose(["experiment=fast25_figure5"])
    assert figure5.cluster == simulated.split(7) == "7p9d"
    assert figure5.workload.max_tokens == 1


@pytest.mark.check_long
@pytest.mark.timeout(600)
def test_a8_a9_a11_global_pool(runs) -> None:
    """A9 against Fig 8 is 5.4 % high, more than the 5 % aimed at.

    Fig 8 and Fig 10 differ by 7 % for the same trace and system, ours lies between them, and the no-cache value is
    7 % above Fig 8 too: the curve A6 on the published lengths, no policy in it. What a policy contributes, the ratio
    of the two, agrees with the printed 2.76 (next test).
    """
    rows = rows_by_name(simulated.global_pool_rows(runs))
    assert abs(rows["conversation: prefill, global pool (Fig 8), P = 8"].error) < 0.03
    assert abs(rows["conversation: prefill, global pool (Fig 10), P = 10"].error) < 0.03
    assert rows["synthetic: prefill, global pool (Fig 8), P = 8"].error == pytest.approx(0.054, abs=0.005)
    assert abs(rows["synthetic: prefill, global pool (Fig 10), P = 10"].error) < 0.03
    assert abs(rows["conversation: hit rate, P = 10"].difference) < 2.5
    assert abs(rows["synthetic: hit rate, P = 10"].difference) < 2.5


@pytest.mark.check_long
@pytest.mark.timeout(600)
def test_a8_a9_saving(runs, trace_rows) -> None:
    for name in published.TRACES:
        no_cache_s = analytic.no_cache_row(name, trace_rows[name]).ours
        assert abs(simulated.saving_row(runs, name, no_cache_s).error) < 0.03


@pytest.mark.check_long
@pytest.mark.timeout(600)
def test_a10_local_caches(runs) -> None:
    assert abs(simulated.local_cache_row(runs).error) < 0.03


@pytest.mark.check_long
@pytest.mark.timeout(600)
def test_a12_ttft_by_policy(runs) -> None:
    """The order exactly, the ratios within 12 %.

    The absolute value is less than half the published one, whose split of 16 nodes is not stated. A plain replay (one
    queue a node, no contention, blocks there at once) gives 1.34 s where the simulator has 1.40 s: transfers that
    contend, and loading prefixes, take the rest.
    """
    *ratios, base = simulated.ttft_rows(runs)
    assert [row.ours for row in ratios] == sorted(row.ours for row in ratios)
    assert ratios[0].ours > 1
    assert max(abs(row.error) for row in ratios) < 0.12, ratios
    assert base.ours == pytest.approx(1.40, abs=0.03)
