"""The secret that a peer proves it knows before it may touch memory. From the environment or a file, never shown."""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from mcjax.errors import ConfigError

VARIABLE = "MCJAX_TRANSFER_SECRET"
FILE_VARIABLE = "MCJAX_TRANSFER_SECRET_FILE"
LEAST_BYTES = 16


class Secret:
    """Some bytes that no log, config, error or representation shows."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes):
        """Raises `ConfigError` for fewer than 16 bytes."""
        if len(value) < LEAST_BYTES:
            raise ConfigError(VARIABLE, "(hidden)", f"must have at least {LEAST_BYTES} bytes")
        self._value = value

    @classmethod
    def random(cls) -> Secret:
        return cls(secrets.token_bytes(32))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Secret | None:
        """`MCJAX_TRANSFER_SECRET`, or what the file `MCJAX_TRANSFER_SECRET_FILE` holds (less white space at its ends);
        None if neither is set. Raises `ConfigError` for one that is too short or cannot be read."""
        environment = os.environ if environment is None else environment
        if VARIABLE in environment:
            return cls(environment[VARIABLE].encode())
        if FILE_VARIABLE not in environment:
            return None
        path = environment[FILE_VARIABLE]
        try:
            return cls(Path(path).read_bytes().strip())
        except OSError as problem:
            raise ConfigError(FILE_VARIABLE, path, f"cannot be read ({problem.strerror})") from None

    def proof(self, *parts: bytes) -> bytes:
        """HMAC-SHA256 over the parts, each with its length: 32 bytes."""
        framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self._value, framed, "sha256")

    def proves(self, proof: bytes, *parts: bytes) -> bool:
        """Whether `proof` is that of the parts, in time that does not depend on them."""
        return hmac.compare_digest(proof, self.proof(*parts))

    def hand_over(self) -> bytes:
        """The bytes themselves, for a pipe to a child process; for nothing else."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(hidden)"
