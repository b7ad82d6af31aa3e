"""A step plan arrives at a worker as it left, and what is no plan is an error."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcjax.backends.processes.frames import FrameBroken, Frames, Message, encode
from mcjax.backends.processes.plans import decode_plan, encode_plan
from mcjax.engine.base import Kind, StepItem, StepPlan
from mcjax.types import Sampling

TOKENS = st.none() | st.lists(st.integers(0, 2**31 - 1), max_size=20).map(lambda ids: np.array(ids, np.int32))
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.floats(0, 2),
    seed=st.integers(0, 2**40),
    stop_tokens=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    stop_strings=st.lists(st.text(min_size=1, max_size=4), max_size=2).map(tuple),
    top_k=st.integers(0, 9),
    top_p=st.floats(0.1, 1),
    repetition_penalty=st.floats(0.5, 2),
    logprobs=st.none() | st.integers(0, 8),
)
ITEMS = st.builds(
    StepItem,
    request_id=st.integers(0, 2**40),
    kind=st.sampled_from(Kind),
    start=st.integers(0, 10_000),
    q_len=st.integers(1, 300),
    pages=st.lists(st.integers(0, 500), max_size=10),
    sampling=SAMPLINGS,
    tokens=TOKENS,
    samples=st.booleans(),
    generated=st.integers(0, 99),
    forced=st.integers(0, 9),
    prompt=TOKENS,
    output=st.lists(st.integers(0, 500), max_size=5),
)


def plain(item: StepItem) -> dict[str, Any]:
    """What an executor reads of it: the output only beside the prompt."""
    values = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    for name in ("tokens", "prompt"):
        values[name] = None if values[name] is None else values[name].tolist()
    return values if item.prompt is not None else values | {"output": []}


@given(items=st.lists(ITEMS, max_size=4))
def test_a_plan_arrives_as_it_left(items: list[StepItem]) -> None:
    values, buffers = encode_plan(StepPlan(items))
    (message,) = Frames().feed(encode(Message("run", {"items": values}, buffers)))
    arrived = decode_plan(message.values["items"], message.buffers)
    assert list(map(plain, arrived.items)) == list(map(plain, items))


@given(items=st.lists(ITEMS, min_size=1, max_size=2), data=st.data())
def test_what_is_no_plan_is_refused(items: list[StepItem], data: st.DataObject) -> None:
    values, buffers = encode_plan(StepPlan(items))
    values = json.loads(json.dumps(values))
    del values[0][data.draw(st.sampled_from(["request", "kind", "start", "pages", "sampling", "samples"]))]
    with pytest.raises(FrameBroken):
        decode_plan(values, buffers)


def test_tokens_that_did_not_come_along_are_missed() -> None:
    item = StepItem(1, Kind.PREFILL, 0, 2, [0], Sampling(), np.array([1, 2], np.int32))
    values, _ = encode_plan(StepPlan([item]))
    with pytest.raises(FrameBroken):
        decode_plan(values, [])
    with pytest.raises(FrameBroken):
        decode_plan(values, [b"odd"])
