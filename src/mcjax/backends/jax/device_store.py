"""The HBM tier: an instance's pages as a block store. It keeps the books; the executor holds the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcjax.backends.jax.executor import JaxExecutor
from mcjax.kvpool.stores.slots import SlotStore
from mcjax.transfer.base import Region
from mcjax.types import Tier


@dataclass(slots=True, eq=False)
class PageRegion(Region):
    """Slots of an instance's pages, in the hands they were in, holding what they held."""

    executor: JaxExecutor
    losses: int

    def is_current(self) -> bool:
        """False, too, once the executor has lost what its pages held."""
        return self.losses == self.executor.losses and Region.is_current(self)


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

    def regions(self, slots: Sequence[int]) -> PageRegion:
        # By the losses that have been told of: until then whoever asks may believe in pages that hold nothing any more.
        return PageRegion(self, tuple(slots), self.epoch, self.executor, self.executor.losses_told)

    def _release(self, slots: list[int]) -> None:
        if self._poison:
            self.executor.poison(slots)
        super()._release(slots)
