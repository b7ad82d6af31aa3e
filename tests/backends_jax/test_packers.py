"""The compiled encodings write and read the very bytes of the plain ones, on any thread."""

from __future__ import annotations

import threading

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mcjax.backends.jax.packers import Compiled, compiled_packer
from mcjax.errors import ConfigError, Unencodable
from mcjax.kvpool.encodings.base import BlockLayout
from mcjax.kvpool.encodings.named import packer_of
from mcjax.types import Packer

LAYOUTS = {dtype: BlockLayout(dtype, 2, 3, 16) for dtype in ("float32", "bfloat16")}
PAIRS = {
    (name, dtype): (packer_of(name, layout, "key"), compiled_packer(name, layout, "key"))
    for name in ("int8", "fp8")
    for dtype, layout in LAYOUTS.items()
}
WORDS = {"float32": np.uint32, "bfloat16": np.uint16}


def outcome(packer: Packer, block: np.ndarray) -> tuple[np.ndarray | None, str]:
    """The packed block, or why there is none."""
    try:
        return packer.pack(block), ""
    except Unencodable as problem:
        return None, str(problem)


@given(st.sampled_from(sorted(PAIRS)), st.data())
@settings(max_examples=300)
def test_any_bits_give_the_bytes_or_the_refusal_of_the_plain_encoding(pair, data):
    plain, compiled = PAIRS[pair]
    assert isinstance(compiled, Compiled)
    words = WORDS[pair[1]]
    block = data.draw(arrays(words, (6 * 16,), elements=st.integers(0, np.iinfo(words).max))).view(np.uint8)
    expected, refused = outcome(plain, block)
    if expected is None:
        assert outcome(compiled, block) == (None, refused)
        return
    assert compiled.pack(block).tobytes() == expected.tobytes()
    assert compiled.unpack(expected).tobytes() == plain.unpack(expected).tobytes()


@pytest.mark.parametrize("pair", sorted(PAIRS))
def test_blocks_like_a_models_too(pair):
    plain, compiled = PAIRS[pair]
    rng = np.random.default_rng(0)
    for spread in (1e-30, 1e-3, 1.0, 1e4):
        values = (rng.standard_normal(96) * np.exp(rng.standard_normal(96)) * spread).astype(np.float32)
        words = values.view(np.uint32)
        block = (words if pair[1] == "float32" else (words >> 16).astype(np.uint16)).view(np.uint8)
        packed = plain.pack(block)
        assert compiled.pack(block).tobytes() == packed.tobytes()
        assert compiled.unpack(packed).tobytes() == plain.unpack(packed).tobytes()


def test_nothing_is_compiled_by_the_threads_that_use_it():
    compiled = compiled_packer("int8", BlockLayout("bfloat16", 4, 4, 64), "key")
    block = np.zeros(compiled.block_bytes, np.uint8)
    block.view(np.uint16)[:] = np.arange(compiled.block_bytes // 2) % 0x7F00
    expected = compiled.pack(block)
    found: list[bytes] = []
    compilations: list[str] = []

    def listen(event: str, *_: object, **__: object) -> None:
        if "backend_compile" in event:
            compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    threads = [threading.Thread(target=lambda: found.append(compiled.pack(block).tobytes())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected.tobytes()] * 4
    assert not compilations


def test_none_computes_nothing_and_what_is_no_encoding_is_named():
    assert not isinstance(compiled_packer("none", LAYOUTS["float32"], "key"), Compiled)
    with pytest.raises(ConfigError, match=r"kvpool\.encoding\.dram=int4"):
        compiled_packer("int4", LAYOUTS["float32"], "kvpool.encoding.dram")
