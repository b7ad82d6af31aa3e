"""The directory against a model of plain sets and lists."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
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
            everything = [node for node in range(len(NAMES)) if all((node, one) in self.reported for one in blocks)]
            assert directory.holders_of(blocks) == (everything if blocks else [])

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


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 1100),
    st.lists(st.tuples(st.integers(0, 1099), st.integers(0, 12)), max_size=200),
    st.lists(st.tuples(st.integers(0, 1099), st.integers(0, 12)), max_size=20),
)
def test_prefixes_of_many_nodes_are_told_apart(
    nodes: int, added: list[tuple[int, int]], removed: list[tuple[int, int]]
) -> None:
    """Node after node holds another length: few and many of them part from the rest at the same depth."""
    directory, chain = Directory(), list(range(12))
    for index in range(nodes):
        directory.node_index(f"n{index}")
    lengths = [0] * nodes
    for node, length in added:
        directory.add(node % nodes, chain[:length])
        lengths[node % nodes] = max(lengths[node % nodes], length)
    for node, length in removed:
        directory.remove(node % nodes, chain[length:])
        lengths[node % nodes] = min(lengths[node % nodes], length)
    assert directory.prefix_blocks(chain).tolist() == lengths
    for depth in (1, 12):
        assert directory.holders_of(chain[:depth]) == [node for node in range(nodes) if lengths[node] >= depth]


def test_blocks_with_the_same_holders_share_what_says_so():
    """At a thousand nodes a mask takes more than a hundred bytes, at millions of blocks the directory's most."""
    directory = Directory()
    for index in range(1000):
        directory.node_index(f"n{index}")
    for node in (999, 3, 500):
        directory.add(node, range(100))
    directory.add(7, range(50))
    directory.remove(3, range(200))
    masks = directory._masks
    assert len({id(mask) for mask in masks.values()}) == 2
    assert [directory.holders(block) for block in (0, 49, 50, 99)] == [[7, 500, 999]] * 2 + [[500, 999]] * 2
