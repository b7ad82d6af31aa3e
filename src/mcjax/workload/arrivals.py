"""When sessions start: renewal processes with a given rate and burstiness."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mcjax.types import NS_PER_S
from mcjax.workload.streams import NS_PER_US


def arrivals_ns(rng: np.random.Generator, count: int, rate_per_s: float, cv: float = 1.0) -> NDArray[np.int64]:
    """`[count]` arrival times (ns, ascending): mean rate `rate_per_s`, coefficient of variation `cv` of the gaps.

    `cv == 1` is a Poisson process, `cv == 0` an even beat; others have gamma gaps, one of the two families that
    ServeGen (arXiv 2505.09999) fits to real clients. Gaps are whole microseconds: a last-bit difference between two
    machines' maths libraries then cannot reach an arrival, except once in millions. The first `n` do not depend on
    `count`.
    """
    mean_us = NS_PER_S / NS_PER_US / rate_per_s
    if cv == 0:
        gaps_us = np.full(count, mean_us)
    elif cv == 1:
        gaps_us = rng.exponential(mean_us, count)
    else:
        shape = 1.0 / (cv * cv)
        gaps_us = rng.gamma(shape, mean_us / shape, count)
    return np.cumsum(np.rint(gaps_us).astype(np.int64)) * NS_PER_US
