"""A step plan packed into the arrays that the compiled programs take, and the bookkeeping of the tokens it produces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mcjax.backends.jax.programs import HEADER, Geometry, pack_row
from mcjax.engine.base import Kind, StepItem, StepPlan
from mcjax.types import Tokens


@dataclass(slots=True)
class Call:
    """One call of a step program: row r belongs to item `indices[r]`; rows beyond are padding (length 0)."""

    indices: list[int]
    rows: NDArray[np.int32]
    """`[B, HEADER + width + N]`, see `programs.pack_row`."""
    temperatures: NDArray[np.float32]
    """`[B]`"""


@dataclass(slots=True)
class Plan:
    """Everything the executor's thread needs, copied from the plan: the loop may go on changing its items."""

    max_steps: int
    prefills: list[Call]
    decode: Call | None
    known: list[list[int]]
    """By item: the tokens known to follow the ones fed in the first step."""
    stops: list[tuple[int, ...]]
    samples: list[bool]
    output: list[list[int]]
    finished: list[int] = field(default_factory=list[int])

    @classmethod
    def of(cls, plan: StepPlan, max_steps: int, geometry: Geometry) -> Plan:
        """Check and pack. Raises `ValueError`, which names the request, for what does not fit."""
        if max_steps < 1 or not plan.items:
            raise ValueError(f"a plan needs items and steps; got {len(plan.items)} items, max_steps={max_steps}")
        prefills = [index for index, item in enumerate(plan.items) if item.kind is Kind.PREFILL]
        decodes = [index for index, item in enumerate(plan.items) if item.kind is Kind.DECODE]
        if len(decodes) > geometry.max_batch:
            raise ValueError(f"{len(decodes)} decode items exceed max_batch={geometry.max_batch}")
        steps = 1 if prefills else max_steps
        known: list[list[int]] = []
        for item in plan.items:
            tokens = _checked(item, steps, geometry)
            known.append(tokens[item.q_len :].tolist())
        items = plan.items
        return cls(
            max_steps=steps,
            prefills=[_call([index], items, 1, geometry.chunk_tokens, geometry) for index in prefills],
            decode=_call(decodes, items, geometry.max_batch, 1, geometry) if decodes else None,
            known=known,
            stops=[item.sampling.stop_tokens for item in items],
            samples=[item.samples for item in items],
            output=[[] for _ in items],
        )

    @staticmethod
    def idle(geometry: Geometry, batch: int, width: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Rows and temperatures of a call without any sequence: it touches the scratch page only."""
        call = _call([], [], batch, width, geometry)
        return call.rows, call.temperatures

    def produced(self, indices: list[int], sampled: NDArray[np.int32]) -> None:
        """Take one step's tokens (`[B]`) for these items: a known token stands before a sampled one."""
        for index, token in zip(indices, sampled.tolist(), strict=False):  # rows beyond the items are padding
            output = self.output[index]
            known = self.known[index]
            chosen = known[len(output)] if len(output) < len(known) else token
            output.append(chosen)
            if chosen in self.stops[index] and self.samples[index]:
                self.finished.append(index)

    def advance(self) -> None:
        """Feed every decode item the token it produced last, one position further."""
        assert self.decode is not None
        rows = self.decode.rows
        for row, index in enumerate(self.decode.indices):
            rows[row, 1] += 1
            rows[row, HEADER] = self.output[index][-1]

    def tokens(self) -> list[Tokens | None]:
        """`[steps]` tokens of each item that samples, none of the others."""
        return [
            np.array(output if samples else [], dtype=np.int32)
            for output, samples in zip(self.output, self.samples, strict=True)
        ]


def _checked(item: StepItem, steps: int, geometry: Geometry) -> Tokens:
    """The item's tokens, if the item can be computed."""
    who = f"request {item.request_id}"
    if item.kind is Kind.VERIFY:
        raise ValueError(f"{who}: this executor has no program for verify items")
    limit = geometry.chunk_tokens if item.kind is Kind.PREFILL else 1
    if not 1 <= item.q_len <= limit:
        raise ValueError(f"{who}: q_len={item.q_len}, a {item.kind.value} item may have 1 to {limit}")
    if item.tokens is None or len(item.tokens) != item.q_len + item.forced:
        got = None if item.tokens is None else len(item.tokens)
        raise ValueError(f"{who}: {item.q_len} tokens to feed and {item.forced} forced, got {got}")
    end = item.start + item.q_len + steps - 1
    if item.start < 0 or end > geometry.max_context_tokens:
        raise ValueError(f"{who}: {item.start}..{end} exceeds max_context_tokens={geometry.max_context_tokens}")
    if end > len(item.pages) * geometry.page_tokens:
        raise ValueError(f"{who}: {end} tokens do not fit {len(item.pages)} pages of {geometry.page_tokens}")
    if not all(0 <= page < geometry.pages for page in item.pages):
        raise ValueError(f"{who}: pages {item.pages} are not all below {geometry.pages}")
    return item.tokens


def _call(indices: list[int], items: Sequence[StepItem], batch: int, width: int, geometry: Geometry) -> Call:
    rows = np.zeros((batch, HEADER + width + geometry.table_width), dtype=np.int32)
    rows[:, HEADER + width :] = geometry.pages
    temperatures = np.zeros(batch, dtype=np.float32)
    for row, index in enumerate(indices):
        item = items[index]
        assert item.tokens is not None
        used = item.pages[: geometry.table_width]
        fed = item.tokens[: item.q_len]
        rows[row] = pack_row(width, item.q_len, item.start, item.sampling.seed, fed, used, geometry)
        temperatures[row] = item.sampling.temperature
    return Call(indices, rows, temperatures)
