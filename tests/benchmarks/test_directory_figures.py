"""The directory's figures are of a directory that holds what they say."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType


def test_every_block_has_its_holders_and_every_figure_is_there(module: Callable[[str], ModuleType]) -> None:
    of = module("kvpool_directory")
    sizes = of.Sizes(nodes=20, blocks=2_048, holders=(1, 3), calls=10)
    directory, chains = of.filled(sizes, 3)
    assert len(directory) == 2_048
    assert all(len(directory.holders(block)) >= 3 for block in range(0, 2_048, 97))
    assert len(dict.fromkeys(directory.prefix_blocks(chains[0]).tolist())) > 5, "matches end in many places"
    assert max(directory.prefix_blocks(chains[0])) == of.CHAIN
    rows = of.figures(sizes)["rows"]
    assert [row["holders"] for row in rows] == [1, 3]
    for row in rows:
        assert row["blocks"] > 2_048, "those of the reports, too"
        names = ("match_256", "replicas_256", *(f"report_{span}" for span in of.SPANS))
        assert all(row[name]["mean_us"] > 0 for name in names)
