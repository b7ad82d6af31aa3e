"""`int8`: whole numbers from -127 to 127 times the vector's scale."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.kvpool.encodings.base import Quantised


class Int8(Quantised):
    """Symmetric, without a zero point. `|x - x'|` is at most half a scale, beside the rounding of the block's dtype."""

    name = "int8"
    largest = 127.0
    smallest_scale = 2.0**-125
    number = np.dtype(np.int8)

    def quantise(self, scaled: NDArray[np.float32]) -> NDArray[Any]:
        return np.clip(np.rint(scaled), -127, 127).astype(np.int8)
