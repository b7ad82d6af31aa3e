"""Seeds as named streams: what is drawn for one purpose never changes what is drawn for another."""

from __future__ import annotations

import enum

import numpy as np


class Stream(enum.IntEnum):
    """The purposes. Their numbers are part of what makes a run repeatable: never renumber."""

    WORKLOAD = 0
    POLICY = 1
    SAMPLING = 2
    FAULTS = 3


def generator(seed: int, stream: Stream) -> np.random.Generator:
    return np.random.default_rng([seed, stream])


def seed_of(seed: int, stream: Stream) -> int:
    """One number drawn from a stream, for whoever seeds generators of its own."""
    return int(np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0] >> np.uint64(1))
