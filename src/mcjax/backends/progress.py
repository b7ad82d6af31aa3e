"""Progress of a step plan as plain JSON values, so that a run's log can stand in for its executor. Free of jax."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from mcjax.engine.base import Progress
from mcjax.errors import ExecutorFailed, InstanceDown
from mcjax.types import Logprobs

Failure: TypeAlias = ExecutorFailed | InstanceDown
"""What a plan may end in, beside progress."""


def encode_progress(progress: Progress) -> dict[str, Any]:
    """`{steps, start_ns, ends_ns, tokens, finished}`, and `failed` and `logprobs` where there are any; see
    `mcjax.engine.base.Progress`."""
    rare: dict[str, Any] = {}
    if progress.failed:
        rare["failed"] = [[index, why] for index, why in progress.failed.items()]
    if progress.logprobs:
        rare["logprobs"] = [
            [index, found.chosen.tolist(), found.top_tokens.tolist(), found.top.tolist()]
            for index, found in progress.logprobs.items()
        ]
    return {
        "steps": progress.steps,
        "start_ns": progress.start_ns,
        "ends_ns": progress.ends_ns.tolist(),
        "tokens": [None if tokens is None else tokens.tolist() for tokens in progress.tokens],
        "finished": list(progress.finished),
        **rare,
    }


def encode_failure(error: Failure) -> dict[str, Any]:
    """`{down}` or `{error, lost_pages}`, for a plan that raised."""
    if isinstance(error, InstanceDown):
        return {"down": error.instance}
    return {"error": str(error), "lost_pages": error.lost_pages}


def decode_progress(payload: dict[str, Any]) -> Progress:
    """The inverse of `encode_progress`. Raises what `encode_failure` wrote."""
    if "down" in payload:
        raise InstanceDown(payload["down"])
    if "error" in payload:
        raise ExecutorFailed(payload["error"], payload["lost_pages"])
    return Progress(
        steps=payload["steps"],
        start_ns=payload["start_ns"],
        ends_ns=np.asarray(payload["ends_ns"], dtype=np.int64),
        tokens=[None if tokens is None else np.asarray(tokens, dtype=np.int32) for tokens in payload["tokens"]],
        finished=tuple(payload["finished"]),
        failed=dict(payload.get("failed", ())),
        logprobs={index: _logprobs(*found) for index, *found in payload.get("logprobs", ())},
    )


def _logprobs(chosen: list[float], top_tokens: list[list[int]], top: list[list[float]]) -> Logprobs:
    return Logprobs(np.array(chosen, np.float32), np.array(top_tokens, np.int32), np.array(top, np.float32))
