"""Memories of a run have one layout, or are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcjax.errors import ConfigError
from mcjax.transfer.layout.agreed import Agreed
from mcjax.transfer.layout.describe import whole

LAYOUT = whole("weights", 2, 4, 8, 16, "bfloat16")


def test_the_first_one_says_how_blocks_lie() -> None:
    agreed = Agreed()
    agreed.admit("sizes", None)
    for memory, layout in (("p0.dram", LAYOUT), ("p0.hbm", LAYOUT), ("d0.dram", replace(LAYOUT, encoding="int8"))):
        agreed.admit(memory, layout)
    other = whole("other", 2, 4, 8, 32, "bfloat16")
    with pytest.raises(ConfigError, match=r"layout=d1.dram: its blocks do not lie as those of p0.dram do: model is"):
        agreed.admit("d1.dram", other)
    with pytest.raises(ConfigError, match="block_tokens of group full is 16, not 32"):
        agreed.admit("d1.dram", other)
    agreed.admit("d2.dram", whole("weights", 2, 4, 8, 16, "bfloat16"))
