"""A2, A3, and Fig 9 with all policies: blocks through the real pool. All points with `-m check_long`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mcjax
from mcjax.app.figures import hit_rate, published
from mcjax.app.figures.hit_rate import TRACE_BLOCK_TOKENS
from mcjax.app.hit_rates.replay import chains_of
from mcjax.errors import ConfigError
from mcjax.track.run import Run
from mcjax.workload.mooncake_file import Rows

SYNTHETIC_POINTS = 1.1
"""Percentage points that a value of the synthetic trace may be off."""


def rows_of(*prompts: tuple[list[int], int]) -> Rows:
    rows = Rows()
    for ids, tokens in prompts:
        rows.timestamp_ns.append(0)
        rows.input_tokens.append(tokens)
        rows.output_tokens.append(1)
        rows.lines.append(len(rows))
        rows.ids.extend(ids)
        rows.offsets.append(len(rows.ids))
    return rows


def test_hits_are_weighted_by_tokens_and_lru_evicts() -> None:
    again = rows_of(([0, 1], 800), ([0, 1], 800), ([0, 2], 1024))
    assert hit_rate.hit_rate(again, 10_000) == (800 + 512) / 2624
    assert hit_rate.hit_rate(again, 10_000, block_tokens=512) == (800 + 512) / 2624
    # Room for one prompt: the second one's 7 takes the place of the 1, then of everything else the 0 stays longest.
    crowded = rows_of(([0, 1], 1024), ([7, 8], 1024), ([0, 1], 1024))
    assert hit_rate.hit_rate(crowded, 1024) == 0.0
    assert hit_rate.hit_rate(crowded, 2048) == 1024 / 3072


@given(st.integers(1, 5 * TRACE_BLOCK_TOKENS), st.sampled_from([1, 2, 4, 8, 512]), st.integers(0, 5), st.booleans())
def test_blocks_cover_the_prompt_and_keep_prefixes(tokens: int, parts: int, common: int, partial: bool) -> None:
    ids = list(range(-(-tokens // TRACE_BLOCK_TOKENS)))
    common = min(common, len(ids))
    size = TRACE_BLOCK_TOKENS // parts
    rows = rows_of((ids, tokens), ([*ids[:common], *(100 + entry for entry in ids[common:])], tokens))
    blocks, other = chains_of(rows, TRACE_BLOCK_TOKENS, size, partial).blocks
    assert 0 <= (len(blocks) * size - tokens if partial else tokens - len(blocks) * size) < size
    assert len(set(blocks)) == len(blocks)
    same = sum(a == b for a, b in zip(blocks, other, strict=True))
    assert blocks[:same] == other[:same]
    assert same == min(common * parts, len(blocks))


def test_blocks_must_divide_the_ids() -> None:
    with pytest.raises(ConfigError, match=r"kvpool.block_tokens=300: must divide the 512 tokens"):
        chains_of(rows_of(([0], 100)), TRACE_BLOCK_TOKENS, 300)


def test_a2_endless_pool(trace_rows) -> None:
    """The conversation trace is 2.9 points low: 512-token ids, see `hit_rate.WHY`."""
    assert abs(hit_rate.endless_row("synthetic", trace_rows["synthetic"]).difference) < SYNTHETIC_POINTS
    assert hit_rate.endless_row("conversation", trace_rows["conversation"]).difference == pytest.approx(-2.9, abs=0.2)


def test_a3_synthetic_at_three_capacities(trace_rows) -> None:
    for row in hit_rate.capacity_rows("synthetic", trace_rows["synthetic"], (10**6, 4 * 10**6, 10**7)):
        assert abs(row.difference) < SYNTHETIC_POINTS, row


def test_a3_conversation_at_one_capacity(trace_rows) -> None:
    rows = hit_rate.capacity_rows("conversation", trace_rows["conversation"], (8 * 10**6,))
    assert all(-4.0 < row.difference < -2.9 for row in rows), rows


@pytest.mark.check_long
def test_a3_synthetic_at_every_capacity(trace_rows) -> None:
    rows = hit_rate.capacity_rows("synthetic", trace_rows["synthetic"])
    assert len(rows) == len(published.CAPACITIES)
    assert all(abs(row.difference) < SYNTHETIC_POINTS for row in rows), rows


@pytest.mark.check_long
def test_a3_conversation_at_every_capacity(trace_rows) -> None:
    """Within 4 points; from 1 M tokens on the difference lies between -3.8 and -2.8 points."""
    rows = hit_rate.capacity_rows("conversation", trace_rows["conversation"])
    assert all(abs(row.difference) < 4.0 for row in rows), rows
    from_a_million = [row.difference for row in rows[2:]]
    assert max(from_a_million) - min(from_a_million) < 1.0, from_a_million
    assert -3.8 < min(from_a_million) <= max(from_a_million) < -2.8, from_a_million


@pytest.mark.check_long
def test_a3_whole_ids_miss_two_synthetic_points(trace_rows) -> None:
    """Why the ids are cut: a partial last block of 512 takes a whole slot, and the curve comes out too low."""
    rows = trace_rows["synthetic"]
    for capacity, bound in ((8 * 10**6, 1.13), (10**7, 1.31)):
        rate = published.LRU_HIT_RATES["synthetic"][published.CAPACITIES.index(capacity)]
        assert 100 * (rate - hit_rate.hit_rate(rows, capacity, 512)) == pytest.approx(bound, abs=0.02)


TABLE_1_BLOCKS = (10_000, 30_000, 50_000)
"""Capacities of Table 1 of the technical report (arXiv 2407.00079v3), in blocks of 512 tokens."""


@pytest.fixture(scope="module")
def fig9(trace_paths, tmp_path_factory) -> Run:
    """`experiment=fig9_hit_rate`, at the capacities of Table 1 too."""
    capacities = sorted({*published.CAPACITIES, *(blocks * 512 for blocks in TABLE_1_BLOCKS)})
    return mcjax.run(
        [
            "experiment=fig9_hit_rate",
            *(f"backend.traces.{name}.path={path}" for name, path in trace_paths.items()),
            f"backend.capacities_tokens={capacities}",
            f"track.sinks.0.directory={tmp_path_factory.mktemp('fig9')}",
        ],
        progress=False,
    )


def rates(run: Run, trace: str, column: str = "hit_rate") -> dict[str, dict[int, float]]:
    """By policy and capacity in tokens."""
    found: dict[str, dict[int, float]] = {}
    for row in run.summary["hits"]["rows"]:
        if row["trace"] == trace:
            found.setdefault(row["policy"], {})[row["capacity_tokens"]] = row[column]
    return found


@pytest.mark.check_long
@pytest.mark.timeout(600)
def test_fig9_lru_of_full_blocks(fig9) -> None:
    """Synthetic within 1.1 points everywhere. Conversation within 4, and from 1 M tokens on nearly constantly off."""
    for name in published.TRACES:
        lru = rates(fig9, name)["lru"]
        off = [
            100 * (lru[capacity] - rate)
            for capacity, rate in zip(published.CAPACITIES, published.LRU_HIT_RATES[name], strict=True)
        ]
        assert max(map(abs, off)) < (SYNTHETIC_POINTS if name == "synthetic" else 4.0), off
        if name == "conversation":
            assert max(off[2:]) - min(off[2:]) < 0.5, off


@pytest.mark.check_long
@pytest.mark.timeout(600)
def test_table_1_order_of_policies(fig9) -> None:
    """LRU >= LFU >= LengthAware, as the report prints. On the synthetic trace, which the report did not have, LFU is
    ahead of LRU by a hair at 30k blocks, where the pool holds three quarters of all there is."""
    for name in published.TRACES:
        found = rates(fig9, name)
        for blocks in TABLE_1_BLOCKS:
            lru, lfu, length_aware = (found[policy][blocks * 512] for policy in ("lru", "lfu", "length_aware"))
            slack = 0.002 if (name, blocks) == ("synthetic", 30_000) else 0.0
            assert lru + slack >= lfu >= length_aware, (name, blocks, lru, lfu, length_aware)


@pytest.mark.check_long
@pytest.mark.timeout(600)
def test_no_policy_finds_more_blocks_than_belady(fig9) -> None:
    for name in published.TRACES:
        found = rates(fig9, name, "block_hit_rate")
        assert len(found) == 8
        for capacity, bound in found["belady"].items():
            assert max(policy[capacity] for policy in found.values()) == bound
