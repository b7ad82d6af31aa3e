"""The steps that a batch goes through, in order, whatever else happens meanwhile.

find      where the region lies and the card's key for it; asked of the owner once, then known
check     only if it has a guard: the owner asks that, span by span
move      reads or writes by the card; what it refuses is explained by the owner
digest    if asked: of what arrived here, or by the owner of what arrived there
check     again, after the bytes were touched
tell      the number that goes with a write
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, cast

import numpy as np

from mcjax.errors import AccessRefused, StaleRegion, TransferCancelled, TransferError
from mcjax.transfer.transports.rdma.batch import Ask, Batch, Failure, Life, Move, Shown
from mcjax.transfer.transports.rdma.completions import Cause, cause_of, error_of
from mcjax.transfer.transports.rdma.plan import Limits, Request, requests
from mcjax.transfer.transports.rdma.wire import BrokenWire, Message
from mcjax.transfer.transports.threaded import checksum

Known = dict[tuple[int, int], Shown]
"""Regions that the owner has told of, by key and epoch."""
Step = Generator[Ask | Move, Any, None]

KINDS: dict[str, type[TransferError]] = {"access": AccessRefused, "stale": StaleRegion}
"""How refusals travel."""
_MOST_FAILURES = 3
"""So often may requests of a batch take the queue pair down; then the batch fails as a whole. (A card may refuse what
the owner finds nothing wrong with: the key was an older one.)"""


def life(batch: Batch, known: Known, limits: Limits) -> Life:
    """The steps of a batch. Raises `BrokenWire` for an answer that is none."""
    yield from _find(batch, known)
    if _guarded(batch):
        yield from _check(batch)
    at_the_end = batch.checksums or _guarded(batch)
    _plan(batch, limits, tell=not at_the_end)
    yield from _move(batch, known, limits, tell=not at_the_end)
    digests: dict[int, bytes] = {}
    if batch.checksums and batch.open_spans():
        digests = yield from _digests(batch)
    if _guarded(batch):
        yield from _check(batch)
    if at_the_end and batch.notify is not None and not batch.errors:
        batch.queue.append(_tell())
        yield from _move(batch, known, limits, tell=True)
    return digests


def is_tell(request: Request) -> bool:
    """Whether it is the one that brings the number."""
    return not request.pieces


def _tell() -> Request:
    return Request(0, -1, 0, 0, [])


def _guarded(batch: Batch) -> bool:
    return batch.shown is not None and batch.shown.guarded


def _find(batch: Batch, known: Known) -> Step:
    remote = batch.remote
    shown = known.get((remote.key, remote.epoch))
    if shown is None:
        answer = yield Ask("look")
        if _refused(batch, answer):
            return
        shown = known[remote.key, remote.epoch] = Shown.of(answer.get("shown"))
    batch.shown = shown


def _check(batch: Batch) -> Step:
    if batch.open_spans():
        answer = yield Ask("check")
        _refused(batch, answer)


def _plan(batch: Batch, limits: Limits, tell: bool) -> None:
    """Queue what is to be moved: all that has not failed and is not there."""
    batch.queue.clear()
    if batch.shown is None:
        return
    wanted = np.flatnonzero(batch.left)
    if batch.errors:
        wanted = wanted[~np.isin(wanted, list(batch.errors))]
    batch.left[wanted] = 0
    for request in requests(batch.spans, wanted, limits):
        batch.left[request.first : request.last + 1] += 1
        batch.queue.append(request)
    if tell and batch.notify is not None and not batch.errors:
        batch.queue.append(_tell())


def _move(batch: Batch, known: Known, limits: Limits, tell: bool) -> Step:
    while (failure := (yield Move())) is not None:
        if batch.pending.abandoned:
            batch.give_up(lambda: TransferCancelled("given up"))
        elif is_tell(failure.request):
            batch.fail_all(lambda name=failure.status: error_of(name))
        elif cause_of(failure.status) in (Cause.REMOTE, Cause.SILENT):
            # A card can also fall silent over a registration that ends while it is read (soft-RoCE does).
            yield from _explain(batch, failure, known)
            _plan(batch, limits, tell)
        else:
            request = failure.request
            batch.attempts += 1
            if batch.attempts >= _MOST_FAILURES:
                batch.fail_all(lambda name=failure.status: error_of(name))
            batch.fail(range(request.first, request.last + 1), lambda name=failure.status: error_of(name))
            _plan(batch, limits, tell)


def _explain(batch: Batch, failure: Failure, known: Known) -> Step:
    """The owner says which spans it refuses, and why. If none, its key for the card is a new one by now."""
    known.pop((batch.remote.key, batch.remote.epoch), None)
    yield from _check(batch)
    batch.attempts += 1
    if batch.attempts >= _MOST_FAILURES:
        batch.fail_all(lambda: error_of(failure.status))
    elif batch.open_spans():
        yield from _find(batch, known)


def _digests(batch: Batch) -> Generator[Ask | Move, Any, dict[int, bytes]]:
    if not batch.write:
        local, nbytes, buffer = batch.spans.local, batch.spans.nbytes, batch.local.buffer
        return {index: checksum(buffer[local[index] : local[index] + nbytes[index]]) for index in batch.open_spans()}
    answer = yield Ask("digest")
    asked = batch.asked
    if _refused(batch, answer):
        return {}
    try:
        digests = [bytes.fromhex(digest) for digest in answer["digests"]]
        return dict(zip(asked, digests, strict=True))
    except (KeyError, TypeError, ValueError):
        raise BrokenWire("not the checksums that were asked for") from None


def _refused(batch: Batch, answer: Message) -> bool:
    """Take note of what the owner refused: all, or some of the spans that it was asked about."""
    try:
        if "refused" in answer:
            kind, why = answer["refused"]
            batch.fail_all(lambda: _error(kind, why))
            return True
        for position, kind, why in cast("list[tuple[int, str, str]]", answer.get("errors", [])):
            batch.fail([batch.asked[position]], lambda kind=kind, why=why: _error(kind, why))
    except (TypeError, ValueError, IndexError):
        raise BrokenWire("not an answer") from None
    return False


def _error(kind: str, why: str) -> TransferError:
    return KINDS.get(str(kind), TransferError)(str(why)[:300])
