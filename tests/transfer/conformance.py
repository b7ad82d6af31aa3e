"""What the conformance suite's files share, and how much it asks of an endpoint.

Everything, or little where the machine is an emulated one (`MCJAX_CONFORMANCE=small`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from hypothesis import HealthCheck

from mcjax.errors import TransferError
from mcjax.transfer.transports.endpoint import RegionDescriptor, SpanResults
from mcjax.transfer.transports.secret import Secret

SECRET = Secret(b"conformance-secret")

SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
"""What property tests of endpoints are: their fixtures are made once, and a loaded machine is no failure."""

Needs = Callable[..., None]
"""`needs("notify", ...)` skips the test for a kind that declares that it cannot."""
Show = Callable[..., RegionDescriptor]
"""`show(nbytes, seed, ...)`: a region of the peer's, taken back after the test."""

SMALL = os.environ.get("MCJAX_CONFORMANCE") == "small"

SIZES = [1, 7, 4096, 65537, 1 << 20] if SMALL else [1, 7, 4096, 65537, 1 << 20, 64 << 20]
BIG_BYTES = (1 << 20) if SMALL else (8 << 20)
"""Takes long enough that something can happen meanwhile."""
MANY_SPANS = 300 if SMALL else 3000
ROUNDS = 3 if SMALL else 6
EXAMPLES = 5 if SMALL else 15
SHORT_S = 6.0 if SMALL else 0.4
"""A deadline that is meant to pass."""
PATIENCE_S = 300.0 if SMALL else 30.0
"""How long an answer is waited for that has to come: a bound on hangs, no measurement."""
WATCH_S = 2.0 if SMALL else 0.15
"""How long bytes are watched that must not change any more."""


def kinds_of(results: SpanResults) -> dict[int, type[TransferError]]:
    return {index: type(error) for index, error in results.errors.items()}


def until(condition: Callable[[], bool]) -> None:
    """For what happens on its own: wait until it has."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come")
