"""The books of memory that lies in a worker: which slot is whose is decided here, the bytes are there."""

from __future__ import annotations

from mcjax.backends.processes.channel import Channel
from mcjax.kvpool.stores.slots import SlotStore
from mcjax.types import Packer, Tier


class RemoteStore(SlotStore):
    """Slots of a node's host memory, or of its instance's pages.

    With `poison`, the worker overwrites what is released before it obeys any later order: so before a new owner's bytes
    can come in.
    """

    def __init__(
        self,
        node: str,
        tier: Tier,
        capacity: int,
        block_bytes: int,
        channel: Channel,
        name: str = "",
        packer: Packer | None = None,
        poison: bool = False,
    ):
        super().__init__(node, tier, capacity, block_bytes, name, packer)
        self._channel = channel
        self._poison = poison

    def _release(self, slots: list[int]) -> None:
        if self._poison:
            self._channel.send("poison", {"tier": self.tier.value, "slots": slots})
        super()._release(slots)
