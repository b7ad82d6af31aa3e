"""The HBM tier: an instance's pages as a block store. It keeps the books; the executor holds the bytes."""

from __future__ import annotations

from mcjax.backends.jax.executor import JaxExecutor
from mcjax.kvpool.stores.slots import SlotStore
from mcjax.types import Tier


class DevicePages(SlotStore):
    """Pages of one executor; slot s is page s. With `poison`, freed pages are overwritten with NaN.

    Poisoning is asked for when pages are freed and done before anything that is asked of the executor later, so a new
    owner never loses bytes to it.
    """

    def __init__(self, node: str, executor: JaxExecutor, poison: bool = False):
        capacity = executor.capacity()
        super().__init__(node, Tier.HBM, capacity.pages, capacity.page_bytes, f"{executor.name}.{Tier.HBM}")
        self.executor = executor
        self._poison = poison

    def _release(self, slots: list[int]) -> None:
        if self._poison:
            self.executor.poison(slots)
        super()._release(slots)
