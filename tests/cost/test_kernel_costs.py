"""The kernels' costs against a count: loops over single numbers, in a memory that notes what is touched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mcjax.cost import formulas
from mcjax.cost.catalogue import model
from mcjax.cost.kernels import (
    AttentionShape,
    KernelCost,
    decode_cost,
    keys_read,
    kv_pack_cost,
    kv_unpack_cost,
    prefill_cost,
    visible_pairs,
)


@dataclass
class Machine:
    """Counts operations, and the bytes of each number that is read or written, once."""

    multiply_adds: int = 0
    exponentials: int = 0
    read: dict[tuple, int] = field(default_factory=dict)
    written: dict[tuple, int] = field(default_factory=dict)

    def cost(self) -> KernelCost:
        sums = (sum(self.read.values()), sum(self.written.values()))
        return KernelCost(2 * self.multiply_adds, *sums, self.exponentials)

    def stored(self, shape: AttentionShape, touched: dict[tuple, int], *vector: object) -> None:
        """A vector of the pages and its scale."""
        for number in range(shape.head_dim):
            touched[("pages", *vector, number)] = shape.kv_dtype_bytes
        if shape.scale_bytes:
            touched[("scales", *vector)] = shape.scale_bytes

    def row(self, shape: AttentionShape, touched: dict[tuple, int], *vector: object) -> None:
        for number in range(shape.head_dim):
            touched[(*vector, number)] = shape.dtype_bytes

    def attend(self, shape: AttentionShape, sequence: int, position: int, new_from: int, who: tuple) -> None:
        """All heads of the query at `position`; keys from `new_from` on are rows, not yet pages."""
        for head in range(shape.heads):
            self.row(shape, self.read, "query", *who, head)
            kv_head = head // (shape.heads // shape.kv_heads)
            for key in range(position + 1):
                if shape.window is not None and key <= position - shape.window:
                    continue
                for kind in ("key", "value"):
                    if key >= new_from:
                        self.row(shape, self.read, kind, sequence, key, kv_head)
                    else:
                        self.stored(shape, self.read, kind, sequence, key, kv_head)
                    for _ in range(shape.head_dim):
                        self.multiply_adds += 1
                self.exponentials += 1 + shape.soft_cap
            self.row(shape, self.written, "result", *who, head)


def counted_prefill(shape: AttentionShape, sequences: list[tuple[int, int]], tokens: int) -> KernelCost:
    machine, row = Machine(), 0
    for sequence, (prefix, new) in enumerate(sequences):
        for position in range(prefix, prefix + new):
            machine.attend(shape, sequence, position, prefix, (row,))
            row += 1
            for kv_head in range(shape.kv_heads):
                for kind in ("key", "value"):
                    machine.stored(shape, machine.written, kind, sequence, position, kv_head)
    for spare in range(row, tokens):
        for head in range(shape.heads):
            machine.row(shape, machine.written, "result", spare, head)
    return machine.cost()


def counted_decode(shape: AttentionShape, rows: list[tuple[int, int]], width: int) -> KernelCost:
    machine = Machine()
    for row, (context, queries) in enumerate(rows):
        for query in range(width):
            for head in range(shape.heads):
                machine.row(shape, machine.written, "result", row, query, head)
                machine.written["logarithm", row, query, head] = 4
            if query < queries:
                machine.attend(shape, row, context - queries + query, context, (row, query))
    return machine.cost()


@st.composite
def shapes(draw: st.DrawFn) -> AttentionShape:
    kv_heads, groups = draw(st.sampled_from([(1, 1), (1, 4), (2, 1), (3, 2)]))
    kv_dtype_bytes, scale_bytes = draw(st.sampled_from([(2, 0), (4, 0), (1, 4)]))
    return AttentionShape(
        heads=kv_heads * groups,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 3])),
        page_tokens=draw(st.sampled_from([1, 4])),
        dtype_bytes=draw(st.sampled_from([2, 4])),
        kv_dtype_bytes=kv_dtype_bytes,
        scale_bytes=scale_bytes,
        window=draw(st.none() | st.integers(1, 14)),
        soft_cap=draw(st.booleans()),
    )


PAIRS = st.tuples(st.integers(0, 9), st.integers(0, 7))


@settings(max_examples=60, deadline=None)
@given(shapes(), st.lists(PAIRS, max_size=3), st.integers(0, 3))
@example(AttentionShape(2, 1, 3, 4, 2, 1, 4, window=1), [(5, 1), (0, 0), (0, 7), (9, 0)], 2)
@example(AttentionShape(2, 1, 3, 4, 2, 2, 0, window=8), [(7, 1), (8, 1), (6, 3)], 0)
def test_prefill_is_what_loops_over_single_numbers_count(shape, sequences, spare) -> None:
    tokens = sum(new for _, new in sequences) + spare
    assert prefill_cost(shape, sequences, tokens) == counted_prefill(shape, sequences, tokens)
    if not spare:
        assert prefill_cost(shape, sequences) == prefill_cost(shape, sequences, tokens)


@settings(max_examples=60, deadline=None)
@given(shapes(), st.lists(PAIRS, max_size=3), st.integers(0, 2))
@example(AttentionShape(2, 2, 1, 1, 4, 1, 4, window=3, soft_cap=True), [(2, 1), (0, 3), (9, 4)], 1)
def test_decode_is_what_loops_over_single_numbers_count(shape, pairs, spare) -> None:
    rows = [(before + queries, queries) for before, queries in pairs]
    most = max((queries for _, queries in rows), default=0)
    width = most + spare
    assert decode_cost(shape, rows, width) == counted_decode(shape, rows, width)
    assert decode_cost(shape, rows) == sum(
        (counted_decode(shape, [row], row[1]) for row in rows), start=KernelCost(0, 0, 0)
    )


@settings(max_examples=30, deadline=None)
@given(shapes(), st.integers(1, 3), st.integers(0, 3), st.sampled_from([None, (2, 0), (4, 0), (1, 4)]))
def test_packing_is_what_a_copy_of_single_numbers_counts(shape, layers, pages, block_dtype) -> None:
    machine = Machine()
    kv_dtype_bytes, scale_bytes = block_dtype or (shape.kv_dtype_bytes, shape.scale_bytes)
    block = replace(shape, kv_dtype_bytes=kv_dtype_bytes, scale_bytes=scale_bytes)
    for vector in vectors(shape, layers, pages):
        machine.stored(shape, machine.read, *vector)
        machine.stored(block, machine.written, *vector)
    there, back = (
        cost(shape, layers, pages, block.token_bytes if block_dtype else None)
        for cost in (kv_pack_cost, kv_unpack_cost)
    )
    assert there == machine.cost()
    assert (back.read_bytes, back.written_bytes) == (there.written_bytes, there.read_bytes)
    assert back.flops == back.exponentials == 0


def vectors(shape: AttentionShape, layers: int, pages: int) -> Iterator[tuple[int, ...]]:
    for layer in range(layers):
        for page in range(pages):
            for offset in range(shape.page_tokens):
                for kind in range(2):
                    for head in range(shape.kv_heads):
                        yield layer, page, offset, kind, head


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 40), st.integers(0, 40), st.none() | st.integers(1, 90))
def test_pairs_and_keys_are_those_that_the_definition_lets_see(before, new, window) -> None:
    seen = [
        (position, key)
        for position in range(before, before + new)
        for key in range(before + new)
        if key <= position and (window is None or key > position - window)
    ]
    assert visible_pairs(before + new, new, window) == len(seen)
    assert keys_read(before + new, new, window) == len({key for _, key in seen})


@pytest.mark.parametrize("name", ["llama3-70b", "llama3-8b", "smollm2", "tiny"])
def test_the_simulator_counts_attention_as_the_kernels_do(name) -> None:
    shape = model(name)
    layer = AttentionShape(
        shape.heads, shape.kv_heads, shape.head_dim, 64, shape.dtype_bytes, shape.kv_dtype_bytes
    )  # all heads: the whole instance
    for start, length in ((0, 1), (0, 1000), (777, 256)):
        matmuls = length * formulas.matmul_flops_per_token(shape)
        attention = shape.layers * prefill_cost(layer, [(start, length)]).flops
        assert formulas.prefill_flops(shape, start, length) == matmuls + attention
    contexts = [1, 100, 4000]  # before the step: it attends to its new token too
    matmuls = len(contexts) * (formulas.matmul_flops_per_token(shape) + formulas.head_flops(shape))
    step = decode_cost(layer, [(context + 1, 1) for context in contexts])
    assert formulas.decode_flops(shape, 3, sum(contexts)) == matmuls + shape.layers * step.flops
    queries = len(contexts) * layer.query_bytes
    keys = shape.layers * (step.read_bytes - queries)
    assert formulas.decode_bytes(shape, 3, sum(contexts)) == formulas.weight_read_bytes(shape, 3) + keys


def test_at_real_sizes_decode_waits_for_memory_and_prefill_for_arithmetic() -> None:
    """Llama-3-8B on one H200 (989 TFLOP/s, 4.8 TB/s): 206 FLOPs a byte is where one limit takes over from the other."""
    layer = AttentionShape(32, 8, 128, 64)
    step = decode_cost(layer, [(8192, 1)] * 32)
    assert step.read_bytes == 32 * (32 * 128 * 2 + 8192 * 2 * 8 * 128 * 2)
    assert step.flops == 32 * 8192 * 4 * 32 * 128
    assert step.flops / step.bytes == pytest.approx(4, rel=1e-2)  # the group of query heads that share a key
    whole = prefill_cost(layer, [(0, 16_384)])
    assert whole.flops == 16_384 * 16_385 // 2 * 4 * 32 * 128
    assert whole.flops / whole.bytes > 4000
