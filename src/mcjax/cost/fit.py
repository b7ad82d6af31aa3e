"""From measurements to the constants of a `Fitted` cost model: least squares of relative errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import ConfigError


def _relative_least_squares(columns: list[NDArray[np.float64]], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Coefficients that minimise sum((prediction / seconds - 1)^2), none below 0 (a negative one is dropped)."""
    kept = list(range(len(columns)))
    solution = np.zeros(len(columns))
    while kept:
        matrix = np.stack([columns[index] for index in kept], axis=1) / seconds[:, None]
        # Columns differ by ten orders of magnitude; scaling keeps the solver's cut-off from dropping one.
        scale = np.linalg.norm(matrix, axis=0)
        scaled = cast(Any, np.linalg.lstsq)(matrix / scale, np.ones(len(seconds)), rcond=None)[0]
        found: NDArray[np.float64] = np.asarray(scaled, np.float64) / scale
        if (found >= 0).all():
            solution[kept] = found
            break
        kept.pop(int(found.argmin()))
    return solution


def fit_prefill(tokens: Sequence[int], seconds: Sequence[float]) -> tuple[int, int]:
    """(`prefill_ps_per_token`, `prefill_fs_per_token_squared`) of whole prompts, empty cache, two sizes or more."""
    if len(set(tokens)) < 2:
        raise ConfigError("tokens", list(tokens), "at least two prompt lengths are needed for a n + b n^2")
    return fit_chunks([0] * len(tokens), tokens, seconds)


def fit_chunks(starts: Sequence[int], lengths: Sequence[int], seconds: Sequence[float]) -> tuple[int, int]:
    """The same constants from chunks of `lengths` tokens after `starts` cached ones: each took T(start + length) -
    T(start), T(n) = a n + b n^2. Two different (start, length) or more.
    """
    if len(set(zip(starts, lengths, strict=True))) < 2:
        raise ConfigError("measurements", len(lengths), "at least two different prefill chunks are needed")
    start = np.asarray(starts, np.float64)
    length = np.asarray(lengths, np.float64)
    columns = [length, length * (2 * start + length)]
    linear, square = _relative_least_squares(columns, np.asarray(seconds, np.float64))
    return round(linear * 1e12), round(square * 1e15)


def fit_decode(batches: Sequence[int], contexts: Sequence[int], seconds: Sequence[float]) -> tuple[int, int, int]:
    """(`decode_base_ns`, `decode_ns_per_sequence`, `decode_ps_per_context_token`) of single steps.

    `contexts` are total cached tokens of the batch. With one batch size only, base and per-sequence cost cannot be told
    apart and everything goes to the base.
    """
    batch = np.asarray(batches, np.float64)
    columns = [np.ones(len(batch)), np.asarray(contexts, np.float64)]
    if len(set(batches)) > 1:
        columns.append(batch)
    solution = _relative_least_squares(columns, np.asarray(seconds, np.float64))
    per_sequence = float(solution[2]) if len(solution) > 2 else 0.0
    return round(solution[0] * 1e9), round(per_sequence * 1e9), round(solution[1] * 1e12)
