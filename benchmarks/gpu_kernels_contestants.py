"""Who computes a case: what mcjax's dispatch picks, its bodies by name, cuDNN, and the kernels that come with jax."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from gpu_kernels_cases import CUDNN, JAX_MOSAIC, JAX_PAGED, MCJAX, MOSAIC, REFERENCE, TRITON
from gpu_kernels_clock import Loop
from gpu_kernels_inputs import attention_inputs, noise, packing_inputs

from mcjax.cost.kernel_cases import KernelCase
from mcjax.kernels.target import Target

MODULES = {MCJAX: "dispatch", TRITON: "gpu", MOSAIC: "gpu_mosaic", REFERENCE: "reference"}
MOST_COPIES = 16
"""Of the inputs of a kernel that knows no pages, in one turn of the loop."""


class Absent(Exception):
    """An implementation that is not there, or has no such call; and why."""


@dataclass(frozen=True)
class Stage:
    """Where it all runs."""

    target: Target
    rotate_bytes: int


def body_of(implementation: str, kernel: str) -> Callable[..., Any]:
    """The public function of the dispatch, or a body of mcjax by name. Raises `Absent`."""
    package = "kv_pack" if kernel == "kv_unpack" else kernel
    name = f"mcjax.kernels.{package}.{MODULES[implementation]}"
    try:
        found = getattr(importlib.import_module(name), kernel)
    except (ImportError, AttributeError) as problem:
        raise Absent(f"{name}.{kernel} cannot be had ({problem})") from None
    if implementation != REFERENCE:
        return found
    return lambda *arguments, target, **options: found(*arguments, **options)


def options_of(case: KernelCase, more: dict[str, Any]) -> dict[str, Any]:
    """Keywords of the call."""
    if case.kernel in ("prefill", "decode"):
        return {"window": case.window, "soft_cap": more.get("soft_cap")}
    if case.kernel == "kv_pack":
        return {**more, "dtype": case.block_dtype or None}
    return {"first_head": more.get("first_head", 0)}


def loop_of(implementation: str, case: KernelCase, stage: Stage) -> Loop:
    """The call as a loop over inputs that no cache holds. Raises `Absent`."""
    if implementation in MODULES:
        call = body_of(implementation, case.kernel)
        return _OWN[case.kernel](call, case, stage)
    if implementation == CUDNN:
        return _cudnn(case, stage)
    if implementation == JAX_PAGED:
        return _jax_paged(case, stage)
    assert implementation == JAX_MOSAIC
    return _jax_mosaic(case)


def _prefill(call: Callable[..., Any], case: KernelCase, stage: Stage) -> Loop:
    inputs = attention_inputs(case, stage.rotate_bytes)
    layers = inputs.pages.layers
    options = options_of(case, {"soft_cap": 30.0 if case.soft_cap else None})

    def body(state: Any, constants: Any, index: Any) -> Any:
        out, pages = state
        queries, keys, values, *arrays = constants
        queries = _again(queries, out)
        return call(queries, keys, values, pages, index % layers, *arrays, target=stage.target, **options)

    arrays = (inputs.page_table, inputs.starts, inputs.lengths, inputs.before)
    constants = (inputs.queries, inputs.keys, inputs.values, *arrays)
    return Loop(body, (jnp.zeros_like(inputs.queries), inputs.pages), constants)


def _decode(call: Callable[..., Any], case: KernelCase, stage: Stage) -> Loop:
    inputs = attention_inputs(case, stage.rotate_bytes)
    layers = inputs.pages.layers
    options = options_of(case, {"soft_cap": 30.0 if case.soft_cap else None})

    def body(state: Any, constants: Any, index: Any) -> Any:
        queries, *arrays = constants
        pages, *arrays = arrays
        return call(_again(queries, state), pages, index % layers, *arrays, target=stage.target, **options)

    state = (jnp.zeros_like(inputs.queries), jnp.zeros(inputs.queries.shape[:3], jnp.float32))
    return Loop(body, state, (inputs.queries, inputs.pages, inputs.page_table, inputs.before, inputs.lengths))


def _again(queries: Any, result: Any) -> Any:
    """The queries, of which XLA is not to know that they are the same in every turn: it would call once."""
    return jax.lax.optimization_barrier((queries, result))[0]


def _pack(call: Callable[..., Any], case: KernelCase, stage: Stage) -> Loop:
    turns = _turns(case, stage)
    pages, slots, _ = packing_inputs(case, turns)
    options = options_of(case, {})

    def body(state: Any, constants: Any, index: Any) -> Any:
        pages, slots = constants
        return call(pages, slots[index % turns], target=stage.target, **options)

    state = jax.tree.map(
        lambda one: jnp.zeros(one.shape, one.dtype),
        jax.eval_shape(lambda: body(None, (pages, slots), 0)),
    )
    return Loop(body, state, (pages, slots))


def _unpack(call: Callable[..., Any], case: KernelCase, stage: Stage) -> Loop:
    turns = _turns(case, stage)
    pages, slots, blocks = packing_inputs(case, turns)
    options = options_of(case, {})

    def body(state: Any, constants: Any, index: Any) -> Any:
        slots, blocks = constants
        return call(state, slots[index % turns], blocks, target=stage.target, **options)

    return Loop(body, pages, (slots, blocks))


_OWN = {"prefill": _prefill, "decode": _decode, "kv_pack": _pack, "kv_unpack": _unpack}


def _turns(case: KernelCase, stage: Stage) -> int:
    return min(max(-(-stage.rotate_bytes // case.cost().bytes), 2), 16)


def _dense(case: KernelCase) -> tuple[int, int, int]:
    """Sequences, and of each its context and new tokens; raises `Absent` for what only pages can have."""
    if case.kv_dtype != case.dtype or case.window is not None or case.soft_cap:
        raise Absent("not compared: other numbers than the queries', a window or a soft cap")
    ((count, before, new),) = case.sequences
    if case.kernel == "prefill":
        if before:
            raise Absent("has no causal mask that begins after a prefix")
        return count, new, new
    return count, before, new


def _cudnn(case: KernelCase, stage: Stage) -> Loop:
    """cuDNN's attention over contiguous keys and values."""
    count, context, new = _dense(case)
    if stage.target.interpret:
        raise Absent("needs a GPU")
    copies = min(max(-(-stage.rotate_bytes // case.cost().read_bytes), 1), MOST_COPIES)
    if case.kernel == "prefill":
        copies = 1
    keys, values = (
        tuple(noise((count, context, case.kv_heads, case.head_dim), case.dtype, salt + copy) for copy in range(copies))
        for salt in (100, 200)
    )
    queries = noise((count, new, case.heads, case.head_dim), case.dtype, 3)

    def body(state: Any, constants: Any, _: Any) -> Any:
        queries, *pairs = constants
        for key, value in zip(*pairs, strict=True):
            again = _again(queries, state)
            causal = case.kernel == "prefill"
            state = jax.nn.dot_product_attention(again, key, value, is_causal=causal, implementation="cudnn")
        return state

    return Loop(body, jnp.zeros_like(queries), (queries, keys, values), calls=copies)


def _jax_paged(case: KernelCase, stage: Stage) -> Loop:
    """`jax.experimental.pallas.ops.gpu.paged_attention`, with the defaults that it has."""
    count, context, new = _dense(case)
    if case.kernel != "decode" or new != 1:
        raise Absent("takes one query token a sequence")
    paged = _imported("jax.experimental.pallas.ops.gpu.paged_attention").paged_attention
    width = -(-context // case.page_tokens)
    turns = min(max(-(-stage.rotate_bytes // case.cost().read_bytes), 1), 32)
    shape = (case.kv_heads, turns * count * width, case.page_tokens, case.head_dim)
    keys, values = (noise(shape, case.dtype, salt) for salt in (100, 200))
    tables = jax.random.permutation(jax.random.key(0), turns * count * width)
    tables = tables.astype(jnp.int32).reshape(turns, count, width)
    lengths = jnp.full(count, context, jnp.int32)
    # Its splits take a whole number of blocks of pages.
    splits = next(split for split in (16, 8, 4, 2, 1) if width % split == 0)
    # Of its default, 8 pages a block, those of 64 tokens do not fit into shared memory.
    block_pages = math.gcd(width // splits, max(256 // case.page_tokens, 1))
    options = {"k_splits": splits, "pages_per_compute_block": block_pages}

    def body(state: Any, constants: Any, index: Any) -> Any:
        queries, keys, values, tables, lengths = constants
        again = _again(queries, state)
        return paged(again, keys, values, tables[index % turns], lengths, interpret=stage.target.interpret, **options)

    queries = noise((count, case.heads, case.head_dim), case.dtype, 3)
    return Loop(body, jnp.zeros_like(queries), (queries, keys, values, tables, lengths))


def _jax_mosaic(case: KernelCase) -> Loop:
    """`jax.experimental.pallas.ops.gpu.attention_mgpu`, with the block sizes of its own benchmark, in float16.

    It says that it takes bfloat16 too, and does not compile then (jax 0.10.2). The two cost a GPU the same.
    """
    count, context, new = _dense(case)
    if case.kernel != "prefill":
        raise Absent("is a prefill kernel")
    module = _imported("jax.experimental.pallas.ops.gpu.attention_mgpu")
    config = module.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2, causal=True)
    keys, values = (noise((count, context, case.kv_heads, case.head_dim), "float16", salt) for salt in (100, 200))
    queries = noise((count, new, case.heads, case.head_dim), "float16", 3)

    def body(state: Any, constants: Any, _: Any) -> Any:
        queries, keys, values = constants
        return module.attention(_again(queries, state), keys, values, config)

    return Loop(body, jnp.zeros_like(queries), (queries, keys, values))


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as problem:  # jax's own import of what it does not bring
        raise Absent(f"cannot be imported ({type(problem).__name__}: {problem})") from None
