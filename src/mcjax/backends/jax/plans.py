"""A step plan packed into the arrays that the compiled programs take, and the bookkeeping of the tokens it produces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mcjax.backends.jax.programs import HEADER, Geometry, pack_row
from mcjax.backends.jax.sampler_input import Part, check, full_rows, go_on, plain_rows
from mcjax.engine.base import Kind, StepItem, StepPlan
from mcjax.types import Logprobs, Tokens


@dataclass(slots=True)
class Call:
    """One call of a step's programs: row r belongs to item `indices[r]`; rows beyond are padding (length 0)."""

    indices: list[int]
    width: int
    rows: NDArray[np.int32]
    """`[B, HEADER + width + N]`, see `programs.pack_row`."""
    words: NDArray[np.int32]
    numbers: NDArray[np.float32]
    """Both for the sampler: see `sampler_input`."""
    full: bool
    """Which sampler: the full one, or the plain one."""

    @property
    def batch(self) -> int:
        return len(self.rows)


@dataclass(slots=True)
class Plan:
    """Everything the executor's thread needs, copied from the plan: the loop may go on changing its items."""

    max_steps: int
    prefills: list[Call]
    decode: Call | None
    parts: list[Part]
    finished: list[int] = field(default_factory=list[int])
    failed: dict[int, str] = field(default_factory=dict[int, str])

    @classmethod
    def of(cls, plan: StepPlan, max_steps: int, geometry: Geometry) -> Plan:
        """Check and pack.

        Raises `ValueError`, which names the request, for what does not fit, and `ConfigError` for sampler parameters
        that the programs have no room for.
        """
        if max_steps < 1 or not plan.items:
            raise ValueError(f"a plan needs items and steps; got {len(plan.items)} items, max_steps={max_steps}")
        prefills = [index for index, item in enumerate(plan.items) if item.kind is Kind.PREFILL]
        decodes = [index for index, item in enumerate(plan.items) if item.kind is Kind.DECODE]
        if len(decodes) > geometry.max_batch:
            raise ValueError(f"{len(decodes)} decode items exceed max_batch={geometry.max_batch}")
        steps = 1 if prefills else max_steps
        parts: list[Part] = []
        for item in plan.items:
            tokens = _checked(item, steps, geometry)
            check(item)
            parts.append(Part(item.sampling, item.samples, item.generated, tokens[item.q_len :].tolist()))
        items = plan.items
        return cls(
            max_steps=steps,
            prefills=[
                _call([index], items, parts, 1, geometry.width(items[index].q_len), geometry) for index in prefills
            ],
            decode=_call(decodes, items, parts, geometry.batch(len(decodes)), 1, geometry) if decodes else None,
            parts=parts,
        )

    @staticmethod
    def idle(geometry: Geometry, batch: int, width: int, full: bool = False) -> Call:
        """A call without any sequence: it touches the scratch page only."""
        return _call([], [], [], batch, width, geometry, full)

    def produced(self, call: Call, picked: NDArray[np.int32]) -> None:
        """Take one step's answer (see `sampling.sample` and `sample_fully`): no token is worth anything that comes of
        logits which are none, be it known or not."""
        for index, answer in zip(call.indices, picked, strict=False):  # rows beyond the items are padding
            part, (token, sound) = self.parts[index], answer[:2].tolist()
            if not sound:
                self.failed[index] = "its logits are not numbers"
                continue
            if part.take(token):
                self.finished.append(index)
            if part.sampling.logprobs is not None and part.samples:
                part.logprobs.append(answer[2:])

    def advance(self) -> None:
        """Feed every decode item the token it produced last, one position further."""
        call = self.decode
        assert call is not None
        call.words[:, 2] += 1
        for row, index in enumerate(call.indices):
            part = self.parts[index]
            call.rows[row, 1] += 1
            call.rows[row, HEADER] = part.output[-1]
            if call.full:
                go_on(call.words[row], part)

    def calls(self) -> list[Call]:
        """The calls of one step: each prompt's chunk by itself, then all decodes."""
        return [*self.prefills, self.decode] if self.decode is not None else self.prefills

    @property
    def fusable(self) -> bool:
        """Whether the next steps need nothing from the host: plain decodes, each of which feeds what it produced."""
        plain = self.decode is not None and not self.prefills and not self.decode.full
        return plain and all(part.next_known < 0 for part in self.parts)

    def last_tokens(self) -> list[int | None]:
        """What the last step produced, by item; None for one that does not sample, or has failed."""
        return [
            part.output[-1] if part.samples and index not in self.failed else None
            for index, part in enumerate(self.parts)
        ]

    def tokens(self) -> list[Tokens | None]:
        """`[steps]` tokens of each item that samples (one less if it failed in the last), none of the others."""
        return [np.array(part.output if part.samples else [], dtype=np.int32) for part in self.parts]

    def logprobs(self) -> dict[int, Logprobs]:
        """Those of `tokens`, of each item that asked for them."""
        told = ((index, part.told()) for index, part in enumerate(self.parts))
        return {index: found for index, found in told if found is not None}


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


def _call(
    indices: list[int],
    items: Sequence[StepItem],
    parts: Sequence[Part],
    batch: int,
    width: int,
    geometry: Geometry,
    full: bool = False,
) -> Call:
    rows = np.zeros((batch, HEADER + width + geometry.table_width), dtype=np.int32)
    rows[:, HEADER + width :] = geometry.pages
    for row, index in enumerate(indices):
        item = items[index]
        assert item.tokens is not None
        used = item.pages[: geometry.table_width]
        fed = item.tokens[: item.q_len]
        rows[row] = pack_row(width, item.q_len, item.start, fed, used, geometry)
    chosen, their = [items[index] for index in indices], [parts[index] for index in indices]
    full = full or not all(part.plain for part in their)
    if full:
        words, numbers = full_rows(chosen, their, batch, geometry.max_context_tokens)
    else:
        words, numbers = plain_rows(chosen, batch)
    return Call(indices, width, rows, words, numbers, full)
