"""The golden rows of a family through the engine's own programs: any source of weights, any devices."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray
from seeded_checkpoint import (
    CASES,
    CONTEXT_TOKENS,
    GOLDEN_CHUNK,
    GOLDEN_ROWS,
    SeededCheckpoint,
    golden_file,
    shape_of,
    tensor,
    tokens_of,
)

from directory_fixtures import write as write_directory
from mcjax.backends.jax.placed_weights import PlacedWeights
from mcjax.backends.jax.placement import Place
from mcjax.backends.jax.programs import Geometry, Programs, pack_row
from mcjax.models import catalogue
from mcjax.models.decoder import Decoder
from mcjax.models.hugging_face import Dialect, stored
from mcjax.models.orbax_weights import save

PAGE_TOKENS = 8
PER_ROW = CONTEXT_TOKENS // PAGE_TOKENS
ROWS = len(GOLDEN_ROWS)
GEOMETRY = Geometry(ROWS * PER_ROW, PAGE_TOKENS, ROWS, GOLDEN_CHUNK, CONTEXT_TOKENS)
PATHS = ("random", "safetensors", "GGUF", "Orbax")
"""Where weights come from; random: numbers by name, as a `WeightSource` in memory."""

# Two key heads: of six devices three share each. Six do not go into the widths either, and the vocabulary is odd.
ONE = {"one device": (1,)}
DENSE = {"tensor 2": (2,), "key heads < tensor": (6,)}
EXPERTS = {"tensor 2": (2,), "expert 4": (4, 4), "expert 4 x tensor 2": (8, 4)}
LATENT = {"key heads < tensor": (4,), "expert 4": (4, 4), "expert 4 x tensor 2": (8, 4)}
MESHES: dict[str, dict[str, tuple[int, ...]]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3"), DENSE),
    **dict.fromkeys(("mixtral", "qwen3_moe"), EXPERTS),
    "deepseek_v3": LATENT,
}
"""Of a case of each family: the devices, and how many of them share the experts."""


def place(devices: int, expert: int = 1, data: int = 1) -> Place:
    return Place(tuple(jax.local_devices()[:devices]), expert, data)


@cache
def programs(case: str, quantisation: str = "none") -> Programs:
    shape = replace(shape_of(case), quantisation=quantisation)
    return Programs(Decoder(shape, CONTEXT_TOKENS, SeededCheckpoint(shape)), GEOMETRY)


def logits(made: Programs, where: Place, case: str, weights: Any = None) -> NDArray[np.float32]:
    """`[rows, chunks, V]`: behind each chunk, on pages that are anywhere. `weights`: others than the programs' own."""
    here, tokens = made.on(where), tokens_of(case, ROWS)
    weights = here.weights if weights is None else weights
    pages: Any = here.new_pages()
    table = np.random.default_rng(3).permutation(ROWS * PER_ROW).reshape(ROWS, PER_ROW).tolist()
    found: list[list[Any]] = [[] for _ in GOLDEN_ROWS]
    ends = [0] * ROWS
    for sizes in zip(*(row.chunks for row in GOLDEN_ROWS), strict=True):
        width = 1 if max(sizes) == 1 else GOLDEN_CHUNK
        packed = [
            pack_row(width, size, end, tokens[row, end : end + size], table[row], GEOMETRY)
            for row, (end, size) in enumerate(zip(ends, sizes))
        ]
        batches = [np.stack(packed)] if width == 1 else [row[None] for row in packed]
        together: list[Any] = []
        for batch in batches:
            some, pages = here.model(len(batch), width)(weights, pages, batch)
            together += [*np.asarray(some)]
        for row in range(ROWS):
            found[row].append(together[row])
        ends = [end + size for end, size in zip(ends, sizes)]
    return np.array(found)


def golden(case: str) -> NDArray[np.float32]:
    """What transformers gave at the same places."""
    with np.load(golden_file(case)) as file:
        return np.stack([file[f"row{row}"] for row in range(ROWS)])


def largest_error(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """Of all positions, the largest norm of a difference relative to what is wanted."""
    return float((np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)).max())


def written(path: str, case: str, folder: Path) -> Path | None:
    """The case's weights as such a checkpoint; None where the format has no such model."""
    shape, target = shape_of(case), folder / path
    if path == "Orbax":
        save(target, shape, SeededCheckpoint(shape))
        return target
    if path == "safetensors":
        # Experts joined: the names by which the numbers go.
        numbers = {
            name: tensor(name, source.shape, shape.unit_offset_norms)
            for source in stored(shape, Dialect(experts="fused")).values()
            for name in source.tensors
        }
        return write_directory(target, CASES[case], numbers, files=2)
    import gguf_families

    if case not in gguf_families.ARCHITECTURES:
        return None
    architecture = gguf_families.ARCHITECTURES[case]
    source = SeededCheckpoint(shape)
    arrays = gguf_families.tensors(shape, architecture, given={name: source.piece(name) for name in source.places})
    said = gguf_families.metadata(CASES[case], architecture)
    return gguf_families.write(target.with_suffix(".gguf"), architecture, said, arrays)


def weights_from(path: str, case: str, checkpoint: Path | None, where: Place) -> Any:
    """As the engine lays them out: each parameter from the source, straight to its devices."""
    if path == "random":
        return programs(case).weights.on(where)
    shape = replace(shape_of(case), checkpoint=str(checkpoint))
    return PlacedWeights(catalogue.outline(shape, CONTEXT_TOKENS), catalogue.source(shape)).on(where)
