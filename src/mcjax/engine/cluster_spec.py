"""`cluster`: which instances exist, as a plain value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from mcjax.errors import ConfigError
from mcjax.types import Role

_LETTERS = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}
_FORM = "like 8p8d, 16m, 2p2d+1m, or a mapping such as {prefill: 8, decode: 8}"
PER_DOMAIN = "per_domain"
"""In a mapping: how many nodes, one behind the other, fail together."""


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One instance, on a node of its own."""

    name: str
    role: Role
    fault_domain: str = ""
    """What its node fails together with, such as a rack; empty: nothing else."""

    @property
    def node(self) -> str:
        return node_of(self.name)


def node_of(instance: str) -> str:
    """The node that an instance has to itself."""
    return f"node-{instance}"


def parse_cluster(value: object, key: str = "cluster") -> list[InstanceSpec]:
    """Instances in a fixed order: `p0 p1 .. d0 d1 .. m0 ..`. Raises `ConfigError` for what could serve nothing.

    `key`: where the config has the value.
    """
    per_domain = _per_domain(value, key)
    counts = _counts(value, key)
    if counts[Role.MIXED] == 0 and (counts[Role.PREFILL] == 0 or counts[Role.DECODE] == 0):
        raise ConfigError(key, value, f"needs prefill and decode instances, or mixed ones; {_FORM}")
    letter = {role: letter for letter, role in _LETTERS.items()}
    names = [(f"{letter[role]}{index}", role) for role, count in counts.items() for index in range(count)]
    return [
        InstanceSpec(name, role, f"domain-{index // per_domain}" if per_domain else "")
        for index, (name, role) in enumerate(names)
    ]


def _per_domain(value: object, key: str) -> int:
    """Nodes that fail together; 0 where every node fails alone."""
    told = cast("Mapping[object, object]", value).get(PER_DOMAIN) if isinstance(value, Mapping) else None
    if told is not None and (isinstance(told, bool) or not isinstance(told, int) or told < 1):
        raise ConfigError(f"{key}.{PER_DOMAIN}", told, "must be 1 or more nodes")
    return told or 0


def _counts(value: object, key: str) -> dict[Role, int]:
    counts = dict.fromkeys((Role.PREFILL, Role.DECODE, Role.MIXED), 0)
    if isinstance(value, Mapping):
        for role, count in cast("Mapping[object, object]", value).items():
            if role == PER_DOMAIN:
                continue
            if role not in counts or isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ConfigError(f"{key}.{role}", count, "needs a role and a count", [str(role) for role in counts])
            counts[Role(role)] = count
        return counts
    text = str(value).lower().replace("+", "")
    parts = re.findall(r"(\d+)([pdm])", text)
    if not parts or "".join(count + letter for count, letter in parts) != text:
        raise ConfigError(key, value, f"cannot be read; write it {_FORM}")
    for count, letter in parts:
        counts[_LETTERS[letter]] += int(count)
    return counts
