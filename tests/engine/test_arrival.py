"""A prompt's blocks count as arrived when everything said of them agrees; and nothing is sent that is there already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from engine_fixtures import CheckBench, expected

from mcjax import aio
from mcjax.engine.prefix import verify
from mcjax.engine.service import Service
from mcjax.errors import BlockCorrupt, LeaseLost, RecordMismatch
from mcjax.kvpool.holds import Pin
from mcjax.sched.job import CompletionRecord, Job
from mcjax.types import NS_PER_S, KVFormat, KVGroup, RequestState

PROMPT = list(range(1, 23))
"""Five blocks of four, and a tail of two."""

OUTPUT = 5

Change = Callable[[CompletionRecord], CompletionRecord]


def with_holds(record: CompletionRecord, **changes: Any) -> CompletionRecord:
    return replace(record, **changes)


def stale_lease(record: CompletionRecord) -> CompletionRecord:
    """Of an epoch that is over: the receiver has taken the room back, and given it to others."""
    record.pin.lost = True
    return record


def other_prefix(record: CompletionRecord) -> CompletionRecord:
    """The pin is on as many blocks, of another prompt."""
    pin = Pin(record.pin.node, record.pin.owner, blocks=record.blocks[::-1])
    return with_holds(record, pin=pin)


MUTATIONS: dict[str, tuple[Change, type[Exception]]] = {
    "fewer tokens": (lambda r: with_holds(r, prompt_tokens=r.prompt_tokens - 1), RecordMismatch),
    "more tokens": (lambda r: with_holds(r, prompt_tokens=r.prompt_tokens + 4), RecordMismatch),
    "fewer blocks": (lambda r: with_holds(r, blocks=r.blocks[:-1], checksums=r.checksums[:-1]), RecordMismatch),
    "more blocks": (lambda r: with_holds(r, blocks=(*r.blocks, 77), checksums=(*r.checksums, b"")), RecordMismatch),
    "other blocks": (lambda r: with_holds(r, blocks=r.blocks[::-1]), RecordMismatch),
    "another prefix": (other_prefix, RecordMismatch),
    "fewer checksums": (lambda r: with_holds(r, checksums=r.checksums[:-1]), RecordMismatch),
    "wrong checksum": (lambda r: with_holds(r, checksums=(b"x" * 16, *r.checksums[1:])), BlockCorrupt),
    "wrong tail checksum": (lambda r: with_holds(r, tail_checksum=b"x" * 16), BlockCorrupt),
    "another layout": (
        lambda r: with_holds(r, layout=KVFormat("other weights", 4, (KVGroup(bytes_per_token=8),))),
        RecordMismatch,
    ),
    "no layout": (lambda r: with_holds(r, layout=None), RecordMismatch),
    "an epoch that is over": (stale_lease, LeaseLost),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_a_record_that_does_not_agree_is_refused_and_the_request_served_all_the_same(what: str) -> None:
    change, kind = MUTATIONS[what]
    bench = CheckBench("1p1d", shares_decoded=False)
    refused: list[Exception] = []

    async def main(service: Service) -> None:
        decodes: Any = service.cluster.instances["d0"]
        decode = decodes.decode

        async def deceived(job: Job, record: CompletionRecord) -> None:
            if refused:
                await decode(job, record)
                return
            changed = change(record)
            try:
                await decode(job, changed)
            except Exception as problem:
                refused.append(problem)
                record.pin.lost = False
                raise

        decodes.decode = deceived
        request = bench.request(1, PROMPT, OUTPUT)
        row = await service.frontend.submit(request).task
        assert row.state is RequestState.COMPLETED
        assert row.output == expected(request, OUTPUT)

    bench.run(main)
    assert [type(problem) for problem in refused] == [kind]


def moved(bench: CheckBench, kind: str = "transfer") -> list[tuple[str, int]]:
    """Way and blocks of every copy between nodes so far."""
    rows = [dict(event[4:]) | {"place": event[3]} for event in bench.rows.events if event[2] and event[1] == kind]
    between = [row for row in rows if len(dict.fromkeys(row["place"].split(">"))) == 2]
    return [(row["place"], row["blocks"]) for row in between]


def test_what_the_receiver_has_already_is_not_sent_again() -> None:
    """The decode side's cached prefix moves no byte: the second request's own blocks, and its tail, are all that go."""
    bench = CheckBench("1p1d")

    async def main(service: Service) -> None:
        await service.frontend.submit(bench.request(1, PROMPT, OUTPUT)).task
        await aio.sleep_ns(NS_PER_S // 10)
        before = sum(blocks for _, blocks in moved(bench))
        assert before == 6, "five blocks and a tail"
        await service.frontend.submit(bench.request(2, PROMPT, OUTPUT)).task
        again = sum(blocks for _, blocks in moved(bench)) - before
        assert again == 1, "the tail alone"
        longer = [*PROMPT[:20], *range(40, 48)]
        await service.frontend.submit(bench.request(3, longer, OUTPUT)).task
        assert sum(blocks for _, blocks in moved(bench)) - before - again == 2, "two blocks behind the five"

    bench.run(main)


def test_a_prompt_of_whole_blocks_that_is_there_already_moves_nothing() -> None:
    bench = CheckBench("1p1d")

    async def main(service: Service) -> None:
        await service.frontend.submit(bench.request(1, PROMPT[:20], OUTPUT)).task
        await aio.sleep_ns(NS_PER_S // 10)
        before = moved(bench)
        row = await service.frontend.submit(bench.request(2, PROMPT[:20], OUTPUT)).task
        assert (row.state, row.attempts) == (RequestState.COMPLETED, 1)
        assert moved(bench) == before

    bench.run(main)


def test_fewer_blocks_than_announced_are_no_arrival() -> None:
    sums = (b"a" * 16, b"b" * 16)
    verify(None, (), sums, (1, 2), 7)  # pyright: ignore[reportArgumentType]  (no bytes in this world: nothing to say)
    for read in (sums[:1], (*sums, b"c" * 16)):
        with pytest.raises(BlockCorrupt, match="announced"):
            verify(None, read, sums, (1, 2), 7)  # pyright: ignore[reportArgumentType]
