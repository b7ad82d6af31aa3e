"""Step plans on their way to a worker: JSON for what is small, raw int32 for tokens. Read as if by an executor here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mcjax.backends.processes.frames import FrameBroken
from mcjax.engine.base import Kind, StepItem, StepPlan
from mcjax.types import Sampling, Tokens


def encode_plan(plan: StepPlan) -> tuple[list[dict[str, Any]], list[bytes]]:
    """`(items, buffers)`: of each item, known tokens and prompt (where there are any) lie in the buffers."""
    items: list[dict[str, Any]] = []
    buffers: list[bytes] = []
    for item in plan.items:
        values: dict[str, Any] = {
            "request": item.request_id,
            "kind": item.kind.value,
            "start": item.start,
            "q_len": item.q_len,
            "pages": item.pages,
            "sampling": dataclasses.asdict(item.sampling),
            "samples": item.samples,
            "generated": item.generated,
            "forced": item.forced,
            "adapter": item.adapter,
        }
        for name, tokens in (("tokens", item.tokens), ("prompt", item.prompt)):
            if tokens is not None:
                values[name] = len(buffers)
                buffers.append(np.ascontiguousarray(tokens, np.int32).tobytes())
        if item.prompt is not None:  # only then does the sampler look at what came after it
            values["output"] = list(item.output)
        items.append(values)
    return items, buffers


def decode_plan(items: Sequence[Mapping[str, Any]], buffers: Sequence[bytes]) -> StepPlan:
    """The inverse. Raises `FrameBroken` for what is no plan."""
    try:
        return StepPlan([_item(values, buffers) for values in items])
    except (KeyError, TypeError, ValueError, IndexError) as problem:
        raise FrameBroken(f"not a step plan: {type(problem).__name__}: {problem}") from problem


def _item(values: Mapping[str, Any], buffers: Sequence[bytes]) -> StepItem:
    sampling = dict(values["sampling"])
    for name in ("stop_tokens", "stop_strings"):
        sampling[name] = tuple(sampling[name])

    def tokens(name: str) -> Tokens | None:
        at: int | None = values.get(name)
        return None if at is None else np.frombuffer(buffers[at], np.int32)

    return StepItem(
        request_id=values["request"],
        kind=Kind(values["kind"]),
        start=values["start"],
        q_len=values["q_len"],
        pages=list(values["pages"]),
        sampling=Sampling(**sampling),
        tokens=tokens("tokens"),
        samples=values["samples"],
        generated=values["generated"],
        forced=values["forced"],
        adapter=values["adapter"],
        prompt=tokens("prompt"),
        output=list(values.get("output", ())),
    )
