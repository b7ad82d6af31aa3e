"""`fp8`: eight-bit floats, four bits of exponent and three of mantissa (E4M3 of arXiv:2209.05433), times a scale."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mcjax.kvpool.encodings.base import Quantised


class FP8(Quantised):
    """`|x - x'|` is at most `2^-4 |x|` where `|x|` is `2^-6` scales or more, and at most `2^-10` scales below that, and
    then comes the rounding of the block's dtype."""

    name = "fp8"
    largest = 448.0
    smallest_scale = 2.0**-116
    number = np.dtype(ml_dtypes.float8_e4m3fn)

    def quantise(self, scaled: NDArray[np.float32]) -> NDArray[Any]:
        return scaled.astype(self.number)
