"""How long a model's weights take to their devices, and how much memory beside themselves. Linux.

    python benchmarks/model_load.py model=smollm2 --devices 4
    python benchmarks/model_load.py model=hf model.path=DIR

On a CPU the devices' memory is the host's, so what counts as extra is the peak less what was there before, less the
weights themselves. With `--cold` the files leave the page cache first. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from mcjax.app.compose import compose, made
from mcjax.backends.jax.memory import array_bytes
from mcjax.backends.jax.placed_weights import PlacedWeights
from mcjax.backends.jax.placement import Place
from mcjax.cost.model_shape import ModelShape
from mcjax.cost.parameters import parameters
from mcjax.models import catalogue
from mcjax.models.checkpoint import locate

POSITIONS = 64


def measure(shape: ModelShape, devices: int, cold: bool = False) -> dict[str, float | int | str]:
    """Load `shape` onto so many devices. Bytes are of all of them together."""
    place = Place(tuple(jax.local_devices()[:devices]))
    jax.block_until_ready([jax.device_put(jnp.zeros(8), device) for device in place.devices])
    if cold and shape.checkpoint:
        _leave_page_cache(locate(shape.checkpoint))
    outline = catalogue.outline(shape, POSITIONS)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    began, began_cpu = time.perf_counter(), time.process_time()
    placed = PlacedWeights(outline, catalogue.source(shape))
    jax.block_until_ready(placed.on(place))
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    peak = status("VmHWM")
    weights = array_bytes(placed.on(place)) * devices
    largest = max(parameter.size for parameter in parameters(shape).values()) * shape.dtype_bytes
    return {
        "model": shape.name,
        "devices": devices,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "weights_mb": round(weights / 1e6, 1),
        "largest_parameter_mb": round(largest / 1e6, 1),
        "extra_mb": round((peak - before - weights) / 1e6, 1),
    }


def status(field: str) -> int:
    """Bytes, of `/proc/self/status`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise LookupError(field)


def _leave_page_cache(path: Path) -> None:
    for file in path.glob("*") if path.is_dir() else [path]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="+", help="model=... and what belongs to it")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--cold", action="store_true")
    chosen = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", chosen.devices)
    shape: ModelShape = made(compose(chosen.overrides), "model")
    print(json.dumps(measure(shape, chosen.devices, chosen.cold)))


if __name__ == "__main__":
    main()
