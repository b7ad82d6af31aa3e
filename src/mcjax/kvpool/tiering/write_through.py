"""Write a block down as soon as it is there."""

from __future__ import annotations

from dataclasses import dataclass

from mcjax.errors import ConfigError


@dataclass(frozen=True)
class WriteThrough:
    """Every block goes to the tier below when it is committed, or when it was hit for the `min_hits`-th time; what was
    to go and has not yet does not leave before.

    `exclusive`: what is promoted leaves the tier below.
    """

    min_hits: int = 0
    exclusive: bool = False

    def __post_init__(self) -> None:
        if self.min_hits < 0:
            raise ConfigError("kvpool.tiering.min_hits", self.min_hits, "must be 0 (at once) or more")

    @property
    def must_save(self) -> bool:
        """Whether a first-seen block is kept: with `min_hits`, one that nobody came back for may go."""
        return self.min_hits == 0

    def at_insert(self) -> bool:
        return self.min_hits == 0

    def at_hit(self, hits: int) -> bool:
        return hits == self.min_hits

    def ahead(self, unsaved: int, capacity: int) -> int:
        return 0
