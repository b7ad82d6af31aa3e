"""Figures computed again from requests: counted once they are the summary's, and drawn they are those of the draw."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compare_fixtures import served, waits_ms

from mcjax.track.compare.blocks import FEWEST, MOST, Blocks, blocks_of, same_traffic
from mcjax.track.compare.bootstrap import block_counts
from mcjax.track.compare.weighted import WeightedRun, block_tokens_of, of_requests, values_of
from mcjax.track.metrics import CATALOGUE
from mcjax.track.run import Run

RUN = served(waits_ms(400, 15, 1), warmup_ms=200)
TOLD = [name for name in CATALOGUE if of_requests(name)]


def divided(run: Run) -> Blocks:
    blocks = blocks_of([run])
    assert isinstance(blocks, Blocks)
    return blocks


@pytest.mark.parametrize("name", TOLD)
def test_counted_once_they_are_the_summary_s(name: str) -> None:
    expected = CATALOGUE[name].of(RUN.summary)
    assert expected is not None
    assert WeightedRun(RUN).once(name) == expected
    assert WeightedRun(RUN, divided(RUN)).once(name) == expected


def test_a_run_without_answers_has_no_latency() -> None:
    none = served([5.0] * 4 + [6.0], arrivals_ms=[0, 1, 2, 3, 4], warmup_ms=4)  # only the rejected one is in the window
    assert WeightedRun(none).once("ttft_s.p90") is None
    assert WeightedRun(none).once("ttft_s.mean") is None
    assert WeightedRun(none).once("requests.rejected") == 1


@pytest.mark.parametrize("name", TOLD)
def test_weights_count_requests_as_often(name: str) -> None:
    """A request drawn twice counts as two of its kind would: the figure of a run in which it came twice."""
    blocks = divided(RUN)
    weighted = WeightedRun(RUN, blocks)
    weights = block_counts(3, blocks.count, np.random.default_rng(0))
    drawn = weighted.figures(name, weights)
    assert drawn is not None
    table = RUN.requests
    index = blocks.of(table)
    inside = table.column("arrival_ns").to_numpy() >= 200_000_000
    for row, figure in zip(weights, drawn, strict=True):
        again = table.take(np.repeat(np.arange(len(table)), row[index] * inside))
        twice = Run(None, RUN.summary, {}, {"requests": again}, record=RUN.record)
        if name == "prefix_hit_rate.block":
            continue  # the size of a block is taken from the summary, which is that of the whole run
        assert WeightedRun(twice).once(name) == figure


def test_parts_add_up() -> None:
    parts = [WeightedRun(RUN, by="tenant", part=part) for part in values_of([RUN], "tenant")]
    assert len(parts) == 2
    for name in ("requests.submitted", "requests.rejected", "goodput_rps", "tokens_by_tier.computed"):
        assert sum(part.once(name) or 0.0 for part in parts) == pytest.approx(CATALOGUE[name].of(RUN.summary))
    means = [part.once("ttft_s.mean") for part in parts]
    assert means[0] != means[1]
    assert parts[0].once("prefix_hit_rate.block") is not None


def test_what_requests_do_not_tell() -> None:
    assert WeightedRun(RUN).once("prefill_busy_s") is None
    assert not of_requests("prefill_busy_s")
    assert not of_requests("ttft_s.p95")


def test_the_size_of_a_block() -> None:
    assert block_tokens_of(RUN) == 32
    config = {**RUN.record.config, "kvpool.block_tokens": 48}  # not what the summary was made with
    assert block_tokens_of(Run(None, RUN.summary, {}, RUN.tables, record=replace(RUN.record, config=config))) == 32
    strange = Run(None, {"prefix_hit_rate": {"block": 0.123}}, {}, RUN.tables, record=RUN.record)
    assert block_tokens_of(strange) is None
    assert WeightedRun(strange).once("prefix_hit_rate.block") is None


def test_as_many_blocks_as_are_longer_than_lives() -> None:
    # 400 arrivals, 10 ms apart from 200 ms on: 3.8 s; requests live some 40 ms, or 100 ms more.
    assert divided(RUN).count == MOST
    assert not divided(RUN).too_short
    slower = divided(served([wait + 100 for wait in waits_ms(400, 15, 1)], warmup_ms=200))
    assert FEWEST < slower.count < MOST
    assert slower.length_ns > slower.life_ns
    slowest = divided(served([wait + 1000 for wait in waits_ms(400, 15, 1)]))
    assert slowest.count == FEWEST
    assert slowest.too_short


def test_what_cannot_be_divided() -> None:
    assert "99 requests are too few" in str(blocks_of([served([5.0] * 99)]))
    assert "all requests arrive at once" in str(blocks_of([served([5.0] * 120, arrivals_ms=[0.0] * 120)]))


def test_a_request_lies_in_one_block_in_every_run() -> None:
    """Later turns come when answers have; they still are the same request."""
    first = served(waits_ms(200, 10, 1))
    later = served(waits_ms(200, 10, 2), arrivals_ms=[10.0 * index + 300 for index in range(200)])
    blocks = blocks_of([first, later])
    assert isinstance(blocks, Blocks)
    assert blocks.of(first.requests).tolist() == blocks.of(later.requests).tolist()
    alone = blocks.of(later.requests.set_column(0, "request_id", [np.arange(200) + 1000]))
    assert alone.tolist() != blocks.of(later.requests).tolist()


def test_traffic_is_the_same_or_not() -> None:
    first, again = served(waits_ms(50, 10, 1)), served(waits_ms(50, 10, 2))
    assert same_traffic(first, again)
    assert not same_traffic(first, served(waits_ms(50, 10, 1), arrivals_ms=[11.0 * index for index in range(50)]))
    assert not same_traffic(first, served(waits_ms(49, 10, 1)))
