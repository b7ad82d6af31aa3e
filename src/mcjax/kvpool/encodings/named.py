"""Encodings by name, as a config chooses them for a tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mcjax.errors import ConfigError
from mcjax.kvpool.encodings.base import BlockLayout
from mcjax.kvpool.encodings.int8 import Int8
from mcjax.kvpool.encodings.none import AsComputed
from mcjax.types import Packer


def _fp8(layout: BlockLayout) -> Packer:
    from mcjax.kvpool.encodings.fp8 import FP8  # whose numbers another package brings

    return FP8(layout)


MAKERS: Mapping[str, Callable[[BlockLayout], Packer]] = {
    "none": lambda layout: AsComputed(layout.block_bytes),
    "int8": Int8,
    "fp8": _fp8,
}


def packer_of(name: str, layout: BlockLayout, key: str) -> Packer:
    """The encoding of that name for blocks of `layout`. Raises `ConfigError` about the config's `key` for another."""
    if name not in MAKERS:
        raise ConfigError(key, name, "is no encoding", MAKERS)
    return MAKERS[name](layout)
