"""Never fetch what turns out missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mcjax.sched.base import Recompute, Replica
from mcjax.types import Span


@dataclass(frozen=True)
class AlwaysRecompute:
    """Compute every missing span again."""

    def source(
        self, span: Span, replicas: Sequence[Replica], recompute_s: float, rng: np.random.Generator
    ) -> Replica | Recompute:
        return Recompute.RECOMPUTE
