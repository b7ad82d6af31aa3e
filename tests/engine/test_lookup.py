"""Where prompt tokens came from, and why the others had to be computed: each token once, each request once."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
from engine_fixtures import MS, CheckBench, Rows, simulate
from hypothesis import given
from hypothesis import strategies as st

from mcjax import aio
from mcjax.backends.check.world import Sizes
from mcjax.engine.lookup import Lookup
from mcjax.engine.service import Service
from mcjax.kvpool.gone import Gone
from mcjax.sched.job import Job, Placement
from mcjax.sched.output import Output
from mcjax.types import SLO, Decision, Miss, Request, RequestRow, RequestState
from mcjax.workload.synthetic import Synthetic

SIZE = 4


def job(prompt_tokens: int) -> Job:
    request = Request(1, 0, prompt_tokens, 8)
    blocks = tuple(range(prompt_tokens // SIZE))
    bound = SLO(float("inf"), float("inf"))
    return Job(request, blocks, bound, RequestRow(request, blocks), [cast("Output", object())])


def placement(reused_tokens: int, available_tokens: int) -> Placement:
    decision = Decision(0, 1, "prefill", "", "p0")
    return Placement("p0", "d0", None, reused_tokens, available_tokens, "d0", 0.0, 0.0, decision)


def missed(row: RequestRow) -> dict[Miss, int]:
    return dict(row.missed_tokens or {})


def gone(blocks: dict[int, Miss]) -> Gone:
    memory = Gone()
    memory.widen(100)
    for block, cause in blocks.items():
        memory.note([block], cause)
    return memory


counts = st.integers(0, 4)


@given(counts, counts, counts, counts, st.integers(0, 20), st.integers(0, 20), st.integers(1, 83), st.data())
def test_every_token_is_a_hit_or_a_miss(
    hbm: int, local: int, ssd: int, remote: int, routed: int, available: int, prompt_tokens: int, data: st.DataObject
) -> None:
    made = job(prompt_tokens)
    full = len(made.blocks)
    tiers = [min(tier, full // 4) for tier in (hbm, local, ssd, remote)]
    expected = placement(min(routed, full) * SIZE, min(available, full) * SIZE)
    lookup = Lookup(made, expected, SIZE, tiers[0], tiers[1], tiers[2], tiers[3])
    for reason in data.draw(st.lists(st.sampled_from(["failed", "lossy", "skipped"]), max_size=3)):
        upto = data.draw(st.integers(0, 25))
        if reason == "skipped":
            lookup.skipped(upto, "no room")
        else:
            getattr(lookup, reason)(upto)
    lost = data.draw(st.dictionaries(st.integers(0, 20), st.sampled_from([Miss.EVICTED, Miss.FAULT])))
    lookup.note(gone(lost))
    row = made.row
    found = [row.hbm_tokens, row.local_tokens, row.ssd_tokens, row.remote_tokens]
    assert found == [tier * SIZE for tier in tiers]
    assert row.hit_tokens == sum(found)
    assert row.hit_tokens + sum(missed(row).values()) == prompt_tokens
    assert all(tokens > 0 for tokens in missed(row).values())
    assert row.available_tokens is not None
    assert row.routed_tokens is not None
    assert row.hit_tokens <= row.available_tokens <= prompt_tokens
    assert row.routed_tokens <= row.available_tokens


def test_causes_follow_one_another() -> None:
    """Ten blocks: two found, one lost by a failed pull, one skipped, one evicted that the placement expected, one that
    it expected and that is not there yet, two elsewhere, one evicted everywhere, one new; and a tail."""
    made = job(10 * SIZE + 3)
    lookup = Lookup(made, placement(6 * SIZE, 8 * SIZE), SIZE, local=2)
    lookup.failed(3)
    lookup.skipped(4, "no room")
    lookup.skipped(4, "recompute")
    lookup.note(gone({4: Miss.EVICTED, 8: Miss.EVICTED}))
    assert missed(made.row) == {
        Miss.FAULT: SIZE,
        Miss.SKIPPED: SIZE,
        Miss.EVICTED: 2 * SIZE,
        Miss.PENDING: SIZE,
        Miss.ELSEWHERE: 2 * SIZE,
        Miss.UNSEEN: SIZE + 3,
    }
    assert (made.row.available_tokens, made.row.routed_tokens, made.row.hit_tokens) == (32, 24, 8)
    assert made.row.skip_reason == "no room"


def test_a_failure_that_another_source_made_good_is_no_miss() -> None:
    made = job(8)
    lookup = Lookup(made, placement(8, 8), SIZE)
    lookup.failed(2)
    lookup.remote = 2
    lookup.note(gone({}))
    assert missed(made.row) == {}
    assert made.row.remote_tokens == 8


def test_a_second_search_changes_nothing() -> None:
    made = job(8)
    Lookup(made, placement(0, 0), SIZE).note(gone({}))
    Lookup(made, placement(8, 8), SIZE, local=2).note(gone({}))
    assert made.row.hit_tokens == 0
    assert missed(made.row) == {Miss.UNSEEN: 8}


def test_a_partial_last_block_of_a_trace_counts_its_tokens() -> None:
    request = Request(1, 0, 6, 8)
    blocks = (0, 1)
    row = RequestRow(request, blocks)
    made = Job(request, blocks, SLO(1.0, 1.0), row, [cast("Output", object())])
    Lookup(made, placement(8, 8), SIZE, local=2).note(gone({}))
    assert (row.local_tokens, row.routed_tokens, row.available_tokens) == (6, 6, 6)
    assert missed(row) == {}


# In a cluster


def test_what_was_evicted_is_told_from_what_was_never_there() -> None:
    """A small pool: the second prompt drives the first out; a third one asks for it again, and for something new."""
    bench = CheckBench("1m", sizes=Sizes(pool_blocks=8, chunk_tokens=6, max_batch=4))
    first, second = list(range(24)), list(range(100, 124))

    async def main(service: Service) -> None:
        for number, prompt in enumerate((first, second, [*first, *range(200, 208)]), 1):
            row = await service.frontend.submit(bench.request(number, prompt, 4)).task
            assert row.state is RequestState.COMPLETED
            await aio.sleep_ns(50 * MS)

    bench.run(main)
    rows = bench.rows.requests
    assert missed(rows[0]) == {Miss.UNSEEN: 24}
    assert missed(rows[1]) == {Miss.UNSEEN: 24}
    third = rows[2]
    assert missed(third)[Miss.EVICTED] > 0
    assert missed(third)[Miss.UNSEEN] == 8
    assert third.hit_tokens + sum(missed(third).values()) == 32


def test_what_died_with_its_nodes_is_a_fault() -> None:
    """Two nodes have the prompt; when both are gone, so is it, and not because somebody made room."""
    bench = CheckBench("2p2d")
    prompt = list(range(24))

    async def main(service: Service) -> None:
        row = await service.frontend.submit(bench.request(1, prompt, 4)).task
        for instance in (row.prefill_instance, row.decode_instance):
            service.cluster.kill(instance)
        await aio.sleep_ns(100 * MS)
        await service.frontend.submit(bench.request(2, prompt, 4)).task

    bench.run(main)
    again = bench.rows.requests[1]
    assert again.hit_tokens == 0
    assert missed(again) == {Miss.FAULT: 24}


def totals(rows: Rows) -> dict[Miss, int]:
    return {cause: sum((row.missed_tokens or {}).get(cause, 0) for row in rows.requests) for cause in Miss}


@pytest.mark.parametrize("cluster", ["2p1d", "2m"])
def test_small_pools_in_a_busy_cluster_add_up(cluster: str) -> None:
    rows = simulate(Synthetic(sessions=30, turns=(2, 5), rate_per_s=20.0, seed=3), cluster, pool_bytes=int(1.5e9))
    for row in rows.requests:
        assert row.state is RequestState.COMPLETED
        assert row.hit_tokens + sum(missed(row).values()) == row.request.prompt_tokens
    found = totals(rows)
    assert found[Miss.EVICTED] > 0
    assert found[Miss.UNSEEN] > 0
    assert np.sum([row.hit_tokens for row in rows.requests]) > 0


def test_random_prompts_hit_nothing_under_preemption_and_each_counts_once() -> None:
    """Requests that were computed again count as they were when they first came (field failures 7 and 8)."""
    bench = CheckBench(
        "1m",
        sizes=Sizes(pages=16, pool_blocks=64, max_batch=4, chunk_tokens=6),
        headroom_tokens=1,
        preemption="recompute",
    )

    async def main(service: Service) -> None:
        tickets = [
            service.frontend.submit(bench.request(number, range(100 * number, 100 * number + 18), 30, max_tokens=30))
            for number in range(4)
        ]
        for ticket in tickets:
            assert (await ticket.task).state is RequestState.COMPLETED

    bench.run(main)
    assert max(row.attempts for row in bench.rows.requests) > 1
    for row in bench.rows.requests:
        assert missed(row) == {Miss.UNSEEN: 18}
