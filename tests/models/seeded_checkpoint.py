"""A checkpoint under Hugging Face's names, whose numbers follow from a seed: no file, and the same for either side."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from family_cases import CONFIGS
from mcjax.cost.model_shape import ModelShape
from mcjax.cost.parameters import Parameter
from mcjax.models.hugging_face import Dialect, Stored, stored
from mcjax.models.pieces import joined, pieces

PROMPT_TOKENS, FURTHER_TOKENS, CONTEXT_TOKENS = 40, 8, 64

WINDOWED = ("mistral", "gemma2", "gemma3")
CASES: dict[str, dict[str, Any]] = CONFIGS | {
    # The windows of the others are shorter than the prompt.
    f"{name}-wide": CONFIGS[name] | {"sliding_window": 50}
    for name in WINDOWED
}


@dataclass(frozen=True)
class GoldenRow:
    """How a row is fed, and at which positions there are golden logits: where its chunks end."""

    chunks: tuple[int, ...]

    @property
    def positions(self) -> list[int]:
        return [end - 1 for end in accumulate(self.chunks)]


# A prompt longer than the windows in chunks, and a short one beside it; then single tokens.
GOLDEN_CHUNK = 16
GOLDEN_ROWS = (GoldenRow((16, 16, 8) + (1,) * FURTHER_TOKENS), GoldenRow((5, 4, 11) + (1,) * FURTHER_TOKENS))


def golden_file(case: str) -> Path:
    return Path(__file__).parent / "golden" / f"{case}.npz"


def shape_of(case: str, dtype: str = "float32") -> ModelShape:
    return ModelShape.from_hugging_face({**CASES[case], "dtype": dtype}, case)


def tokens_of(case: str, rows: int = 4) -> NDArray[np.int32]:
    """`[rows, PROMPT_TOKENS + FURTHER_TOKENS]`"""
    count = PROMPT_TOKENS + FURTHER_TOKENS
    return (_uniform(f"tokens/{case}", (rows, count)) * CASES[case]["vocab_size"]).astype(np.int32)


def tensor(name: str, shape: tuple[int, ...], unit_offset: bool) -> NDArray[np.float32]:
    """The numbers of one. Gains and biases are unlike one another, routers are decided."""
    centred = 2 * _uniform(name, shape) - 1
    if name.endswith("norm.weight"):
        return (0.4 * centred + (0 if unit_offset else 1)).astype(np.float32)
    if name.endswith("bias"):
        return (0.5 * centred).astype(np.float32)
    gain = 4 if name.endswith("gate.weight") else 1
    fan_in = 1 if "embed_tokens" in name else shape[-1]
    return (centred * gain * math.sqrt(3 / fan_in)).astype(np.float32)


def _uniform(name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """In [0, 1), bit-equal everywhere."""
    generator = np.random.Philox(key=np.frombuffer(hashlib.sha256(name.encode()).digest()[:16], np.uint64))
    raw = generator.random_raw(math.prod(shape)) >> np.uint64(11)
    return (raw.astype(np.float64) / 2.0**53).reshape(shape)


@dataclass
class SeededCheckpoint:
    """A `WeightSource`. Experts are joined, as transformers holds them in memory."""

    shape: ModelShape
    places: dict[str, Stored] = field(init=False)

    def __post_init__(self) -> None:
        self.places = stored(self.shape, Dialect(experts="fused"))

    def __call__(self, name: str, parameter: Parameter) -> jax.Array:
        parts = [self.piece(piece.name) for piece in pieces(name, parameter)]
        return jnp.asarray(joined(name, parameter, parts), jnp.dtype(self.shape.dtype))

    def piece(self, name: str) -> NDArray[Any]:
        place = self.places[name]
        return place.read(lambda name: tensor(name, place.shape, self.shape.unit_offset_norms))
