"""Small views and clusters for the tests of decisions: every number is chosen so that it can be checked by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mcjax.cost.fitted import Fitted
from mcjax.sched.view import ClusterView, DecodeColumns, SSDColumns
from mcjax.types import Request

# 1 ms a prompt token; a decode step is 1 ms and 1 us a sequence and 1 us a context token.
COST = Fitted("by hand", 1_000_000_000, 0, 1_000_000, 1_000, 1_000_000)


def request(prompt_tokens: int = 1000, request_id: int = 1, max_tokens: int = 10, priority: int = 0) -> Request:
    return Request(request_id, 0, prompt_tokens, max_tokens, priority=priority)


def decode_columns(
    batch: Sequence[int] = (0, 0), context: Sequence[int] = (0, 0), free: Sequence[int] = (10_000, 10_000)
) -> DecodeColumns:
    return DecodeColumns(
        tuple(f"d{index}" for index in range(len(batch))),
        np.array(batch, np.int64),
        np.array(context, np.int64),
        np.array(free, np.int64),
        COST,
    )


def view(
    prefix_tokens: Sequence[int],
    queue_s: Sequence[float] | None = None,
    prompt_tokens: int = 1000,
    outgoing_bytes: Sequence[int] | None = None,
    bytes_per_s: float = 1e6,
    latency_s: float = 0.0,
    decode: DecodeColumns | None = None,
    ssd_tokens: Sequence[int] | None = None,
    ssd_queued: Sequence[int] | None = None,
    ssd_bytes_per_s: float = 1e4,
) -> ClusterView:
    """One byte a token, so that at 1e6 bytes a second a pulled token takes 1 us, one that is loaded from an SSD 0.1 ms,
    and a computed one 1 ms."""
    count = len(prefix_tokens)
    ssd = None
    if ssd_tokens is not None:
        queued = np.array(ssd_queued if ssd_queued is not None else [0] * count, np.int64)
        ssd = SSDColumns(np.array(ssd_tokens, np.int64), queued, ssd_bytes_per_s, 0.0)
    return ClusterView(
        time_ns=0,
        prompt_tokens=prompt_tokens,
        expected_output_tokens=100,
        block_tokens=100,
        names=tuple(f"p{index}" for index in range(count)),
        nodes=tuple(f"node-p{index}" for index in range(count)),
        queue_s=np.array(queue_s if queue_s is not None else [0.0] * count, np.float64),
        prefix_tokens=np.array(prefix_tokens, np.int64),
        available_tokens=max(prefix_tokens, default=0),
        outgoing_bytes=np.array(outgoing_bytes if outgoing_bytes is not None else [0] * count, np.int64),
        decode=decode if decode is not None else decode_columns(),
        cost=COST,
        bytes_per_token=1,
        network_bytes_per_s=bytes_per_s,
        network_latency_s=latency_s,
        ssd=ssd,
    )


def columns(of: ClusterView) -> list[list[float]]:
    """Every array of a view, to see that nobody wrote into one."""
    arrays = [of.queue_s, of.prefix_tokens, of.outgoing_bytes, of.ssd_tokens]
    arrays += [of.decode.batch, of.decode.context_tokens, of.decode.free_tokens]
    return [array.tolist() for array in arrays]
