"""Write a block down only when it is to leave."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OnEvict:
    """A block goes to the tier below when room is made, and whoever needs the room waits for it. Watermarks make room
    ahead of need. Least is written; what was never evicted is not there after a restart.

    `exclusive`: what is promoted leaves the tier below.
    """

    exclusive: bool = False
    must_save: bool = True

    def at_insert(self) -> bool:
        return False

    def at_hit(self, hits: int) -> bool:
        return False

    def ahead(self, unsaved: int, capacity: int) -> int:
        return 0
