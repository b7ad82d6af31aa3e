"""From spans to work requests: what goes to the card as one request, and in which pieces.

Spans that follow one another at the peer go by one request, each with a piece (a scatter-gather element) of its own
where they do not follow one another here too. Spans larger than a slice become several requests, so that a batch can be
given up, and others can go between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mcjax.transfer.transports.endpoint import Spans


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may be: `pieces` at most, `slice_bytes` in all."""

    pieces: int = 16
    slice_bytes: int = 4 << 20


@dataclass(slots=True, eq=False)
class Request:
    """One work request: spans `first` to `last` (inclusive) or a part of one, `remote` offset and `nbytes`; `pieces`:
    (local offset, nbytes) each. `attempts` counts how often it was posted in vain."""

    first: int
    last: int
    remote: int
    nbytes: int
    pieces: list[tuple[int, int]]
    attempts: int = 0


def requests(spans: Spans, wanted: np.ndarray, limits: Limits) -> Iterator[Request]:
    """Requests for the spans at the indices `wanted` (ascending), in their order."""
    current: Request | None = None
    for index in map(int, wanted):
        local, remote, nbytes = int(spans.local[index]), int(spans.remote[index]), int(spans.nbytes[index])
        if current is not None and _extends(current, index, remote, nbytes, limits):
            last_local, last_bytes = current.pieces[-1]
            if last_local + last_bytes == local:
                current.pieces[-1] = (last_local, last_bytes + nbytes)
                current.last, current.nbytes = index, current.nbytes + nbytes
                continue
            if len(current.pieces) < limits.pieces:
                current.pieces.append((local, nbytes))
                current.last, current.nbytes = index, current.nbytes + nbytes
                continue
        if current is not None:
            yield current
        for done in range(0, nbytes, limits.slice_bytes):
            size = min(limits.slice_bytes, nbytes - done)
            current = Request(index, index, remote + done, size, [(local + done, size)])
            if done + size < nbytes:
                yield current
    if current is not None:
        yield current


def _extends(request: Request, index: int, remote: int, nbytes: int, limits: Limits) -> bool:
    follows = request.last + 1 == index and request.remote + request.nbytes == remote
    return follows and request.nbytes + nbytes <= limits.slice_bytes
