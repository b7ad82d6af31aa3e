"""With and without streaming: the same tokens, and later ones without."""

from __future__ import annotations

import pytest
from engine_fixtures import CheckBench, expected, simulate

from mcjax.engine.service import Service
from mcjax.types import RequestState
from mcjax.workload.synthetic import Synthetic


@pytest.mark.parametrize("streaming", [True, False])
def test_tokens_do_not_depend_on_it(streaming: bool) -> None:
    bench = CheckBench("2p2d", streaming=streaming)

    async def main(service: Service) -> None:
        prompts = [range(n // 2, n // 2 + 23) for n in range(6)]  # pairs share what the other has sent before
        requests = [bench.request(n, prompt, 6) for n, prompt in enumerate(prompts)]
        rows = [await service.frontend.submit(request).task for request in requests]
        assert [row.state for row in rows] == [RequestState.COMPLETED] * 6
        assert [row.output for row in rows] == [expected(request, 6) for request in requests]

    bench.run(main)


def test_streaming_hides_the_transfer_behind_the_prompt() -> None:
    """One long prompt in many chunks, over a link that takes about as long as computing it."""
    prompt = Synthetic(seed=1, sessions=1, turns=(1, 1), first_prompt_tokens=(32768, 32768), output_tokens=(3, 3))
    started: dict[bool, tuple[int, int]] = {}
    copies: dict[bool, list[tuple[int, int]]] = {}
    for streaming in (True, False):
        rows = simulate(prompt, "1p1d", streaming=streaming)
        [row] = rows.requests
        assert row.state is RequestState.COMPLETED
        started[streaming] = row.first_token_ns, int(row.token_ends_ns[1][0])
        sent = [event for event in rows.events if event[1] == "transfer" and event[3] == "node-p0>node-d0"]
        copies[streaming] = [(dict(event[4:])["start_ns"], dict(event[4:])["nbytes"]) for event in sent]
    assert started[True][0] == started[False][0], "the first token comes from the prefill side"
    assert started[False][1] > started[True][1]
    assert len(copies[True]) > len(copies[False]) == 1
    assert min(start_ns for start_ns, _ in copies[False]) >= started[False][0]
    assert min(start_ns for start_ns, _ in copies[True]) < started[True][0]
    assert sum(nbytes for _, nbytes in copies[True]) == sum(nbytes for _, nbytes in copies[False])
