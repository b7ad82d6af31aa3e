"""Chooses an implementation of paged attention by name."""

from __future__ import annotations

from typing import Protocol

from jaxtyping import Array, Float, Int, Shaped

from mcjax.errors import ConfigError
from mcjax.kernels.attention.blockwise import paged_attention as blockwise
from mcjax.kernels.attention.reference import paged_attention as reference


class PagedAttention(Protocol):
    """What every implementation offers; `reference.paged_attention` says what each argument means."""

    def __call__(
        self,
        queries: Float[Array, "B T H D"],
        pages: Shaped[Array, "P L 2 page Hkv D"],
        layer: int,
        page_table: Int[Array, "B N"],
        positions: Int[Array, "B T"],
        /,
    ) -> Float[Array, "B T H D"]: ...


def paged_attention(name: str) -> PagedAttention:
    """The implementation called `name`. Raises `ConfigError` that lists the names there are."""
    implementations: dict[str, PagedAttention] = {"blockwise": blockwise, "reference": reference}
    if name not in implementations:
        raise ConfigError("kernels.attention", name, "no such implementation of paged attention", implementations)
    return implementations[name]
