"""What shows a cell: it passes the references, and sees what is wrong with a body that is not quite one."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace

import proof_bodies
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.errors import ConfigError, MissingExtra
from mcjax.kernels.proof import cells
from mcjax.kernels.proof.cells import Cell, goes_together
from mcjax.kernels.proof.cover import pairs_of
from mcjax.kernels.proof.show import show

SMALL = Cell("decode-tpu", "interpret", "float32", 64, 16, "llama3-8b")


@pytest.fixture
def bodies(monkeypatch):
    """The bodies of `proof_bodies`; a function that has one for another."""
    for body, place in proof_bodies.BODIES.items():
        monkeypatch.setitem(cells.BODIES, body, place)
    return lambda body, name: monkeypatch.setitem(cells.BODIES, body, f"proof_bodies:{name}")


@pytest.mark.parametrize(
    ("kernel", "rung", "dtype"),
    [
        ("prefill", "interpret", "int8"),
        ("decode", "interpret", "bfloat16"),
        ("decode", "races", "float32"),
        ("kv_pack", "interpret", "float8_e4m3fn"),
        ("kv_unpack", "interpret", "float32"),
    ],
)
def test_references_pass(bodies, kernel, rung, dtype) -> None:
    feature = cells.features_of(kernel)[cells.DTYPES.index(dtype) % 3]
    outcome = show(replace(SMALL, body=f"{kernel}-tpu", rung=rung, dtype=dtype, feature=feature))
    assert outcome.status == "passed", outcome.error
    assert outcome.facts.get("error", 0) < 1


@pytest.mark.parametrize(
    ("body", "spoilt", "error"),
    [
        ("decode-tpu", "off_by_a_little", "times its bound"),
        ("decode-tpu", "leaves_a_row", "not written"),
        ("prefill-tpu", "writes_elsewhere", "other bits"),
        ("kv_pack-tpu", "drops_a_head", "a block differs"),
        ("prefill-tpu", "refuses", "take pages of 64 tokens"),
        ("decode-tpu", "nowhere", "AttributeError"),
    ],
)
def test_a_body_that_is_not_right_fails(bodies, body, spoilt, error) -> None:
    bodies(body, spoilt)
    outcome = show(replace(SMALL, body=body))
    assert outcome.status == "failed"
    assert error in outcome.error


def test_an_environment_that_cannot_tell_says_so(monkeypatch) -> None:
    monkeypatch.setattr(cells.importlib.util, "find_spec", lambda _: None)
    for rung, extra in (("v6e", "aot-tpu"), ("h200", "aot-gpu")):
        cell = replace(SMALL, rung=rung, context="8k", body="decode-gpu" if rung == "h200" else "decode-tpu")
        with pytest.raises(MissingExtra, match=extra):
            show(cell)


@pytest.mark.aot_tpu
def test_what_does_not_compile_fails_with_the_limit(bodies) -> None:
    bodies("kv_pack-tpu", "too_large")
    outcome = show(Cell("kv_pack-tpu", "v6e", "bfloat16", 128, 64, "llama3-8b", context="8k"))
    assert outcome.status == "failed"
    assert "vmem" in outcome.error


AXES = {
    "body": tuple(cells.BODIES),
    "rung": cells.RUNGS,
    "dtype": cells.DTYPES,
    "head_dim": cells.HEAD_DIMS,
    "page_tokens": cells.PAGES,
    "heads": cells.HEADS,
    "feature": tuple({*cells.DECODE_FEATURES, *cells.PACK_FEATURES}),
    "context": cells.CONTEXTS,
}


COVERED = {pair for cell in cells.cover() for pair in pairs_of(asdict(cell))}


@settings(deadline=None)
@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in AXES.items()}))
def test_every_pair_of_a_cell_that_can_be_is_in_the_cover(combination) -> None:
    """Whatever whole cell is possible, each two of its values stand together in some cell of the cover."""
    if goes_together(combination):
        assert COVERED.issuperset(pairs_of(combination))
    name = Cell(**combination).name
    if goes_together(combination):
        assert Cell.of(name) == Cell(**combination)
    else:
        with pytest.raises(ConfigError, match="is no cell"):
            Cell.of(name)


def test_sets_of_cells_are_what_they_say() -> None:
    cover, product = cells.cover(), cells.product()
    assert 54 <= len(cover) <= 75
    assert len(set(cells.cells())) == len(cells.cells()) < len(cover) + len(cells.models()) + len(product)
    assert all(goes_together(asdict(cell)) for cell in cells.cells())
    whole = len(cells.DTYPES) * len(cells.HEAD_DIMS) * len(cells.PAGES)
    counts = Counter((cell.body, cell.rung) for cell in product)
    assert counts.pop(("prefill-gpu_mosaic", "h200")) == 2 * len(cells.PAGES)
    assert set(counts.values()) == {whole}
    for heads, shape in (("llama3-8b", (32, 8)), ("llama3-70b", (8, 1)), ("qwen3-32b", (16, 2)), ("ungrouped", (8, 8))):
        assert replace(SMALL, rung="v6e", context="8k", heads=heads).device_heads == shape
    assert replace(SMALL, heads="qwen3-32b").device_heads == (16, 2)
    assert SMALL.device_heads == (8, 2)


@pytest.mark.parametrize("name", ["", "decode-tpu", SMALL.name + "/x", SMALL.name.replace("D=64", "D=x")])
def test_other_names_are_refused(name) -> None:
    with pytest.raises(ConfigError, match="cell="):
        Cell.of(name)
