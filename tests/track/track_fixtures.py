"""A small fabricated run that the tests of `track` share."""

from __future__ import annotations

import numpy as np

from mcjax.track.recorder import TableRecorder
from mcjax.types import Decision, Request, RequestRow, RequestState

MS = 1_000_000


def key_of(block: int) -> bytes:
    return block.to_bytes(4, "big")


def row(request_id: int, arrival_ns: int, ends_ns: list[int], state: RequestState, **fields: object) -> RequestRow:
    """A request of 100 prompt tokens whose tokens came at `ends_ns`."""
    made = RequestRow(Request(request_id, arrival_ns, 100, 8, tenant="a", session="s"), blocks=(1, 2), state=state)
    made.first_token_ns = ends_ns[0] if ends_ns else -1
    made.finish_ns = ends_ns[-1] if ends_ns else arrival_ns
    made.output_tokens = len(ends_ns)
    made.token_ends_ns = [np.array(ends_ns[:1], np.int64), np.array(ends_ns[1:], np.int64)]
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def fabricate(recorder: TableRecorder | None = None) -> TableRecorder:
    """Three completed requests (one before 10 ms), one rejected, one cancelled after tokens."""
    made = recorder or TableRecorder(key_of)
    for start, end, kind, place in (
        (0, 20, "prefill_step", "p0"),
        (20, 40, "prefill_step", "p0"),
        (30, 50, "prefill_step", "p1"),
        (35, 45, "decode_step", "d0"),
        (44, 48, "decode_step", "d1"),
    ):
        made.event(end * MS, kind, 0, place, start_ns=start * MS, tokens=10)
    made.event(5 * MS, "transfer", 0, "n0>n1", tier="dram>dram", first_block=7, blocks=2, nbytes=64, detail="sim")
    made.event(6 * MS, "transfer", 1, "n0>n1", tier="dram>dram", first_block=7, blocks=1, nbytes=32, detail="sim")
    vectors = {"queue_s": np.array([0.1, 0.2]), "waits": np.array([1.0, np.inf])}
    first = made.decision(
        Decision(MS, 2, "prefill", "Mine", "p0", expected_s=0.02, names=["p0", "p1"], candidates=vectors)
    )
    made.decision(Decision(MS, 3, "prefill", "Mine", "p0", expected_s=0.02))
    made.decision(Decision(MS, 2, "transfer", "Mine", "n0", expected_s=0.3, outcome_s=0.2))
    first.outcome_s = 0.025
    first.outcome = "first token"
    made.report(2 * MS, MS, "p0", "load", [1, 2, 3])
    made.report(3 * MS, MS, "p1", "load", [])
    made.sample(MS, "n0", "pool_fill", 0.5)
    made.sample(MS, "p0", "queue_requests", 2)
    done = RequestState.COMPLETED
    made.request(row(1, 0, [9 * MS, 11 * MS], done, prefill_start_ns=1, local_tokens=50, slo_ttft_s=0.1, slo_tbt_s=0.1))
    made.request(
        row(
            2,
            10 * MS,
            [35 * MS, 36 * MS, 39 * MS],
            done,
            prefill_start_ns=11 * MS,
            local_tokens=32,
            remote_tokens=16,
            slo_ttft_s=0.025,
            slo_tbt_s=0.003,
            output=[5, 6, 7],
        )
    )
    made.request(row(3, 11 * MS, [61 * MS, 71 * MS], done, prefill_start_ns=12 * MS, slo_ttft_s=0.1, slo_tbt_s=0.0099))
    made.request(row(4, 12 * MS, [], RequestState.REJECTED, reason="overload"))
    made.request(row(5, 13 * MS, [999 * MS, 5000 * MS], RequestState.CANCELLED, prefill_start_ns=-1))
    return made


ARGUMENTS = {
    "backend": "sim",
    "seed": 7,
    "wall_s": 0.5,
    "duration_ns": 110 * MS,
    "warmup_ns": 10 * MS,
    "block_tokens": 16,
}
