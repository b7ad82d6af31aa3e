"""What all layers of one call of a model share."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Float, Int

from mcjax.kernels.base import Attention


@dataclass(frozen=True, slots=True)
class Step:
    """A batch of rows: where their tokens stand, and what attends. `flat` is `linear.einsum`'s."""

    positions: Int[Array, "B T"]
    page_table: Int[Array, "B N"]
    turn: Float[Array, "B T 2 D/2"]
    """Rotary angles of layers that see everything."""
    local_turn: Float[Array, "B T 2 D/2"]
    """And of those with a window."""
    attend: Attention
    flat: bool
