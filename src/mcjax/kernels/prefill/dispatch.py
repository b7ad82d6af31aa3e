"""Which body of prefill runs where."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from jaxtyping import Array, Float, Int

from mcjax.errors import KernelRefused
from mcjax.kernels.pages import KVPages
from mcjax.kernels.target import Target

BODIES = {"tpu": ("tpu",), "gpu": ("gpu_mosaic", "gpu")}
"""Of each platform: modules of this package, in the order in which they are asked whether they take a case."""


def prefill(
    queries: Float[Array, "T H D"],
    keys: Float[Array, "T Hkv D"],
    values: Float[Array, "T Hkv D"],
    pages: KVPages,
    layer: int,
    page_table: Int[Array, "B N"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    prefixes: Int[Array, " B"],
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    target: Target,
    body: str | None = None,
) -> tuple[Float[Array, "T H D"], KVPages]:
    """As `reference.prefill`, by the body for `target`: "tpu"; "gpu" (lowered by Triton) or "gpu_mosaic" (Hopper).

    Without a `body` to insist on, the first of the platform's that takes the case. Pages are overwritten in place if
    the caller's `jit` is given them (`donate_argnums`), and else copied first. Raises `KernelRefused` where the body,
    or every body, refuses: with the reason and the way out of the last.
    """
    names = BODIES[target.platform]
    if body is not None and body not in names:
        raise KernelRefused("prefill", f"there is no body {body!r} for {target.platform}", f"take {' or '.join(names)}")
    _check(queries, keys, values, pages)
    arrays = (queries, keys, values, pages, layer, page_table, starts, lengths, prefixes)
    options = {"window": window, "soft_cap": soft_cap, "scale": scale, "target": target}
    if body is not None:
        return _body(body)(*arrays, **options)
    for name in names[:-1]:
        try:
            return _body(name)(*arrays, **options)
        except KernelRefused:
            continue
    return _body(names[-1])(*arrays, **options)


def _body(name: str) -> Callable[..., Any]:
    """Imported when it is needed: a platform's Pallas may not be there on another one."""
    return import_module(f"mcjax.kernels.prefill.{name}").prefill


def _check(queries: Any, keys: Any, values: Any, pages: KVPages) -> None:
    """Raises `KernelRefused` for arrays that do not go together."""
    tokens, heads, head_dim = queries.shape
    wanted = (tokens, pages.kv_heads, head_dim)
    for name, array in (("keys", keys), ("values", values)):
        if array.shape != wanted:
            raise KernelRefused("prefill", f"{name} of shape {array.shape}", f"{wanted} goes with queries and pages")
    if pages.head_dim != head_dim:
        raise KernelRefused("prefill", f"pages of head dimension {pages.head_dim}", f"queries have {head_dim}")
    if heads % pages.kv_heads:
        problem = f"{heads} query heads over {pages.kv_heads} key heads"
        raise KernelRefused("prefill", problem, "each key head needs as many query heads")
