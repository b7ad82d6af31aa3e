"""How far a cost model is from measurements, by regime: where its constants may be used, and where not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import fsum

from mcjax.cost.base import CostModel
from mcjax.cost.measurements import Measurement
from mcjax.types import NS_PER_S

SHORT_PROMPT_TOKENS = 2048
SMALL_BATCH = 8
SHORT_CONTEXT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class RegimeError:
    """Relative errors |predicted / measured - 1| of the rows of one regime."""

    regime: str
    rows: int
    mean: float
    largest: float


_REGIMES: tuple[tuple[str, Callable[[Measurement], bool]], ...] = (
    (
        f"prefill, up to {SHORT_PROMPT_TOKENS} tokens",
        lambda row: row.kind == "prefill" and row.length_tokens <= SHORT_PROMPT_TOKENS,
    ),
    (
        f"prefill, over {SHORT_PROMPT_TOKENS} tokens",
        lambda row: row.kind == "prefill" and row.length_tokens > SHORT_PROMPT_TOKENS,
    ),
    ("prefill after a cached prefix", lambda row: row.kind == "prefill" and row.start_tokens > 0),
    (f"decode, batch up to {SMALL_BATCH}", lambda row: row.kind == "decode" and row.batch <= SMALL_BATCH),
    (f"decode, batch over {SMALL_BATCH}", lambda row: row.kind == "decode" and row.batch > SMALL_BATCH),
    (
        f"decode, up to {SHORT_CONTEXT_TOKENS} tokens a sequence",
        lambda row: row.kind == "decode" and row.context_tokens <= SHORT_CONTEXT_TOKENS * row.batch,
    ),
    (
        f"decode, over {SHORT_CONTEXT_TOKENS} tokens a sequence",
        lambda row: row.kind == "decode" and row.context_tokens > SHORT_CONTEXT_TOKENS * row.batch,
    ),
    ("mixed", lambda row: row.kind == "mixed"),
)


def predicted_s(cost: CostModel, row: Measurement) -> float:
    """Seconds that `cost` expects of the step that `row` measured."""
    if row.kind == "prefill":
        nanoseconds = cost.prefill_ns(row.start_tokens, row.length_tokens)
    elif row.kind == "decode":
        nanoseconds = int(cost.step_ns(row.batch, row.context_tokens, 1)[0])
    else:
        nanoseconds = cost.mixed_ns(row.start_tokens, row.length_tokens, row.batch, row.context_tokens)
    return nanoseconds / NS_PER_S


def errors_by_regime(cost: CostModel, rows: Sequence[Measurement]) -> list[RegimeError]:
    """One entry a regime that has rows. A row counts in each regime that it is in."""
    errors = [abs(predicted_s(cost, row) / row.seconds - 1) for row in rows]
    found: list[RegimeError] = []
    for name, belongs in _REGIMES:
        own = [error for row, error in zip(rows, errors, strict=True) if belongs(row)]
        if own:
            found.append(RegimeError(name, len(own), fsum(own) / len(own), max(own)))
    return found
