"""Statistics of a workload: the published facts of the public traces, and reuse against a cache that is played out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.cost.catalogue import fitted
from mcjax.types import NS_PER_S, Request, Script
from mcjax.workload.analysis import describe, lru_hit, play, report, reuse
from mcjax.workload.azure import Azure
from mcjax.workload.base import Turn
from mcjax.workload.mooncake import Mooncake
from mcjax.workload.readable import shown
from mcjax.workload.replay import OneTurn
from mcjax.workload.synthetic import Synthetic


class Chains:
    """Prompts as chains of ids, `[(tenant, ids)]`, one a second, of full blocks of four tokens."""

    name = "chains"
    block_tokens: int | None = 4

    def __init__(self, prompts: list[tuple[str, tuple[int, ...]]], last_tokens: int = 4):
        self._prompts = prompts
        self._last = last_tokens

    def sessions(self) -> Iterator[OneTurn]:
        for index, (tenant, ids) in enumerate(self._prompts):
            length = 4 * (len(ids) - 1) + self._last
            request = Request(index, index * NS_PER_S, length, 9, trace_ids=ids, trace_block_tokens=4, tenant=tenant)
            yield OneTurn(Turn(request, Script(1)))

    def inputs(self) -> dict[str, str]:
        return {}


@pytest.mark.parametrize(
    ("name", "requests", "mean_input", "mean_output", "load"),
    [("conversation", 12_031, 12_035, 343, 5.66), ("synthetic", 3_993, 15_325, 149, 8.47)],
)
def test_a1_trace_statistics_and_offered_load(
    traces: Callable[[str], Path], name: str, requests: int, mean_input: int, mean_output: int, load: float
) -> None:
    """A1: FAST'25 Table 2. The load is the notes' own figure, with the prefill time fitted to FAST'25 Fig 14."""
    facts = describe(Mooncake(str(traces(f"mooncake_fast25_{name}.jsonl"))), fitted())
    assert facts["requests"] == requests
    assert round(facts["input_tokens"]["mean"]) == mean_input
    assert round(facts["output_tokens"]["mean"]) == mean_output
    assert facts["offered_load"] == pytest.approx(load, rel=0.02)
    assert facts["offered_load_with_infinite_cache"] < facts["offered_load"]


@pytest.mark.parametrize(
    ("name", "cv", "p99", "references", "unique", "once", "block", "token", "gaps"),
    [
        ("conversation", 3.03, 85_400, 288_500, 182_790, 138_646, 0.3664, 0.3736, (114, 519, 1578)),
        ("synthetic", 1.01, 66_456, 121_877, 43_924, 25_673, 0.6396, 0.6512, (59, 282, 583)),
    ],
)
def test_facts_of_the_public_traces(
    traces: Callable[[str], Path],
    name: str,
    cv: float,
    p99: int,
    references: int,
    unique: int,
    once: int,
    block: float,
    token: float,
    gaps: tuple[int, int, int],
) -> None:
    facts = describe(Mooncake(str(traces(f"mooncake_fast25_{name}.jsonl"))))
    found = facts["reuse_with_partial"]
    assert round(facts["arrival_cv"], 2) == cv
    assert round(facts["input_tokens"]["p99"]) == p99
    assert (found["block_references"], found["unique_blocks"]) == (references, unique)
    assert found["blocks_referenced_once"] == once
    assert (round(found["block_hit"], 4), round(found["token_hit"], 4)) == (block, token)
    assert tuple(round(found["gap_s"][key]) for key in ("p50", "p90", "p99")) == gaps
    assert "offered_load" not in facts


@pytest.mark.parametrize(("name", "cv"), [("code", 13.15), ("conv", 1.09)])
def test_azure_has_no_reuse(traces: Callable[[str], Path], name: str, cv: float) -> None:
    facts = describe(Azure(str(traces(f"azure_llm_2023_{name}.csv"))))
    assert facts["reuse"]["block_hit"] == facts["reuse_with_partial"]["token_hit"] == 0
    assert round(facts["arrival_cv"], 2) == cv


def played_out(prompts: list[tuple[str, tuple[int, ...]]], capacity: int) -> int:
    """Hits of an LRU cache of single blocks."""
    cache: OrderedDict[tuple[str, int], None] = OrderedDict()
    hits = 0
    for tenant, ids in prompts:
        for block in ids:
            hits += (tenant, block) in cache
            cache[tenant, block] = None
            cache.move_to_end((tenant, block))
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits


CHAINS = st.lists(
    st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 12), min_size=1, max_size=8, unique=True).map(tuple)),
    min_size=1,
    max_size=20,
)


@given(CHAINS, st.integers(1, 20))
@settings(max_examples=150)
def test_reuse_distance_is_that_of_an_lru_cache(prompts: list[tuple[str, tuple[int, ...]]], capacity: int) -> None:
    found = reuse(play(Chains(prompts)))
    total = sum(len(ids) for _, ids in prompts)
    assert lru_hit(found, capacity) == played_out(prompts, capacity) / total
    assert found.block_hit == found.token_hit == played_out(prompts, 10**6) / total
    assert found.unique == len({(tenant, block) for tenant, ids in prompts for block in ids})


def test_partial_blocks_are_private_unless_counted() -> None:
    played = play(Chains([("a", (0, 1)), ("a", (0, 1))], last_tokens=2))
    private, counted = reuse(played), reuse(played, count_partial=True)
    assert (private.references, private.block_hit, private.token_hit) == (2, 0.5, 4 / 12)
    assert (counted.references, counted.block_hit, counted.token_hit) == (4, 0.5, 6 / 12)
    assert counted.gap_s.tolist() == [1.0, 1.0]


def test_prompts_of_tokens_share_what_their_conversation_shares() -> None:
    workload = Synthetic(2, sessions=10, turns=3, tenants={"a": {"system_prompt_tokens": 64}}, block_tokens=16)
    found = reuse(play(workload))
    lengths = [[], [], []]
    for session in workload.sessions():
        for turn in range(3):
            sent = session.next_turn(None)
            assert sent is not None
            lengths[turn].append(sent.request.prompt_tokens // 16)
    assert found.references == sum(map(sum, lengths))
    # A later turn finds all of the last prompt's full blocks, a first turn the system prompt's four.
    assert found.unique <= sum(lengths[2]) - 9 * 4
    assert found.unique >= sum(lengths[2]) - 9 * 4 - 10


def test_later_turns_arrive_a_think_time_after_the_one_before() -> None:
    facts = describe(Synthetic(2, sessions=1, turns=3, think_time_s=100), fitted())
    assert facts["sessions"] == 1
    assert facts["requests"] == 3
    assert facts["duration_s"] > 10
    assert facts["block_tokens"] == 32
    assert describe(Synthetic(2), block_tokens=8)["block_tokens"] == 8


def test_a_single_request_has_no_rate() -> None:
    facts = describe(Chains([("a", (0,))]), fitted())
    assert np.isnan(facts["offered_load"])
    assert np.isnan(facts["arrival_cv"])
    assert facts["reuse"]["gap_s"] == {}


@pytest.mark.parametrize("prompts", [[("a", (0,))], [("a", (0, 1)), ("a", (0, 2)), ("b", (0,))]])
def test_report_is_rows_and_a_figure(tmp_path: Path, prompts: list[tuple[str, tuple[int, ...]]]) -> None:
    rows, figure = report(Chains(prompts), fitted())
    assert dict(rows)["requests"] == str(len(prompts))
    assert all(isinstance(cell, str) for row in rows for cell in row)
    assert len({row[0] for row in rows}) == len(rows)
    assert not any("_" in cell for row in rows for cell in row), "words, not names of fields"
    figure.savefig(tmp_path / "w.png")
    assert (tmp_path / "w.png").stat().st_size > 10_000


def test_a_readable_row_has_its_unit() -> None:
    rows = dict(report(Chains([("a", (0, 1)), ("a", (0, 2)), ("b", (0,))]), fitted())[0])
    assert rows["block size"] == "4 tokens"
    assert rows["full blocks in prompts"] == "5 (4 different)"
    assert rows["an infinite cache has"].startswith("20.0 % of them and ")
    assert rows["different blocks in between"] == "mean 1, p50 1, p90 1, p99 1, max 1 blocks"
    assert rows["from first to last arrival"] == "2 s"
    assert shown(float("nan")) == "unknown"
