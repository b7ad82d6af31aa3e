"""Random weights as a function of a seed, for any shape without a checkpoint: what is not about text needs no others.

They are uniform numbers from a counter-based generator (Philox) made by integer arithmetic and one correctly rounded
product: bit-equal on every machine, and each parameter independent of the others.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from mcjax.cost import catalogue
from mcjax.cost.model_shape import ModelShape
from mcjax.models.decoder import Decoder
from mcjax.models.piece_weights import PieceWeights
from mcjax.models.pieces import Piece, Window, extent, whole

DEFAULT_SHAPE = catalogue.model("tiny")
TRAINED = "package:mcjax/models/trained/"
"""How `model.checkpoint` of `model=tiny` and `model=tiny-draft` begins; `models/training` makes those weights."""

# With random weights and tied embeddings a model echoes its last token unless what the layers add outweighs the
# embedding they start from, and attention must be sharp enough for distant tokens to matter. Chosen by looking at
# greedy outputs: tests/models/test_builtin.py holds them to it.
GAINS: Mapping[str, float] = MappingProxyType({"embedding": 0.1, "query": 2.5, "key": 2.5, "output": 2.0, "down": 2.0})


def fingerprint(shape: ModelShape, seed: int) -> str:
    """Hex sha256 that names these weights and their dtype; part of every block key."""
    words = json.dumps({"builtin": 1, "seed": seed, **shape.identity()}, sort_keys=True)
    return hashlib.sha256(words.encode()).hexdigest()


DRAWN = 1 << 20
"""Numbers at a time."""


class SeededWeights(PieceWeights):
    """Uniform weights of variance `gain^2 / fan_in`, by (seed, name); gains are ones, biases zeros.

    `gains` go by the last part of a piece's name, 1 where there is none.
    """

    in_windows = False

    def __init__(self, shape: ModelShape, seed: int, gains: Mapping[str, float] = GAINS):
        super().__init__(shape.dtype)
        self._gains = gains
        self._seed = seed

    def read(self, piece: Piece, window: Window) -> Iterator[NDArray[np.float64]]:
        """Drawn in parts: a whole one takes several times its size. `window` is the whole."""
        if piece.init != "uniform":
            yield np.full(extent(window), 1.0 if piece.init == "ones" else 0.0)
            return
        digest = hashlib.sha256(f"{self._seed}/{piece.name}".encode()).digest()
        generator = np.random.Philox(key=np.frombuffer(digest[:16], np.uint64))
        half_width = self._gains.get(piece.name.rpartition(".")[2], 1.0) * math.sqrt(3.0 / piece.fan_in)
        rows, *inside = piece.shape
        step = max(1, DRAWN // math.prod(inside))
        for start in range(0, rows, step):
            shape = (min(step, rows - start), *inside)
            raw = generator.random_raw(math.prod(shape)) >> np.uint64(11)  # 53 bits: exact as float64
            centred = raw.astype(np.float64) - (2.0**52 - 0.5)
            yield (centred * (half_width / 2.0**52)).reshape(shape)

    def drawn(self, piece: Piece) -> NDArray[np.float64]:
        """All of one piece."""
        return np.concatenate(list(self.read(piece, whole(piece.shape))))

    def origin(self, piece: Piece) -> tuple[str, object, str]:
        return "seed", self._seed, piece.name

    def numbers(self, piece: Piece) -> NDArray[np.float64]:
        """Of one piece, in float64."""
        return np.concatenate(list(self.read(piece, whole(piece.shape))))


def build(shape: ModelShape = DEFAULT_SHAPE, seed: int = 0, max_positions: int = 4096) -> Decoder:
    """The model of `seed`, on jax's default device."""
    return Decoder(shape, max_positions, SeededWeights(shape, seed))
