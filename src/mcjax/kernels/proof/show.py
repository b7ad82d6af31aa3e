"""Shows one cell: runs a body beside its reference, or compiles it for a device that is not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from mcjax.cost import catalogue
from mcjax.errors import CompileFailed, KernelRefused, MissingExtra, VerificationError
from mcjax.kernels.decode.reference import decode
from mcjax.kernels.kv_pack.blocks import KVBlocks
from mcjax.kernels.kv_pack.reference import kv_pack, kv_unpack
from mcjax.kernels.pages import LARGEST, KVPages
from mcjax.kernels.prefill.reference import prefill
from mcjax.kernels.proof.batches import Shape, decode_case, make_case
from mcjax.kernels.proof.cells import CONTEXT_TOKENS, DEVICES, INTERPRETED, TPUS, Cell, missing_for
from mcjax.kernels.target import Target

Status = Literal["passed", "failed", "crashed", "overdue"]

BOUNDS = {"float32": 2.0**-16, "bfloat16": 2.0**-7}
"""By the dtype of queries, the largest error of a result as a share of the largest value that it is a mean of. In
bfloat16 it is two roundings of half a unit in the last place, of a weight and of the result. Pages, quantised or not,
are read exactly by the reference, and are part of neither."""

LOGARITHM_BOUND = 8
"""The error of a logarithm is that of the largest score, which is larger than a value: so many times the bound."""

LAYER = 1

PAGES_BYTES = {"tpu": 4 << 30, "gpu": 8 << 30}
"""Of the pages that are compiled for: beyond what 32-bit indices of bytes reach, and on a GPU those of one-byte numbers
too. A v5e has 16 GB, for weights as well."""

PACKED_PAGES = 64
"""In one call, at most."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a cell."""

    status: Status
    error: str = ""
    facts: dict[str, float] = field(default_factory=dict)
    """Largest error as a share of its bound; or bytes, registers and spills, as the compiler gave them."""


def show(cell: Cell) -> Outcome:
    """What comes of a cell, whatever it raises. Raises `MissingExtra` where this environment cannot tell."""
    if lacks := missing_for(cell.rung):
        raise MissingExtra(*lacks)
    try:
        if cell.rung in INTERPRETED:
            return Outcome("passed", facts=_run(cell))
        return Outcome("passed", facts=_compiled(cell))
    except (CompileFailed, KernelRefused, VerificationError) as error:
        return Outcome("failed", str(error))
    except Exception as error:  # a row of the table is what becomes of any error
        return Outcome("failed", f"{type(error).__name__}: {error}")


def _run(cell: Cell) -> dict[str, float]:
    """The body interpreted beside its reference. Raises `VerificationError` where they differ, or a race is found."""
    call = partial(cell.function(), target=Target(cell.platform, interpret=True))
    check = {"prefill": _prefill, "decode": _decode, "kv_pack": _kv_pack, "kv_unpack": _kv_unpack}[cell.kernel]
    if cell.rung == "interpret":
        return check(cell, call)
    from mcjax.kernels.proof.races import races_of

    facts, races = races_of(lambda interpret: check(cell, partial(call, interpret=interpret)))
    if races:
        raise VerificationError(f"{len(races)} races, the first: {races[0]}")
    return facts


def _jitted(kernel: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What the kernel gives, compiled as a whole. `arguments` that are no arrays are part of the program."""
    static = tuple(index for index, argument in enumerate(arguments) if isinstance(argument, int))
    return jax.jit(partial(kernel, **options), static_argnums=static)(*arguments)


def _shape(cell: Cell, table_pages: int = 3) -> Shape:
    heads, kv_heads = cell.device_heads
    return Shape(
        heads,
        kv_heads,
        cell.head_dim,
        cell.page_tokens,
        table_pages,
        layers=2,
        layer=LAYER,
        dtype=cell.compute_dtype,
        kv_dtype=cell.dtype,
    )


def _options(cell: Cell) -> dict[str, Any]:
    """A window of a page and one more, so that it begins inside of pages and at their edges."""
    return {"window": {"window": cell.page_tokens + 1}, "soft_cap": {"soft_cap": 3.0}}.get(cell.feature, {})


def _prefill(cell: Cell, body: Callable[..., Any]) -> dict[str, float]:
    page = cell.page_tokens
    # No prefix; one token; up to the edge of a page, over it, from it on; nothing at all.
    sequences = [(0, 1), (page - 1, 2), (page, 1), (2 * page - 3, 3), (0, page + 1), (page + 1, 0)]
    case = make_case(np.random.default_rng(0), _shape(cell, 2), sequences)
    rows = int(case.starts[-1]) + 1
    queries, keys, values, pages, layer, *places = case.prefill_arguments
    new = queries[:rows], keys[:rows], values[:rows]
    options = _options(cell)
    out, found = _jitted(body, *new, pages, layer, *places, **options)
    wide = [array.astype(jnp.float32) for array in new]
    wanted, _ = _jitted(prefill, *wide, _wide(pages), layer, *places, **options)
    stored = pages.write(layer, *_places(case, rows), jnp.stack(new[1:], axis=1))
    _same_bits("a page", found.data, stored.data)
    if stored.scales is not None:
        _same_bits("a scale", found.scales, stored.scales)
    # A value that is stored is no further from its own than from zero: the largest new one bounds nothing else.
    largest = max(float(jnp.nanmax(jnp.abs(values))), _largest(pages, layer))
    return {"error": _close(cell, out, wanted, largest)}


def _places(case: Any, rows: int) -> tuple[jax.Array, jax.Array]:
    """Page and offset of each row; a page beyond all of them for rows of nobody."""
    page, offset = np.full(rows, case.pages.data.shape[0]), np.zeros(rows, int)
    for b, (start, length, prefix) in enumerate(zip(case.starts, case.lengths, case.prefixes)):
        position = prefix + np.arange(length)
        page[start : start + length] = case.page_table[b, position // case.shape.page_tokens]
        offset[start : start + length] = position % case.shape.page_tokens
    return jnp.asarray(page), jnp.asarray(offset)


def _decode(cell: Cell, body: Callable[..., Any]) -> dict[str, float]:
    page, several = cell.page_tokens, cell.feature == "several"
    contexts = [1, page - 1, page, page + 1, 2 * page, 0]
    rows = [(context, min(context, 1 + index % 3 if several else 1)) for index, context in enumerate(contexts)]
    arguments = decode_case(np.random.default_rng(0), _shape(cell, 2), rows, 3 if several else 1)
    options = _options(cell)
    out, logs = _jitted(body, *arguments, **options)
    queries, pages, layer, *rest = arguments
    wanted, wanted_logs = _jitted(decode, queries.astype(jnp.float32), _wide(pages), layer, *rest, **options)
    worst = _close(cell, out, wanted, _largest(pages, layer))
    return {"error": max(worst, _close(cell, logs, wanted_logs, LOGARITHM_BOUND))}


def _packing(cell: Cell) -> tuple[KVPages, jax.Array, dict[str, Any], str]:
    """Pages with NaN at offsets of nobody, slots, the range of heads, and the blocks' dtype."""
    shape = _shape(cell)
    if cell.feature == "part":
        shape = replace(shape, kv_heads=shape.kv_heads + 1)
    case = make_case(np.random.default_rng(0), shape, [(2 * cell.page_tokens + 1, 0), (cell.page_tokens, 0)])
    slots = jnp.asarray([case.page_table[0, 2], case.page_table[1, 0], case.page_table[0, 0]])
    options = {"first_head": 1, "heads": shape.kv_heads - 1} if cell.feature == "part" else {}
    other = "int8" if cell.dtype != "int8" else "float8_e4m3fn"
    return case.pages, slots, options, other if cell.feature == "encoded" else cell.dtype


def _kv_pack(cell: Cell, body: Callable[..., Any]) -> dict[str, float]:
    pages, slots, options, dtype = _packing(cell)
    found, wanted = (_jitted(kernel, pages, slots, dtype=dtype, **options) for kernel in (body, kv_pack))
    _same_values("a block", found.data, wanted.data)
    if wanted.scales is not None:
        _same_values("a scale", found.scales, wanted.scales)
    return {}


def _kv_unpack(cell: Cell, body: Callable[..., Any]) -> dict[str, float]:
    pages, slots, options, dtype = _packing(cell)
    blocks = kv_pack(pages, slots, dtype=dtype, **options)
    target = jax.tree.map(lambda array: jnp.full_like(array, 7), pages)
    first = options.get("first_head", 0)
    found, wanted = (_jitted(kernel, target, slots[::-1], blocks, first_head=first) for kernel in (body, kv_unpack))
    _same_values("a page", found.data, wanted.data)
    if wanted.scales is not None:
        _same_values("a scale", found.scales, wanted.scales)
    return {}


def _wide(pages: KVPages) -> KVPages:
    """The same numbers in float32; quantised ones stay, since float32 is what the reference makes of them."""
    return KVPages(pages.data.astype(jnp.float32)) if pages.scales is None else pages


def _largest(pages: KVPages, layer: int) -> float:
    read = pages.read(layer, jnp.arange(pages.data.shape[0])[None])
    return float(jnp.nanmax(jnp.abs(read)))


def _close(cell: Cell, found: Any, wanted: Any, largest: float) -> float:
    """The largest error as a share of its bound. Raises `VerificationError` where that is above one."""
    if found.shape != wanted.shape:
        raise VerificationError(f"a result of shape {found.shape}, not {wanted.shape}")
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    exact = ~np.isfinite(wanted) | (wanted == 0)  # of rows that see nothing
    if (found[exact] != wanted[exact]).any() or not np.isfinite(found[~exact]).all():
        raise VerificationError("a row of nobody, or one that was not written, is not what it must be")
    error = np.abs(np.where(exact, 0, found) - np.where(exact, 0, wanted)).max()
    share = error / (BOUNDS[cell.compute_dtype] * largest)
    if share > 1:
        raise VerificationError(f"an error of {share:.3g} times its bound")
    return round(float(share), 3)


def _same_bits(what: str, found: Any, wanted: Any) -> None:
    if found.dtype != wanted.dtype or np.asarray(found).tobytes() != np.asarray(wanted).tobytes():
        raise VerificationError(f"{what} has other bits than the reference's")


def _same_values(what: str, found: Any, wanted: Any) -> None:
    """Equal, or NaN in both: whether a NaN keeps its bits is up to the device."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    equal = found.dtype == wanted.dtype and found.shape == wanted.shape
    if not equal or not np.array_equal(found.astype(np.float32), wanted.astype(np.float32), equal_nan=True):
        raise VerificationError(f"{what} differs from the reference's")


def _compiled(cell: Cell) -> dict[str, float]:
    """Compiled for the rung's device at the shape of a real batch. Raises `CompileFailed`."""
    from mcjax.kernels.proof import gpu, tpu

    if cell.rung in TPUS:
        topology = TPUS[cell.rung]
        kind = tpu.tpu_topology(topology).devices[0].device_kind
        function, arguments, donated = _program(cell, Target("tpu", kind))
        options: dict[str, Any] = {"donate_argnums": donated}
        arguments = tuple(tpu.on_tpu(tree, topology) if isinstance(tree, KVPages) else tree for tree in arguments)
        for index in donated:  # the pages come back as they lay
            formats = jax.tree.map(lambda leaf: leaf.format, arguments[index])
            options["out_shardings"] = (None, formats) if cell.kernel == "prefill" else formats
        report = tpu.compile_for_tpu(function, *arguments, topology=topology, **options)
        return {"hbm_bytes": report.hbm_bytes, "temp_bytes": report.temp_bytes}
    function, arguments, donated = _program(cell, gpu.H200)
    report = gpu.compile_for_gpu(function, *arguments, donate_argnums=donated)
    own = [kernel for kernel in report.kernels if cell.kernel.removeprefix("kv_") in kernel.name]
    if not own:
        raise VerificationError(f"no kernel of its own, of: {', '.join(kernel.name for kernel in report.kernels)}")
    if cell.body.endswith("mosaic") and not any(kernel.has_wgmma for kernel in own):
        raise VerificationError("no kernel with wgmma instructions, which are what this body is for")
    facts: dict[str, float] = {
        "temp_bytes": report.temp_bytes,
        "registers": max(kernel.registers for kernel in own),
        "spills": sum(kernel.spills for kernel in own),
    }
    shared = [kernel.shared_bytes for kernel in own if kernel.shared_bytes is not None]
    return {**facts, "shared_bytes": max(shared)} if len(shared) == len(own) else facts


def _program(cell: Cell, target: Target) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
    """A function of arrays only, structures of its arguments, and which of them it may write into."""
    body = partial(cell.function(), target=target)
    heads, kv_heads = cell.device_heads
    page, tokens = cell.page_tokens, CONTEXT_TOKENS[cell.context]
    dtype = jnp.dtype(cell.dtype)
    token_bytes = 2 * kv_heads * (cell.head_dim * dtype.itemsize + (4 if dtype.name in LARGEST else 0))
    layers = catalogue.model(cell.heads).layers if cell.heads in DEVICES else 32
    count = max(PAGES_BYTES[cell.platform] // (token_bytes * page * layers), 2)
    pages = jax.eval_shape(lambda: KVPages.filled(count, layers, kv_heads, page, cell.head_dim, dtype))

    def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    options = {"window": {"window": 4096}, "soft_cap": {"soft_cap": 50.0}}.get(cell.feature, {})
    if cell.kernel == "prefill":
        new, sequences = 2048, 4
        rows = [array(new, width, cell.head_dim, dtype=cell.compute_dtype) for width in (heads, kv_heads, kv_heads)]
        places = [array(sequences, tokens // page), *[array(sequences)] * 3]
        return (
            lambda queries, keys, values, pages, *places: body(queries, keys, values, pages, LAYER, *places, **options),
            (*rows, pages, *places),
            (3,),
        )
    if cell.kernel == "decode":
        batch, width = 32, 4 if cell.feature == "several" else 1
        queries = array(batch, width, heads, cell.head_dim, dtype=cell.compute_dtype)
        return (
            lambda queries, pages, *places: body(queries, pages, LAYER, *places, **options),
            (queries, pages, array(batch, tokens // page), array(batch), array(batch)),
            (),
        )
    slots = array(min(PACKED_PAGES, count // 2))
    part = {"first_head": kv_heads // 2, "heads": max(kv_heads // 2, 1)} if cell.feature == "part" else {}
    if kv_heads == 1:
        part = {}
    other = "int8" if cell.dtype != "int8" else "float8_e4m3fn"
    blocks_dtype = other if cell.feature == "encoded" else cell.dtype
    if cell.kernel == "kv_pack":
        return (lambda pages, slots: body(pages, slots, dtype=blocks_dtype, **part)), (pages, slots), ()
    blocks: KVBlocks = jax.eval_shape(
        lambda pages, slots: kv_pack(pages, slots, dtype=blocks_dtype, **part), pages, slots
    )
    first = part.get("first_head", 0)
    return (lambda pages, slots, blocks: body(pages, slots, blocks, first_head=first)), (pages, slots, blocks), (0,)
