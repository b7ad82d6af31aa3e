"""Proves a real run right: every token and every block again from a colocated engine, bit for bit.

Or, where engines may differ by rounding (`numerics=fast`, meshes of unequal sizes), every token by the margin: the
reference engine is fed the run's own tokens, and a token may be another than its choice only where the two are so close
that errors within the tolerance explain it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mcjax.app.runner import Result
from mcjax.backends.jax.numerics import Answer, comparable
from mcjax.errors import VerificationError
from mcjax.track.arrow import Table
from mcjax.types import RequestRow, RequestState, Script, Tokens
from mcjax.workload.base import Session, Turn

WITHIN_A_NODE = ("device", "file")
"""Transports that leave a node for nowhere."""


class _Once:
    """A session of one request, sent at once."""

    start_ns = 0

    def __init__(self, row: RequestRow):
        self._turn: Turn | None = Turn(replace(row.request, arrival_ns=0), Script(row.output_tokens))

    def next_turn(self, answer: Tokens | None) -> Turn | None:
        turn, self._turn = self._turn, None
        return turn


class SamePrompts:
    """The completed requests of another run, all at once, in order of their ids."""

    name = "same prompts"
    block_tokens: int | None = None

    def __init__(self, rows: Sequence[RequestRow]):
        done = [row for row in rows if row.state is RequestState.COMPLETED]
        self._rows = sorted(done, key=lambda row: row.request.request_id)

    def sessions(self) -> Iterator[Session]:
        for row in self._rows:
            yield _Once(row)

    def inputs(self) -> dict[str, str]:
        return {}


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found equal."""

    requests: int
    tokens: int
    kv_blocks: int


@dataclass(frozen=True, slots=True)
class WithinMargin:
    """What was found equal but for rounding."""

    requests: int
    tokens: int
    differing: int
    """Tokens that are not the reference's choice."""
    largest_gap: float
    """Of those: the most that one's logit lies below that of the reference's choice."""
    tolerance: float
    not_compared: int
    """Requests whose sampler has filters or penalties, which no margin bounds."""


class Reference(Protocol):
    """An engine that tells what it would have chosen in another's place."""

    def shortfalls(self, answers: Sequence[Answer]) -> Sequence[NDArray[np.float32]]: ...


def within_margin(
    run: Result, events: Table, disaggregated: bool, reference: Reference, tolerance: float
) -> WithinMargin:
    """Hold every token of a run against the reference engine, fed with that run's tokens.

    Raises `VerificationError` for a token that lies further below the reference's choice than twice the tolerance, and
    for a run that did not use what it is meant to show.
    """
    answers: dict[int, Answer] = {}
    not_compared = 0
    for row in run.rows:
        if row.state is not RequestState.COMPLETED:
            raise VerificationError(f"request {row.request.request_id} {row.state}: {row.reason}")
        if not comparable(row.request.sampling) or row.request.tokens is None or not row.output:
            not_compared += 1
            continue
        output = np.array(row.output, np.int32)
        answers[row.request.request_id] = Answer(row.request.tokens, output, row.request.sampling)
    falls = reference.shortfalls(list(answers.values()))
    differing, largest = 0, 0.0
    for request_id, below in zip(answers, falls, strict=True):
        wrong = np.flatnonzero(~(below <= 2 * tolerance))  # NaN is wrong, too
        if len(wrong):
            where = int(wrong[0])
            raise VerificationError(
                f"request {request_id} differs from the reference engine at output token {where}: its logit is "
                f"{below[where]:.4g} below that of the reference's choice; the tolerance allows {2 * tolerance:.4g}"
            )
        differing += int(np.count_nonzero(below))
        largest = max(largest, float(below.max()))
    tokens = sum(len(answer.output) for answer in answers.values())
    if not tokens:
        raise VerificationError("no token could be compared: that proves nothing")
    check_exercised(run, events, disaggregated)
    return WithinMargin(len(answers), tokens, differing, largest, tolerance, not_compared)


def prove(
    run: Result, events: Table, disaggregated: bool, play_colocated: Callable[[SamePrompts], Result]
) -> Verified | None:
    """Serve the same prompts on one colocated instance (`play_colocated`) and compare; None if that was interrupted.

    Raises `VerificationError` for a difference, and for a run that did not use what it is meant to show.
    """
    colocated = play_colocated(SamePrompts(run.rows))
    if colocated.interrupted:
        return None
    verified = compare(run, colocated)
    check_exercised(run, events, disaggregated)
    return verified


def compare(run: Result, colocated: Result) -> Verified:
    """Raises `VerificationError` at the first token or block that differs, and if there was nothing to compare."""
    expected = {row.request.request_id: row for row in colocated.rows}
    tokens = 0
    for row in run.rows:
        if row.state is not RequestState.COMPLETED:
            raise VerificationError(f"request {row.request.request_id} {row.state}: {row.reason}")
        other = expected[row.request.request_id]
        for ours, theirs in zip(_outputs(row), _outputs(other), strict=True):
            if ours == theirs:
                tokens += len(ours)
                continue
            where = next(
                (i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(theirs)
            )
            raise VerificationError(
                f"request {row.request.request_id} differs from the colocated engine at output token {where}: "
                f"{ours[where : where + 3]} instead of {theirs[where : where + 3]}"
            )
    common = [key for key in run.checksums if key in colocated.checksums]
    for key in common:
        if run.checksums[key] != colocated.checksums[key]:
            raise VerificationError(f"block {key.hex()[:16]} holds other KV bytes than the colocated engine's")
    if not tokens or not common:
        raise VerificationError(f"{tokens} tokens and {len(common)} blocks could be compared: that proves nothing")
    return Verified(len(run.rows), tokens, len(common))


def bytes_between_nodes(moved: Mapping[str, int]) -> int:
    """Of `bytes_by_transport`: those that went from one node's memory to another's."""
    return sum(nbytes for name, nbytes in moved.items() if name not in WITHIN_A_NODE)


def _outputs(row: RequestRow) -> list[list[int]]:
    return [row.output or [], *[branch.output or [] for branch in row.branches]]


def check_exercised(run: Result, events: Table, disaggregated: bool) -> None:
    """Raises `VerificationError` unless the run used what it is meant to show: hits, chunks, batches, transfers."""
    kinds, owners, batches = (events.column(name).to_pylist() for name in ("kind", "request_id", "blocks"))
    chunks: dict[int, int] = {}
    batch = 0
    for kind, owner, blocks in zip(kinds, owners, batches, strict=True):
        if kind == "prefill_step":
            chunks[owner] = chunks.get(owner, 0) + 1
        elif kind == "decode_step":
            batch = max(batch, blocks)
    hits = sum(row.hit_tokens for row in run.rows)
    moved = run.bytes_by_transport
    read = [worker["bytes_read"] or 0 for worker in run.figures.get("processes", {}).get("workers", {}).values()]
    missing = [
        what
        for what, there in {
            "prefix hits": hits > 0,
            "prompts of more than one chunk": max(chunks.values(), default=0) > 1,
            "decode batches of more than one": batch > 1,
            "bytes between device and host": moved.get("device", 0) > 0,
            "bytes between nodes": bytes_between_nodes(moved) > 0 or not disaggregated,
            "bytes read from another process": sum(read) > 0 or not (read and disaggregated),
        }.items()
        if not there
    ]
    if missing:
        raise VerificationError(f"the run shows no {', no '.join(missing)}")
