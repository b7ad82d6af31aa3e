"""Pages that run out: decodes stand still, whoever came last makes room, and everybody still gets the right tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from engine_fixtures import MS, CheckBench, Rows, expected, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax import aio
from mcjax.backends.check.world import Sizes
from mcjax.engine.decoder import DecodeSettings, Preemption
from mcjax.engine.service import Service
from mcjax.errors import ConfigError
from mcjax.types import RequestState
from mcjax.workload.synthetic import Synthetic

SIZES = Sizes(pages=16, pool_blocks=64, max_batch=4, chunk_tokens=6)


def kinds(rows: Rows) -> Counter[str]:
    return Counter(event[1] for event in rows.events)


def serve(bench: CheckBench, prompts: list[int], outputs: list[int], gap_ms: float = 0.0) -> list[int]:
    """Send requests one after the other; returns their ids in order of completion."""
    ended: list[int] = []

    async def main(service: Service) -> None:
        tickets = []
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            request = bench.request(number, range(100 * number, 100 * number + prompt), output, max_tokens=30)
            ticket = service.frontend.submit(request)
            ticket.task.add_done_callback(lambda _, number=number: ended.append(number))
            tickets.append((request, output, ticket))
            await aio.sleep_ns(round(gap_ms * MS))
        for request, output, ticket in tickets:
            row = await ticket.task
            assert row.state is RequestState.COMPLETED, row.reason
            assert row.output == expected(request, output)

    bench.run(main)
    return ended


@pytest.mark.parametrize("cluster", ["1p1d", "1m"])
@pytest.mark.parametrize("headroom", [1, 5])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempted_outputs_are_right(cluster: str, headroom: int, preemption: Preemption) -> None:
    """Prompts that have nothing in common hit nothing, however often they are computed again."""
    bench = CheckBench(cluster, sizes=SIZES, headroom_tokens=headroom, preemption=preemption, attempts=1)
    serve(bench, [18, 17, 19, 15], [30, 28, 30, 26])
    seen = kinds(bench.rows)
    assert seen["preempt"] > 0
    assert seen["retry"] == 0
    assert (seen["recompute"] == seen["preempt"]) if preemption == "recompute" else seen["recompute"] == 0
    assert sum(row.attempts for row in bench.rows.requests) == 4 + seen["recompute"]
    assert [row.local_tokens + row.remote_tokens for row in bench.rows.requests] == [0] * 4


@pytest.mark.parametrize("cluster", ["1p1d", "1m"])
def test_who_is_computed_again_keeps_its_rank(cluster: str) -> None:
    """Who first came to decode last makes room first, however often it comes again: nobody is overtaken for ever."""
    bench = CheckBench(cluster, sizes=SIZES, headroom_tokens=1, preemption="recompute", attempts=1)
    serve(bench, [18, 17, 19, 15], [30, 30, 30, 30], gap_ms=8)
    first: dict[int, int] = {}
    for event in bench.rows.events:
        if event[1] == "preempt":
            first.setdefault(event[2], event[0])
    assert first
    assert 0 not in first


def test_a_way_to_make_room_that_there_is_not_is_named() -> None:
    with pytest.raises(ConfigError, match=r"engine\.preemption=drop: .*swap, recompute"):
        DecodeSettings(preemption="drop")  # pyright: ignore[reportArgumentType]


def test_who_came_first_is_never_preempted() -> None:
    bench = CheckBench("1p1d", sizes=SIZES, headroom_tokens=1)
    serve(bench, [18, 17, 19, 15], [30, 30, 30, 30], gap_ms=4)
    preempted = [event[2] for event in bench.rows.events if event[1] == "preempt"]
    assert preempted
    assert 0 not in preempted


def test_without_room_to_swap_the_prompt_is_computed_again_and_the_output_replayed() -> None:
    bench = CheckBench("1p1d", sizes=replace(SIZES, pool_blocks=8), headroom_tokens=1, attempts=1)
    serve(bench, [18, 17, 19], [30, 28, 30])
    seen = kinds(bench.rows)
    assert seen["preempt"] > 0
    assert seen["recompute"] > 0
    assert seen["retry"] == 0


def test_with_pages_for_the_whole_output_nobody_is_preempted() -> None:
    bench = CheckBench("1p1d", sizes=SIZES)
    serve(bench, [18, 17, 19, 15], [30, 28, 30, 26])
    assert kinds(bench.rows)["preempt"] == 0


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["1p1d", "1m", "2p1d"]),
    st.integers(16, 22),
    st.integers(1, 5),
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=2, max_size=6),
    st.sampled_from([0.0, 1.0, 6.0]),
)
def test_any_pressure(
    cluster: str, pages: int, batch: int, headroom: int, requests: list[tuple[int, int]], gap_ms: float
) -> None:
    sizes = Sizes(pages=pages, pool_blocks=40, max_batch=batch, chunk_tokens=7)
    bench = CheckBench(cluster, sizes=sizes, headroom_tokens=headroom, attempts=40)
    serve(bench, [prompt for prompt, _ in requests], [output for _, output in requests], gap_ms)


def pressed(
    seed: int, cluster: str, max_steps: int | None, pool_bytes: int | None, preemption: Preemption = "swap"
) -> Rows:
    """LLaMA3-70B on instances whose memory holds a few thousand tokens beside the weights."""
    workload = Synthetic(
        seed=seed,
        sessions=25,
        turns=(1, 2),
        first_prompt_tokens=(200, 2000),
        output_tokens=(1, 300),
        max_tokens=300,
        rate_per_s=20.0,
        think_time_s=0.2,
    )
    return simulate(
        workload,
        cluster,
        max_steps,
        1024,
        memory_share=0.231,
        headroom_tokens=8,
        pool_bytes=pool_bytes,
        preemption=preemption,
    )


@pytest.mark.parametrize("cluster", ["1p1d", "2p2d", "2m"])
@pytest.mark.parametrize("seed", [1, 3])
@pytest.mark.parametrize("pool_bytes", [None, 2_000_000_000])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_macro_steps_change_nothing_under_preemption(
    cluster: str, seed: int, pool_bytes: int | None, preemption: Preemption
) -> None:
    free, single = (pressed(seed, cluster, steps, pool_bytes, preemption) for steps in (None, 1))
    assert kinds(free)["preempt"] == kinds(single)["preempt"] > 0
    ends = [
        {
            row.request.request_id: np.concatenate(row.token_ends_ns).tolist()
            for row in rows.requests
            if row.token_ends_ns
        }
        for rows in (free, single)
    ]
    assert ends[0] == ends[1]
    assert free.decided() == single.decided()
