"""Numbers of a body against the reference on the same device, at sizes that are served.

The reference works in float32, a key head and a few sequences at a time, so that it fits beside the case.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_kernels_cases import Checked
from gpu_kernels_contestants import Stage, body_of, options_of
from gpu_kernels_inputs import attention_inputs, packing_inputs

from mcjax.kernels.decode.reference import decode
from mcjax.kernels.kv_pack.reference import kv_pack, kv_unpack
from mcjax.kernels.prefill.reference import prefill

ROWS_AT_ONCE = 4
BOUNDS = {"bfloat16": 1e-2, "float32": 2e-3}
"""Of the norm of the difference over the norm of the reference. A GPU's float32 products may be TF32: 10 bits."""
LOGARITHM_BOUND = 2e-2


@dataclass(frozen=True)
class Error:
    """How far a body is from the reference: by name, what was found and what it may be."""

    found: dict[str, float]
    bounds: dict[str, float]

    @property
    def fine(self) -> bool:
        return all(self.found[name] <= bound for name, bound in self.bounds.items())  # NaN is not


def checked(implementation: str, check: Checked, stage: Stage) -> Error:
    """Raises `Absent`."""
    call = functools.partial(body_of(implementation, check.case.kernel), target=stage.target)
    return {"prefill": _prefill, "decode": _decode, "kv_pack": _pack, "kv_unpack": _unpack}[check.case.kernel](
        call, check
    )


def _prefill(call: Any, check: Checked) -> Error:
    case, options = check.case, options_of(check.case, check.options)
    inputs = attention_inputs(case, rotate_bytes=1)
    layer = inputs.pages.layers - 1
    arrays = (inputs.page_table, inputs.starts, inputs.lengths, inputs.before)
    run = jax.jit(functools.partial(call, **options))
    out, pages = run(inputs.queries, inputs.keys, inputs.values, inputs.pages, layer, *arrays)
    groups = case.heads // case.kv_heads

    @jax.jit
    def one(head: Any) -> Any:
        """Squares of the difference and of the reference of one key head, and the numbers of its pages that differ."""

        def heads(whole: Any, width: int, axis: int) -> Any:
            return jax.lax.dynamic_slice_in_dim(whole, head * width, width, axis)

        held = jax.tree.map(lambda one: heads(one, 1, 3), inputs.pages)
        queries = heads(inputs.queries, groups, 1)
        keys, values = heads(inputs.keys, 1, 1), heads(inputs.values, 1, 1)
        wanted, stored = prefill(queries, keys, values, held, layer, *arrays, **options)
        found = jax.tree.map(lambda one: heads(one, 1, 3), pages)
        return (*_squares(heads(out, groups, 1), wanted), _different(found, stored))

    parts = np.asarray([jax.device_get(one(head)) for head in range(case.kv_heads)])
    difference, size, other = parts.sum(axis=0)
    return Error(
        {"result": float(np.sqrt(difference / size)), "pages": float(other / case.kv_heads)},
        {"result": BOUNDS[case.dtype], "pages": 0.0},
    )


def _decode(call: Any, check: Checked) -> Error:
    case, options = check.case, options_of(check.case, check.options)
    inputs = attention_inputs(case, rotate_bytes=1)
    layer = inputs.pages.layers - 1
    run = jax.jit(functools.partial(call, **options))
    out, logarithms = run(inputs.queries, inputs.pages, layer, inputs.page_table, inputs.before, inputs.lengths)
    rows = min(ROWS_AT_ONCE, len(inputs.before))

    @jax.jit
    def some(first: Any) -> Any:
        def part(whole: Any) -> Any:
            return jax.lax.dynamic_slice_in_dim(whole, first, rows, 0)

        arrays = (part(inputs.page_table), part(inputs.before), part(inputs.lengths))
        wanted, logs = decode(part(inputs.queries), inputs.pages, layer, *arrays, **options)
        return (*_squares(part(out), wanted), jnp.abs(part(logarithms) - logs).max())

    parts = np.asarray([jax.device_get(some(first)) for first in range(0, len(inputs.before), rows)])
    difference, size, _ = parts.sum(axis=0)
    return Error(
        {"result": float(np.sqrt(difference / size)), "logarithm": float(parts[:, 2].max())},
        {"result": BOUNDS[case.dtype], "logarithm": LOGARITHM_BOUND},
    )


def _pack(call: Any, check: Checked) -> Error:
    pages, slots, _ = packing_inputs(check.case, 1)
    options = options_of(check.case, check.options)
    found = jax.jit(functools.partial(call, **options))(pages, slots[0])
    return _same(found, jax.jit(functools.partial(kv_pack, **options))(pages, slots[0]))


def _unpack(call: Any, check: Checked) -> Error:
    pages, slots, blocks = packing_inputs(check.case, 1, check.options.get("heads"))
    options = options_of(check.case, check.options)
    found = jax.jit(functools.partial(call, **options))(pages, slots[0], blocks)
    return _same(found, jax.jit(functools.partial(kv_unpack, **options))(pages, slots[0], blocks))


def _same(found: Any, wanted: Any) -> Error:
    """To the bit: checksums of blocks depend on it."""
    return Error({"numbers": float(_different(found, wanted))}, {"numbers": 0.0})


def _squares(found: Any, wanted: Any) -> tuple[Any, Any]:
    found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
    return jnp.square(found - wanted).sum(), jnp.square(wanted).sum()


@jax.jit
def _different(found: Any, wanted: Any) -> Any:
    """The larger share of numbers, and of scales, whose bits are others."""
    shares = [jnp.mean((_bits(found.data) != _bits(wanted.data)).astype(jnp.float32))]
    if wanted.scales is not None:
        same = (found.scales == wanted.scales) | (jnp.isnan(found.scales) & jnp.isnan(wanted.scales))
        shares.append(jnp.mean((~same).astype(jnp.float32)))
    return jnp.stack(shares).max()


def _bits(numbers: Any) -> Any:
    return jax.lax.bitcast_convert_type(numbers, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[numbers.dtype.itemsize])
