"""Models saved by Orbax, and restored onto any mesh, each shard straight to its device."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from flax import nnx
from jax.sharding import Sharding, SingleDeviceSharding
from numpy.typing import NDArray

from mcjax.cost.model_shape import ModelShape
from mcjax.cost.parameters import Parameter, parameters
from mcjax.errors import ConfigError
from mcjax.models.checkpoint import KEY
from mcjax.models.decoder import Decoder
from mcjax.models.orbax_directory import (
    DESCRIPTION,
    WEIGHTS,
    OrbaxDirectory,
    Stored,
    description,
    inside_of,
    part_of,
)
from mcjax.models.sharding import name_of
from mcjax.models.weights import WeightSource


class OrbaxWeights:
    """Implements `mcjax.models.weights.PlacedSource`: what was stored, cast to the shape's dtype.

    The directory must be of exactly this shape. Raises `ConfigError`, which names directory and parameter.
    """

    def __init__(self, directory: OrbaxDirectory, shape: ModelShape):
        ours, theirs = shape.identity(), directory.shape.identity()
        for field in sorted(set(ours) - {"dtype_bytes", "kv_dtype_bytes", "quantisation"}):
            if ours[field] != theirs[field]:
                problem = f"{directory.path / DESCRIPTION} has {theirs[field]}"
                raise ConfigError(f"model.{field}", ours[field], problem)
        self._directory = directory
        self._dtype = jnp.dtype(shape.dtype)
        self._checkpointer = _checkpointer()
        self._read: dict[str, NDArray[Any]] = {}

    def __call__(self, name: str, parameter: Parameter, sharding: Sharding | None = None) -> jax.Array:
        """The parameter `name`; each device gets its shard and no more. Its bytes are held against what was saved."""
        if sharding is None:
            sharding = SingleDeviceSharding(jax.config.values["jax_default_device"] or jax.local_devices()[0])
        if name not in self._read:
            self._read = {}  # of the part before
            self._read = self._restored(name)
        stored, host = self._directory.parameters[name], self._read.pop(name)
        if host.dtype != jnp.dtype(stored.dtype) or host.shape != parameter.shape or _digest(host) != stored.digest:
            raise self._damaged(name, "its bytes are not those that were saved")
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index]).astype(self._dtype)

    def _restored(self, name: str) -> dict[str, NDArray[Any]]:
        """All that is in the part of a parameter, in the host's memory: Orbax takes long to begin."""
        import orbax.checkpoint as ocp

        part = part_of(name)
        names = {inside_of(each): each for each in self._directory.parameters if part_of(each) == part}
        places = {inside: ocp.RestoreArgs(restore_type=np.ndarray) for inside in names}
        arguments = ocp.args.PyTreeRestore(dict.fromkeys(names, 0), restore_args=places)
        try:
            found = self._checkpointer.restore(self._directory.part(name).resolve(), args=arguments)
            return {each: np.asarray(found[inside]) for inside, each in names.items()}
        except Exception as problem:  # Orbax and tensorstore raise nothing more exact
            raise self._damaged(name, str(problem).strip().partition("\n")[0][:200]) from problem

    def _damaged(self, name: str, problem: str) -> ConfigError:
        place = self._directory.part(name)
        return ConfigError(KEY, place, f"the parameter {name} cannot be restored ({problem}): the directory is damaged")


def weights_of(model: Decoder) -> WeightSource:
    """A loaded model's parameters by name, as it holds them."""
    leaves = {name_of(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(nnx.state(model))[0]}

    def weight(name: str, parameter: Parameter) -> jax.Array:
        if name not in leaves or leaves[name].shape != parameter.shape or leaves[name].dtype == jnp.int8:
            raise ConfigError("model.quantisation", model.shape.quantisation, "only plain weights are saved", ("none",))
        return leaves[name]

    return weight


def save(path: Path, shape: ModelShape, source: WeightSource, files: Iterable[Path] = ()) -> None:
    """Write the model to the directory `path`, with a copy of `files`, its tokenizer's.

    Raises `ConfigError` for a directory that is there, and for numbers that are not finite. What is not finished lies
    beside it, at `PATH.partial`.
    """
    if path.exists():
        raise ConfigError("path", path, "is there already")
    unfinished = path.with_name(f"{path.name}.partial")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)
    stored = write_parts(unfinished, shape, source)
    (unfinished / DESCRIPTION).write_text(description(shape, stored), encoding="utf-8")
    for file in files:
        shutil.copyfile(file, unfinished / file.name)
    unfinished.rename(path)


def write_parts(
    path: Path,
    shape: ModelShape,
    source: WeightSource,
    done: Callable[[str], dict[str, Stored] | None] = lambda part: None,
    finished: Callable[[str, dict[str, Stored]], None] = lambda part, stored: None,
) -> dict[str, Stored]:
    """Write part after part below `path`. `done` knows those of before, and `finished` is told of each new one."""
    import orbax.checkpoint as ocp

    checkpointer, result = _checkpointer(), dict[str, Stored]()
    for part, group in itertools.groupby(parameters(shape).items(), lambda item: part_of(item[0])):
        place = (path / WEIGHTS / part).resolve()
        kept = done(part) if place.is_dir() else None
        if kept is None:
            arrays = {name: source(name, parameter) for name, parameter in group}
            kept = {name: _stored(name, array) for name, array in arrays.items()}
            tree = {inside_of(name): array for name, array in arrays.items()}
            checkpointer.save(place, args=ocp.args.PyTreeSave(tree), force=True)
            finished(part, kept)
        result |= kept
    return result


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of every checkpoint that other processes could miss
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())


def _stored(name: str, array: Any) -> Stored:
    if not bool(jnp.isfinite(array).all()):
        raise ConfigError(KEY, name, "holds numbers that are NaN or infinite, which are not saved")
    return Stored(tuple(array.shape), str(array.dtype), _digest(np.asarray(array)))


def _digest(array: NDArray[Any]) -> str:
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
