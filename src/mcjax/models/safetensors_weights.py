"""The weights of a Hugging Face model directory, as `mcjax.models.decoder` asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError
from mcjax.models.checkpoint import KEY
from mcjax.models.hugging_face import dialect, stored, unused
from mcjax.models.piece_weights import PieceWeights
from mcjax.models.pieces import Piece, Window
from mcjax.models.safetensors_directory import SafetensorsDirectory

ROWS = 4096
"""Of the embeddings, compared with the output weights at a time."""


class SafetensorsWeights(PieceWeights):
    """Implements `mcjax.models.weights.PlacedSource`: a shard reads its part of the tensors and no more.

    The directory must be of exactly this shape: tensors that are missing, of another shape or dtype, or of no use, are
    `ConfigError`s that name file and tensor, before any is read.
    """

    def __init__(self, directory: SafetensorsDirectory, shape: ModelShape):
        super().__init__(shape.dtype)
        self._directory = directory
        names = directory.names
        spoken = dialect(names)
        self._stored = stored(shape, spoken)
        used: set[str] = set()
        for piece, source in self._stored.items():
            for name in source.tensors:
                found = directory.shape(name)
                if found != source.shape:
                    problem = (
                        f"its tensor {name} is {list(found)}, and {piece} of model={shape.name} must be "
                        f"{list(source.shape)}: config.json is of another model, or wrong"
                    )
                    raise ConfigError(KEY, directory.file(name), problem)
                directory.check_dtype(name)
            used.update(source.tensors)
        left = set(names) - used - unused(shape, spoken, names)
        if left:
            name, more = min(left), f", and {len(left) - 1} more" if len(left) > 1 else ""
            problem = f"holds the tensor {name}{more}, for which a {shape.family} of this config has no use"
            raise ConfigError(KEY, directory.file(name), f"{problem}: is config.json of another model?")
        if shape.tied_embeddings and spoken.head in names:
            self._check_tied(spoken.head, self._stored["embedding"].tensors[0])

    def read(self, piece: Piece, window: Window) -> Iterator[NDArray[Any]]:
        source = self._stored[piece.name]
        if not source.stacked:
            yield source.arrange(self._directory.tensor(source.tensors[0]))[window]
            return
        first, *inside = window
        for name in source.tensors[first]:
            yield source.arrange(self._directory.tensor(name))[None, *inside]

    def origin(self, piece: Piece) -> tuple[str, object, str]:
        names = self._stored[piece.name].tensors
        called = f"its tensor {names[0]}" if len(names) == 1 else f"one of its tensors {names[0]} to {names[-1]}"
        return KEY, self._directory.file(names[0]), called

    def let_go(self) -> None:
        self._directory.forget()

    def _check_tied(self, head: str, embedding: str) -> None:
        """Files may hold the output weights although they are the embeddings: then they have to be."""
        ours, theirs = self._directory.tensor(embedding), self._directory.tensor(head)
        same = ours.shape == theirs.shape and ours.dtype == theirs.dtype
        for start in range(0, len(ours) if same else 0, ROWS):
            same = same and np.array_equal(ours[start : start + ROWS], theirs[start : start + ROWS])
            self._directory.forget()
        if not same:
            problem = f"its tensor {head} differs from {embedding}, and config.json says tie_word_embeddings"
            raise ConfigError(KEY, self._directory.file(head), f"{problem}: set that to false there")
