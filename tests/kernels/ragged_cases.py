"""Ragged batches drawn by hypothesis; what is made of them: `mcjax/kernels/proof/batches.py`."""

from __future__ import annotations

from hypothesis import strategies as st

from mcjax.kernels.proof.batches import Case, Shape, decode_case, make_case

__all__ = ["Case", "Shape", "decode_case", "edge_sizes", "make_case", "ragged_sequences"]


@st.composite
def edge_sizes(draw: st.DrawFn, page: int, most: int, least: int = 0) -> int:
    """A number of tokens, with a taste for nothing, one, whole pages and one more or less."""
    edges = [size + off for size in range(0, most + 1, page) for off in (-1, 0, 1)]
    chosen = draw(st.one_of(st.sampled_from(edges), st.integers(least, most)))
    return min(max(chosen, least), most)


@st.composite
def ragged_sequences(draw: st.DrawFn, shape: Shape, sequences: int = 3) -> list[tuple[int, int]]:
    """(prefix, new tokens) of as many sequences, which fit the table; either may be 0."""
    most = shape.table_pages * shape.page_tokens
    found: list[tuple[int, int]] = []
    for _ in range(sequences):
        length = draw(edge_sizes(shape.page_tokens, most))
        found.append((draw(edge_sizes(shape.page_tokens, most - length)), length))
    return found
