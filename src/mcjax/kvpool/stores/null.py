"""The null store: sizes only, for worlds where nothing has bytes."""

from __future__ import annotations

from mcjax.kvpool.stores.slots import SlotStore


class NullStore(SlotStore):
    """Slots that are counted, handed out and go stale like any others, and hold nothing."""
