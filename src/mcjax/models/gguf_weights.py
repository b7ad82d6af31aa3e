"""The weights of a model in a GGUF file, as `mcjax.models.decoder` asks for them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from mcjax.cost.model_shape import ModelShape
from mcjax.cost.parameters import parameters
from mcjax.errors import ConfigError
from mcjax.models.checkpoint import KEY
from mcjax.models.gguf_file import GGUFFile
from mcjax.models.gguf_names import ARCHITECTURES, JOINED_LATENT, expert_name, tensor_name
from mcjax.models.gguf_shape import FREQUENCY_FACTORS, check
from mcjax.models.piece_weights import PieceWeights
from mcjax.models.pieces import Piece, Window, pieces

ROWS = 2048
"""Of embeddings and output weights, dequantised at a time."""


class GGUFWeights(PieceWeights):
    """Implements `mcjax.models.weights.PlacedSource`: dequantised to float32, then of the shape's dtype.

    The file must be of exactly this shape: what differs, or is in the file and in no such model of ours, is a
    `ConfigError` that names the field of `model`, or the tensor.
    """

    in_windows = False

    def __init__(self, file: GGUFFile, shape: ModelShape):
        super().__init__(shape.dtype)
        check(file, shape)
        self._file = file
        self._shape = shape
        self._neighbours = ARCHITECTURES[file.value("general.architecture", str)].neighbours
        self._names = frozenset(file.tensor_names)
        used = {FREQUENCY_FACTORS, *self._used()}
        for name in file.tensor_names:
            if name not in used:
                raise ConfigError(KEY, file.path, f"holds the tensor {name}, which this architecture has no use for")

    def read(self, piece: Piece, window: Window) -> Iterator[NDArray[np.float32]]:
        if piece.name not in ("embedding", "head"):
            yield self.piece(piece)[window]
            return
        inside = tensor_name(self._shape, piece.name)  # the largest by far: some rows at a time
        self._check(inside, self._file.tensor_shape(inside), piece.shape, piece)
        for start in range(window[0].start, window[0].stop, ROWS):
            rows = slice(start, min(start + ROWS, window[0].stop))
            yield self._file.tensor(inside, rows)[:, *window[1:]]

    def origin(self, piece: Piece) -> tuple[str, object, str]:
        return KEY, self._file.path, f"its tensor {tensor_name(self._shape, piece.name)}"

    def piece(self, piece: Piece) -> NDArray[np.float32]:
        """One piece, of its declared shape."""
        kind = piece.name.rpartition(".")[2]
        if kind in ("key_up", "value_up"):
            return self._from_latent(piece, kind)
        if kind == "gain":
            gain = self._tensor(piece.name, piece.shape, piece)
            return gain - 1 if self._shape.unit_offset_norms else gain  # the converter adds the one
        if kind == "router_bias":
            return self._tensor(piece.name, piece.shape, piece)
        if kind in ("query_bias", "key_bias", "value_bias"):
            rows = self._tensor(piece.name, (math.prod(piece.shape),), piece)[:, None]
            return self._heads(rows, piece.shape[0], kind)[..., 0]
        if len(piece.shape) == 3 and kind in ("gate", "up", "down"):
            return self._experts(piece)
        if kind == "output":  # [H, D, E] of [E, H * D]
            *inputs, outputs = piece.shape
            return self._tensor(piece.name, (outputs, math.prod(inputs)), piece).T.reshape(piece.shape)
        inputs, *outputs = piece.shape
        rows = self._tensor(piece.name, (math.prod(outputs), inputs), piece)
        if len(outputs) == 2:
            return self._heads(rows, outputs[0], kind).transpose(2, 0, 1)
        if kind == "latent_down":
            rows = self._heads(rows, 1, kind)[0]
        return rows.T

    def _tensor(self, name: str, stored: tuple[int, ...], piece: Piece) -> NDArray[np.float32]:
        """The tensor of the piece `name`, `stored` as the file has it."""
        return self._read(tensor_name(self._shape, name), stored, piece)

    def _read(self, inside: str, stored: tuple[int, ...], piece: Piece) -> NDArray[np.float32]:
        self._check(inside, self._file.tensor_shape(inside), stored, piece)
        return self._file.tensor(inside)

    def _check(self, inside: str, found: tuple[int, ...], wanted: tuple[int, ...], piece: Piece) -> None:
        if found != wanted:
            problem = f"its tensor {inside} is {list(found)}, and {piece.name} must be {list(piece.shape)}"
            raise ConfigError(KEY, self._file.path, problem)

    def _heads(self, rows: Float[np.ndarray, "HD E"], heads: int, kind: str) -> Float[np.ndarray, "H D E"]:
        """Rows by head; those that turn, in our order."""
        by_head = rows.reshape(heads, -1, rows.shape[-1])
        if not self._neighbours or kind.removesuffix("_bias") not in ("query", "key", "latent_down"):
            return by_head
        latent = self._shape.latent
        still = by_head.shape[1] - latent.rope_dim if latent else 0
        turning = by_head[:, still:]
        return np.concatenate([by_head[:, :still], turning[:, 0::2], turning[:, 1::2]], axis=1)

    def _experts(self, piece: Piece) -> Float[np.ndarray, "X I O"]:
        count, inputs, outputs = piece.shape
        inside = tensor_name(self._shape, piece.name)
        if inside in self._names or expert_name(piece.name, 0) not in self._names:
            return self._read(inside, (count, outputs, inputs), piece).swapaxes(1, 2)
        whole = np.empty(piece.shape, np.float32)
        for expert in range(count):
            whole[expert] = self._read(expert_name(piece.name, expert), (outputs, inputs), piece).T
        return whole

    def _from_latent(self, piece: Piece, kind: str) -> Float[np.ndarray, "H I O"]:
        """`[H, nope, rank]` of keys, `[H, rank, value]` of values."""
        inside = tensor_name(self._shape, piece.name)
        latent = self._shape.latent
        heads, first, last = piece.shape
        if latent is None or inside in self._names:
            return self._read(inside, (heads, last, first), piece).swapaxes(1, 2)
        rows = heads * (latent.nope_dim + latent.value_dim)
        both = self._read(_joined_name(inside), (rows, latent.kv_rank), piece).reshape(heads, -1, latent.kv_rank)
        if kind == "key_up":
            return both[:, : latent.nope_dim]
        return both[:, latent.nope_dim :].swapaxes(1, 2)

    def _used(self) -> Iterator[str]:
        """Every name that a tensor of this model may have."""
        for name, parameter in parameters(self._shape).items():
            for piece in pieces(name, parameter):
                inside = tensor_name(self._shape, piece.name)
                yield inside
                if inside.endswith("_exps.weight"):
                    yield from (expert_name(piece.name, expert) for expert in range(self._shape.experts))
                if piece.name.endswith("key_up"):
                    yield _joined_name(inside)


def _joined_name(inside: str) -> str:
    return f"{inside.rpartition('.attn_')[0]}.{JOINED_LATENT}"
