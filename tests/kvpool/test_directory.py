"""The directory against a model of plain sets and lists."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mcjax.kvpool.directory import Directory

NAMES = [f"n{index}" for index in range(70)]  # more than a machine word has bits
CHAIN = list(range(6))

nodes = st.sampled_from([0, 1, 2, 63, 64, 69])
spans = st.lists(st.integers(0, 7), max_size=4, unique=True)
prefixes = st.integers(0, 6).map(lambda count: CHAIN[:count])


class DirectoryMachine(RuleBasedStateMachine):
    """Reports and expectations, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory()
        for index, name in enumerate(NAMES):
            assert self.directory.node_index(name) == index
        self.reported: set[tuple[int, int]] = set()
        self.expected: Counter[tuple[int, int]] = Counter()

    @rule(node=nodes, blocks=spans | prefixes)
    def add(self, node: int, blocks: list[int]) -> None:
        self.directory.add(node, iter(blocks))
        self.reported |= {(node, block) for block in blocks}

    @rule(node=nodes, blocks=spans)
    def remove(self, node: int, blocks: list[int]) -> None:
        self.directory.remove(node, blocks)
        self.reported -= {(node, block) for block in blocks}

    @rule(node=nodes, blocks=spans | prefixes)
    def expect(self, node: int, blocks: list[int]) -> None:
        self.directory.expect(node, blocks)
        self.expected.update((node, block) for block in blocks)

    @rule(node=nodes, blocks=spans)
    def unexpect(self, node: int, blocks: list[int]) -> None:
        known = [block for block in blocks if self.expected[node, block]]
        self.directory.unexpect(node, known)
        self.expected.subtract((node, block) for block in known)

    @rule(node=nodes)
    def drop_node(self, node: int) -> None:
        self.directory.drop_node(node)
        self.reported = {place for place in self.reported if place[0] != node}

    @invariant()
    def agrees(self) -> None:
        directory = self.directory
        assert directory.nodes == len(NAMES)
        assert len(directory) == len({block for _, block in self.reported})
        for block in range(8):
            assert directory.holders(block) == sorted(node for node, held in self.reported if held == block)
        for blocks in (CHAIN, CHAIN[:3], [3, 2, 7], [], [99]):
            lengths = directory.prefix_blocks(blocks)
            assert lengths.dtype == np.int64
            assert lengths.tolist() == [self.prefix(node, blocks) for node in range(len(NAMES))]

    def prefix(self, node: int, blocks: list[int]) -> int:
        for depth, block in enumerate(blocks):
            if (node, block) not in self.reported and not self.expected[node, block]:
                return depth
        return len(blocks)

    def teardown(self) -> None:
        for node, block in list(self.expected.elements()):
            self.directory.unexpect(node, [block])
        for node in range(len(NAMES)):
            self.directory.drop_node(node)
        assert not self.directory.prefix_blocks(CHAIN).any()
        assert len(self.directory) == 0
        assert self.directory._expected == {}
        assert not any(self.directory._expected_counts.values())


TestDirectory = DirectoryMachine.TestCase
TestDirectory.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_node_keeps_its_index():
    directory = Directory()
    assert [directory.node_index(name) for name in ("a", "b", "a")] == [0, 1, 0]


def test_an_expected_block_counts_for_the_prefix_but_nobody_holds_it():
    directory = Directory()
    node = directory.node_index("a")
    directory.add(node, [0])
    directory.expect(node, [1])
    directory.expect(node, [1])
    directory.unexpect(node, [1])
    assert directory.prefix_blocks([0, 1]).tolist() == [2]
    assert directory.holders(1) == []
    directory.unexpect(node, [1])
    assert directory.prefix_blocks([0, 1]).tolist() == [1]
