"""Never fetch what turns out missing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mcjax.sched.base import Missing, Recompute, Replica


@dataclass(frozen=True)
class AlwaysRecompute:
    """Compute every missing span again."""

    def source(self, missing: Missing, rng: np.random.Generator) -> Replica | Recompute:
        return Recompute.RECOMPUTE
