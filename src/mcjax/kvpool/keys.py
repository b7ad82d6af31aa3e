"""Names of blocks. A key says: these tokens, after exactly these, for this model and layout, under this tenant's salt.

Keys are SHA-256, chained, and equal across processes and restarts. Inside a run small numbers stand for them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from mcjax.errors import ConfigError
from mcjax.types import BlockId, BlockKey, KVFormat, Tokens

SALTS_FILE_VARIABLE = "MCJAX_TENANT_SALTS_FILE"


def namespace(kv_format: KVFormat, salt: str, adapter: str = "") -> bytes:
    """Digest of everything but tokens that decides whether two blocks hold the same bytes, and of the tenant's salt."""
    fields = [kv_format.fingerprint, adapter, salt, str(kv_format.block_tokens)]
    for group in kv_format.groups:
        fields += [group.name, group.kind, str(group.bytes_per_token), str(group.block_multiple)]
    digest = hashlib.sha256(b"mcjax-namespace-1")
    for text in fields:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def keys_from_tokens(space: bytes, tokens: Tokens, block_tokens: int, parent: BlockKey = b"") -> list[BlockKey]:
    """One key a *full* block of `tokens` (`[T]`); a trailing partial block has none and is never shared."""
    data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    width = 4 * block_tokens
    keys: list[BlockKey] = []
    key = parent
    for start in range(0, len(data) - width + 1, width):
        key = hashlib.sha256(space + key + data[start : start + width]).digest()
        keys.append(key)
    return keys


def key_from_trace_id(space: bytes, trace_id: int) -> BlockKey:
    """The key of a block that a trace names by an id, which already stands for the block and all before it."""
    return hashlib.sha256(space + b"trace" + trace_id.to_bytes(8, "little")).digest()


TRACE_SPAN = 1 << 40
"""Ids of a trace below this are block ids as they are, moved up by one span a namespace."""

_KEYS_FROM = 1 << 62
_MAX_SPACES = _KEYS_FROM // TRACE_SPAN


class KeyTable:
    """Interns keys to ids for one run. A trace block's digest is only computed if somebody asks for it.

    What a trace of millions of blocks names by small numbers costs nothing to name here: the first namespace's trace
    ids are its block ids. Keys, and trace ids that are no small numbers, are numbered as they come.
    """

    def __init__(self) -> None:
        self._ids: dict[BlockKey, BlockId] = {}
        self._keys: list[BlockKey] = []
        self._key_spaces: list[bytes] = []
        self._spaces: dict[bytes, int] = {}
        self._space_names: list[bytes] = []

    def intern(self, keys: Sequence[BlockKey], space: bytes = b"") -> tuple[BlockId, ...]:
        """Ids of keys that were made under the namespace `space`; nothing, where that is not known."""
        ids: list[BlockId] = []
        for key in keys:
            found = self._ids.get(key)
            if found is None:
                found = _KEYS_FROM + len(self._keys)
                self._ids[key] = found
                self._keys.append(key)
                self._key_spaces.append(space)
            elif space and not self._key_spaces[found - _KEYS_FROM]:
                self._key_spaces[found - _KEYS_FROM] = space
            ids.append(found)
        return tuple(ids)

    def intern_trace(self, space: bytes, trace_ids: Sequence[int]) -> tuple[BlockId, ...]:
        if not trace_ids:
            return ()
        number = self._spaces.setdefault(space, len(self._space_names))
        if number == len(self._space_names):
            self._space_names.append(space)
        if number == 0 and 0 <= min(trace_ids) <= max(trace_ids) < TRACE_SPAN:
            return tuple(trace_ids)
        return tuple([self._of_trace(space, number, trace_id) for trace_id in trace_ids])

    def _of_trace(self, space: bytes, number: int, trace_id: int) -> BlockId:
        if 0 <= trace_id < TRACE_SPAN and number < _MAX_SPACES:
            return number * TRACE_SPAN + trace_id
        return self.intern([key_from_trace_id(space, trace_id)], space)[0]

    def key(self, block: BlockId) -> BlockKey:
        """The key behind an id."""
        if block >= _KEYS_FROM:
            return self._keys[block - _KEYS_FROM]
        number, trace_id = divmod(block, TRACE_SPAN)
        return key_from_trace_id(self._space_names[number], trace_id)

    def space(self, block: BlockId) -> bytes:
        """The namespace of a block; nothing for one that is known by its key alone."""
        if block >= _KEYS_FROM:
            return self._key_spaces[block - _KEYS_FROM]
        return self._space_names[block // TRACE_SPAN]


class Salts:
    """A tenant's salt: from the JSON file that `MCJAX_TENANT_SALTS_FILE` names, else the tenant's own name.

    Either way tenants never share blocks by accident; only secret salts also keep tenants from probing one another.
    """

    def __init__(self, salts: dict[str, str] | None = None):
        self._salts = salts or {}

    @classmethod
    def from_environment(cls) -> Salts:
        path = os.environ.get(SALTS_FILE_VARIABLE)
        if not path:
            return cls()
        shape = 'it must be a JSON file like {"tenant": "salt"}'
        try:
            loaded: Any = json.loads(Path(path).read_text())
        except OSError as problem:
            raise ConfigError(SALTS_FILE_VARIABLE, path, f"{problem.strerror}; {shape}") from None
        except ValueError as problem:  # of the position, never of the text: it is secret
            where = f"line {problem.lineno}" if isinstance(problem, json.JSONDecodeError) else "not UTF-8"
            raise ConfigError(SALTS_FILE_VARIABLE, path, f"cannot be read ({where}); {shape}") from None
        if not isinstance(loaded, dict):
            raise ConfigError(SALTS_FILE_VARIABLE, path, f"holds no object; {shape}")
        salts = cast("dict[str, Any]", loaded)
        for tenant, salt in salts.items():
            if not isinstance(salt, str) or not salt:
                raise ConfigError(SALTS_FILE_VARIABLE, path, f"the salt of {tenant!r} is no text or empty; {shape}")
        return cls(salts)

    @property
    def tenants(self) -> tuple[str, ...]:
        """Names of those who have a salt of their own."""
        return tuple(self._salts)

    def of(self, tenant: str) -> str:
        salt = self._salts.get(tenant)
        return f"tenant:{tenant}" if salt is None else f"salt:{salt}"

    def __repr__(self) -> str:
        return f"Salts({len(self._salts)} redacted)"


class BlockNamer:
    """Gives a request's full blocks their ids; one namespace a (tenant, adapter)."""

    def __init__(self, kv_format: KVFormat, salts: Salts, table: KeyTable):
        self.kv_format = kv_format
        self.table = table
        self._salts = salts
        self._spaces: dict[tuple[str, str], bytes] = {}

    def space(self, tenant: str, adapter: str = "") -> bytes:
        found = self._spaces.get((tenant, adapter))
        if found is None:
            found = namespace(self.kv_format, self._salts.of(tenant), adapter)
            self._spaces[tenant, adapter] = found
        return found

    def from_tokens(self, tenant: str, tokens: Tokens) -> tuple[BlockId, ...]:
        space = self.space(tenant)
        return self.table.intern(keys_from_tokens(space, tokens, self.kv_format.block_tokens), space)

    def from_trace_ids(self, tenant: str, trace_ids: Sequence[int], full_blocks: int) -> tuple[BlockId, ...]:
        """Ids of the first `full_blocks` trace blocks; the partial one behind them stays private."""
        return self.table.intern_trace(self.space(tenant), trace_ids[:full_blocks])
