"""NVIDIA's aiconfigurator (measured operators of its GPUs) as a cost model: asked once for a grid, then only a table.

One query takes 4 to 110 microseconds there, and a simulation has millions of steps. Written against version 0.12 of
`aiconfigurator-core`; figures are milliseconds for all accelerators of an instance together.
"""

from __future__ import annotations

from importlib import import_module
from itertools import product
from typing import Any

from mcjax.cost.hardware import Hardware
from mcjax.cost.measurements import Measurement
from mcjax.cost.model_shape import ModelShape
from mcjax.cost.table import Table
from mcjax.errors import ConfigError, MissingExtra

_MODEL_PATHS = {
    "llama3-70b": "meta-llama/Meta-Llama-3.1-70B",  # the same shape
    "llama3-8b": "meta-llama/Meta-Llama-3.1-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
}
_SYSTEMS = {"h100x8": "h100_sxm", "h200x8": "h200_sxm"}
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_MIXED_BATCHES = (1, 16, 64, 256)
_MIXED_LENGTHS = (64, 256, 1024, 2048, 4096, 8192)


def tabulate(
    model: ModelShape,
    hardware: Hardware,
    model_path: str | None = None,
    system: str | None = None,
    backend: str = "vllm",
    backend_version: str | None = None,
    expert_parallel: bool = False,
    name: str = "aiconfigurator",
) -> Table:
    """The table of `model` on `hardware`, which aiconfigurator calls `model_path` and `system`.

    Both names may be left out for models and hardware of the catalogue that are known there. Tensor parallelism over
    `hardware.count` accelerators; of a mixture's experts too, unless `expert_parallel`. Raises `MissingExtra` without
    the package, and `ConfigError` with aiconfigurator's words when it does not know the pair.
    """
    model_path = model_path or _MODEL_PATHS.get(model.name)
    system = system or _SYSTEMS.get(hardware.name)
    if model_path is None:
        raise ConfigError("cost.model_path", None, f"say what aiconfigurator calls {model.name}, or use", _MODEL_PATHS)
    if system is None:
        raise ConfigError("cost.system", None, f"say what aiconfigurator calls {hardware.name}, or use", _SYSTEMS)
    try:
        engine = import_module("aiconfigurator_core.sdk.engine")
    except ImportError:
        raise MissingExtra("aiconfigurator-core", "cost") from None
    ways = hardware.count
    experts = {("moe_ep_size" if expert_parallel else "moe_tp_size"): ways} if model.experts else {}
    try:
        spec = engine.compile_engine(model_path, system, backend, backend_version, tp_size=ways, **experts)
        rows = measure(engine.EngineHandle(spec), model.max_context_tokens)
    except Exception as problem:
        known = f"aiconfigurator has no answer for model_path={model_path}, backend={backend}, {ways} ways ({problem})"
        raise ConfigError("cost.system", system, known) from problem
    return Table(rows, name, hardware.name, model.name)


def measure(handle: Any, max_tokens: int) -> list[Measurement]:
    """What an `EngineHandle` answers over a grid of prompts and contexts of up to `max_tokens`.

    A mixed step is the chunk as a prefill of its own, plus what `batch` more tokens add to everything but attention
    (matmuls and collectives over all tokens at once, the weights read once), plus the decodes' attention. The handle's
    own `mixed_step_latency` knows only one length for both parts.
    """
    starts = [0, *_geometric(256, max_tokens)]
    lengths = _geometric(64, max_tokens)
    contexts = _geometric(128, max_tokens)[::2]
    rows = [
        Measurement("prefill", start, length, 0, 0, handle.predict_prefill_latency(1, start + length, start) / 1e3)
        for start, length in product(starts, lengths)
    ]
    for batch, context in product(_BATCHES, contexts):
        seconds = handle.decode_step_latency(batch, context, 2) / 1e3
        rows.append(Measurement("decode", 0, 0, batch, batch * context, seconds))
    mixed_contexts = contexts[::2]
    attention = {
        (batch, context): handle.mixed_step_breakdown(_MIXED_LENGTHS[0], batch, context, 2)[3]
        for batch, context in product(_MIXED_BATCHES, mixed_contexts)
    }
    for length in _MIXED_LENGTHS:
        alone = handle.mixed_step_breakdown(length, 0, length, 2)[1]
        added = {batch: handle.mixed_step_breakdown(length, batch, length, 2)[1] - alone for batch in _MIXED_BATCHES}
        for start in starts[::4]:
            chunk = handle.predict_prefill_latency(1, start + length, start)
            for batch, context in product(_MIXED_BATCHES, mixed_contexts):
                seconds = (chunk + added[batch] + attention[batch, context]) / 1e3
                rows.append(Measurement("mixed", start, length, batch, batch * context, seconds))
    return rows


def _geometric(first: int, last: int) -> list[int]:
    """Four values an octave from `first` to `last` or just above: straight lines between them are within 1 % of n^2."""
    values = [first]
    while values[-1] < last:
        values.append(round(first * 2 ** (len(values) / 4)))
    return values
