"""What is resident in one tier of one node, and where: the questions that change nothing."""

from __future__ import annotations

from collections.abc import Sequence

from mcjax.errors import InstanceDown, StaleRegion
from mcjax.kvpool.base import BlockStore
from mcjax.kvpool.groups import boundary
from mcjax.kvpool.index import BlockIndex
from mcjax.transfer.base import Region
from mcjax.types import BlockId, KVGroup


class Residents:
    """The blocks of a pool: committed ones only, in whole prefixes."""

    def __init__(self, node: str, store: BlockStore, groups: Sequence[KVGroup]):
        self.node = node
        self.store = store
        self._boundary = boundary(groups)
        self._index = BlockIndex()
        self._down = False

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._index.slots

    def _check_up(self) -> None:
        if self._down:
            raise InstanceDown(self.node)

    def match(self, blocks: Sequence[BlockId], accepts_lossy: bool = True) -> int:
        """How many leading blocks could be used now, up to a boundary of all KV groups; before the first lossy one for
        who does not accept those. Says nothing about later, and keeps nothing alive; `pin` does.
        """
        self._check_up()
        count = self._leading(blocks, accepts_lossy)
        # A slot holds a block's every group, so one residency stands for them all (`groups.common_prefix`).
        return count - count % self._boundary

    def _leading(self, blocks: Sequence[BlockId], accepts_lossy: bool) -> int:
        count = self._index.leading(blocks)
        return count if accepts_lossy else min(count, self._index.exact(blocks[:count]))

    @property
    def holds_lossy(self) -> bool:
        """Whether any block here is lossy."""
        return bool(self._index.lossy)

    def is_lossy(self, blocks: Sequence[BlockId]) -> bool:
        """Whether the numbers of any of these blocks, as they are here, were rounded, or computed from rounded ones."""
        return self._index.exact(blocks) < len(blocks)

    def region(self, blocks: Sequence[BlockId]) -> Region:
        """Where resident blocks lie. Valid as long as the caller's pin; it goes stale with the slots.

        Raises `StaleRegion` if one has left the index: even pinned blocks do when they are found corrupt.
        """
        self._check_up()
        try:
            return self.store.regions(self._index.slots_of(blocks))
        except KeyError as missing:
            raise self._left(missing) from None

    def checksums(self, blocks: Sequence[BlockId]) -> tuple[bytes, ...]:
        """The checksums that blocks were committed with. Raises `StaleRegion` like `region`."""
        try:
            return self._index.checksums_of(blocks)
        except KeyError as missing:
            raise self._left(missing) from None

    def _left(self, missing: KeyError) -> StaleRegion:
        return StaleRegion(f"pool {self.node}: the block has left the index", first_block=missing.args[0])

    def contents(self) -> dict[BlockId, bytes]:
        """Every resident block and its checksum."""
        blocks = tuple(self._index.slots)
        return dict(zip(blocks, self._index.checksums_of(blocks), strict=True))

    def chain(self, block: BlockId) -> Sequence[BlockId]:
        """The prefix that ends with a resident block. Raises `StaleRegion` if that has left the index."""
        if block not in self._index.slots:
            raise self._left(KeyError(block))
        return self._index.chain(block)

    def parent(self, block: BlockId) -> BlockId | None:
        """What a resident block continues; None at a start. Raises `StaleRegion` like `chain`."""
        if block not in self._index.slots:
            raise self._left(KeyError(block))
        return self._index.parent(block)
