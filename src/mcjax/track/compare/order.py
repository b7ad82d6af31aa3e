"""Order statistics of values in blocks, when each block is counted several times, or never."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

COUNTS = 1 << 22
"""Numbers held at a time while ranks are looked for."""


class BlockOrder:
    """Values and the block of each. `values`, `index`: `[N]`; the index is below `blocks`.

    Values are sorted once, and counted by cells of about sqrt(N) neighbours; a rank is looked for among the cells, then
    inside one. Resampling thousands of times so costs little more than once, whatever N is.
    """

    def __init__(self, values: NDArray[np.int64], index: NDArray[np.int64], blocks: int):
        order = np.argsort(values, kind="stable")
        self.values, self._index = values[order], index[order]
        self._width = max(1, math.isqrt(len(values)))
        cells = -(-len(values) // self._width)
        counts = np.zeros((cells, blocks), np.int64)
        np.add.at(counts, (np.arange(len(values)) // self._width, self._index), 1)
        self.sizes = counts.sum(axis=0)
        """`[B]`: values in each block."""
        # Floats, since only their matrix products are quick; exact far beyond any count here.
        self._up_to = counts.cumsum(axis=0).T.astype(np.float64)

    def at_ranks(self, weights: NDArray[np.int64], ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """`[R, Q]`: the values at `ranks`, `[R, Q]` from 0, where `weights`, `[R, B]`, say how often a block counts.

        Every rank lies below the weighted count of its row.
        """
        found = np.empty_like(ranks)
        step = max(1, COUNTS // max(len(self._up_to[0]), self._width))
        for first in range(0, len(weights), step):
            some = slice(first, first + step)
            found[some] = self._some(weights[some], ranks[some])
        return found

    def _some(self, weights: NDArray[np.int64], ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        up_to = weights @ self._up_to  # [r, cells]
        found = np.empty_like(ranks)
        for column in range(ranks.shape[1]):
            rank = ranks[:, column]
            cell = (up_to <= rank[:, None]).sum(axis=1)
            for one in np.unique(cell):
                rows = np.flatnonzero(cell == one)
                members = slice(one * self._width, (one + 1) * self._width)
                before = up_to[rows, one - 1] if one else np.zeros(len(rows))
                inside = before[:, None] + weights[rows][:, self._index[members]].cumsum(axis=1)
                found[rows, column] = self.values[members][(inside <= rank[rows, None]).sum(axis=1)]
        return found
