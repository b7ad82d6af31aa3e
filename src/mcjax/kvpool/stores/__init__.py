"""Where a node's cache blocks lie, as numbered slots."""
