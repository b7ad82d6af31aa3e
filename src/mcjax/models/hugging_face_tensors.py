"""A model's parameters as tensors of a Hugging Face checkpoint: `hugging_face.stored` backwards. Free of jax."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.cost.model_shape import ModelShape
from mcjax.cost.parameters import Parameter, parameters
from mcjax.models.hugging_face import Dialect, Stored, stored
from mcjax.models.pieces import parted, pieces

KEPT = 2
"""Parameters: a tensor may have pieces of two (keys and values of a latent)."""


class HuggingFaceTensors:
    """Tensors by name, each put together when it is asked for; no more than two parameters are held beside it.

    `weight` gives a parameter by name and declaration, in the host's memory. It is asked once for each, if tensors are
    asked for in the order of `shapes`.
    """

    def __init__(self, shape: ModelShape, weight: Callable[[str, Parameter], NDArray[Any]]):
        mixtral = shape.experts > 0 and not shape.latent and not shape.qk_norm
        self._declared = parameters(shape)
        self._stored = stored(shape, Dialect(experts="mixtral" if mixtral else "separate"))
        self._weight = weight
        self._kept: OrderedDict[str, dict[str, NDArray[Any]]] = OrderedDict()
        self._home = {
            piece.name: name for name, parameter in self._declared.items() for piece in pieces(name, parameter)
        }
        self._sources: dict[str, list[tuple[str, int | None]]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for piece, source in self._stored.items():
            for row, name in enumerate(source.tensors):
                self._sources.setdefault(name, []).append((piece, row if source.stacked else None))
                self.shapes[name] = source.shape

    def __call__(self, name: str) -> NDArray[Any]:
        """`[out, in]`, in C order."""
        result: NDArray[Any] | None = None
        for piece, row in self._sources[name]:
            numbers = self._piece(piece) if row is None else self._piece(piece)[row]
            if result is None:
                result = np.empty(self.shapes[name], numbers.dtype)
            _write_back(self._stored[piece], result, numbers)
        assert result is not None
        return result

    def _piece(self, piece: str) -> NDArray[Any]:
        home = self._home[piece]
        if home not in self._kept:
            while len(self._kept) >= KEPT:
                self._kept.popitem(last=False)
            parameter = self._declared[home]
            views = parted(home, self._weight(home, parameter))
            self._kept[home] = {
                each.name: view.reshape(each.shape) for each, view in zip(pieces(home, parameter), views, strict=True)
            }
        return self._kept[home][piece]


def _write_back(source: Stored, tensor: NDArray[Any], numbers: NDArray[Any]) -> None:
    """Put `numbers` where `source.arrange` finds them: through the view that it gives, or else by their places."""
    view = source.arrange(tensor)
    if np.may_share_memory(view, tensor):
        view[...] = numbers
    else:
        places = source.arrange(np.arange(tensor.size).reshape(tensor.shape))
        tensor.reshape(-1)[places] = numbers
