"""Which body of decode runs where."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from mcjax.errors import KernelRefused
from mcjax.kernels.pages import KVPages
from mcjax.kernels.target import Target


def decode(
    queries: Float[Array, "B Q H D"],
    pages: KVPages,
    layer: int,
    page_table: Int[Array, "B N"],
    contexts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    firsts: Int[Array, " B"] | None = None,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    target: Target,
) -> tuple[Float[Array, "B Q H D"], Float[Array, "B Q H"]]:
    """As `reference.decode`, by the body for `target`, with the block sizes that suit the shape.

    Raises `KernelRefused` for arrays that do not go together, and for what the body has no memory for.
    """
    _check(queries, pages, page_table, contexts, lengths, firsts)
    # Imported when it is needed: a platform's Pallas may not be there on another one.
    if target.platform == "tpu":
        from mcjax.kernels.decode.tpu import decode as body
    else:
        from mcjax.kernels.decode.gpu import decode as body
    options = {"window": window, "soft_cap": soft_cap, "scale": scale}
    return body(queries, pages, layer, page_table, contexts, lengths, firsts, target=target, **options)


def _check(
    queries: Float[Array, "B Q H D"],
    pages: KVPages,
    page_table: Int[Array, "B N"],
    contexts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    firsts: Int[Array, " B"] | None,
) -> None:
    batch, _, heads, head_dim = queries.shape
    if pages.head_dim != head_dim:
        raise KernelRefused("decode", f"pages of head dimension {pages.head_dim}", f"queries have {head_dim}")
    if heads % pages.kv_heads:
        problem = f"{heads} query heads over {pages.kv_heads} key heads"
        raise KernelRefused("decode", problem, "each key head needs as many query heads")
    for name, array in (("page_table", page_table), ("contexts", contexts), ("lengths", lengths), ("firsts", firsts)):
        if array is not None and array.shape[0] != batch:
            raise KernelRefused("decode", f"{name} of {array.shape[0]} rows", f"queries have {batch}")
