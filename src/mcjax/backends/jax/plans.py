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
    width: int
    rows: NDArray[np.int32]
    """`[B, HEADER + width + N]`, see `programs.pack_row`."""
    words: NDArray[np.int32]
    """`[B, 3]`: seed (high, low word) and the position of the token to come."""
    temperatures: NDArray[np.float32]
    """`[B]`"""

    @property
    def batch(self) -> int:
        return len(self.rows)


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
    failed: dict[int, str] = field(default_factory=dict[int, str])

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
    def idle(geometry: Geometry, batch: int, width: int) -> Call:
        """A call without any sequence: it touches the scratch page only."""
        return _call([], [], batch, width, geometry)

    def produced(self, indices: list[int], picked: NDArray[np.int32]) -> None:
        """Take one step's answer (`[B, 2]`, see `sampling.sample`) for these items: a known token stands before a
        sampled one, but no token is worth anything that comes of logits which are none."""
        for index, (token, sound) in zip(indices, picked.tolist(), strict=False):  # rows beyond the items are padding
            if not sound:
                self.failed[index] = "its logits are not numbers"
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
        self.decode.words[:, 2] += 1
        for row, index in enumerate(self.decode.indices):
            rows[row, 1] += 1
            rows[row, HEADER] = self.output[index][-1]

    def calls(self) -> list[Call]:
        """The calls of one step: each prompt's chunk by itself, then all decodes."""
        return [*self.prefills, self.decode] if self.decode is not None else self.prefills

    def last_tokens(self) -> list[int | None]:
        """What the last step produced, by item; None for one that does not sample."""
        return [output[-1] if samples else None for output, samples in zip(self.output, self.samples, strict=True)]

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
    words = np.zeros((batch, 3), dtype=np.int32)
    temperatures = np.zeros(batch, dtype=np.float32)
    for row, index in enumerate(indices):
        item = items[index]
        assert item.tokens is not None
        used = item.pages[: geometry.table_width]
        fed = item.tokens[: item.q_len]
        rows[row] = pack_row(width, item.q_len, item.start, fed, used, geometry)
        words[row] = seed_words(item.sampling.seed, item.start + item.q_len)
        temperatures[row] = item.sampling.temperature
    return Call(indices, width, rows, words, temperatures)


def seed_words(seed: int, position: int) -> NDArray[np.int32]:
    """`[3]` int32: the high and low word of a 64-bit seed, and a position."""
    words = np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF, position], dtype=np.uint32)
    return words.view(np.int32)
