"""Models with windows, and models that cache latents: the engine's promises are the same."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from family_cases import CONFIGS
from mcjax.backends.jax.judge import Judge, reference_geometry
from mcjax.backends.jax.numerics import TOLERANCES, Answer
from mcjax.backends.jax.placement import Place
from mcjax.backends.jax.programs import Geometry, Programs
from mcjax.cost.model_shape import ModelShape
from mcjax.models import builtin
from mcjax.types import Sampling

pytestmark = pytest.mark.timeout(300)

GEOMETRY = Geometry(pages=20, page_tokens=8, max_batch=2, chunk_tokens=16, max_context_tokens=72, move_pages=4)
PAGES, OTHERS = list(range(9)), [19, 3, 12, 9, 17, 6, 14, 10, 11]
PROMPT, STEPS = 45, 12
"""Several windows (of 9 tokens), and chunks that are longer than one."""
SHAPES = ["gemma2", "deepseek_v3"]


@functools.cache
def shape_of(name: str) -> ModelShape:
    """Two layers: with a window and without; dense and with experts."""
    return ModelShape.from_hugging_face({**CONFIGS[name], "vocab_size": 259, "num_hidden_layers": 2})


@functools.cache
def programs_of(name: str) -> Programs:
    return Programs(builtin.build(shape_of(name), max_positions=GEOMETRY.max_context_tokens), GEOMETRY)


@pytest.fixture
def lab(lab: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The moves of the other engine tests, in this geometry."""
    monkeypatch.setattr(type(lab), "geometry", GEOMETRY)
    return lab


def compiled(programs: Programs, place: Place) -> Programs:
    """All that a test will run, beforehand: its time is limited."""
    on = programs.on(place)
    on.model(1, GEOMETRY.chunk_tokens)
    on.model(GEOMETRY.max_batch, 1)
    on.sampler(1)
    on.sampler(GEOMETRY.max_batch)
    return programs


async def blocks_of(executor: Any, pages: list[int]) -> np.ndarray:
    return await executor.on_thread(lambda: executor.read_pages(pages))


def bits(blocks: np.ndarray, name: str, tokens: int) -> np.ndarray:
    """`[L, C, tokens, Hkv, D]` of canonical blocks."""
    shape = shape_of(name).page_shape(GEOMETRY.page_tokens)
    return np.concatenate(list(blocks.view(np.uint32).reshape(len(blocks), *shape)), axis=2)[:, :, :tokens]


def test_these_shapes_are_of_those_kinds() -> None:
    windowed, latent = map(shape_of, SHAPES)
    assert windowed.windows == (9, None)
    assert windowed.attention_soft_cap > 0
    assert [group.kind for group in windowed.kv_format(8, "").groups] == ["full", "window"]
    assert [group.kind for group in latent.kv_format(8, "").groups] == ["latent"]
    assert programs_of("deepseek_v3").block_shape == (2, 1, 8, 1, 40)
    for name in SHAPES:
        assert programs_of(name).page_bytes == shape_of(name).kv_format(8, "").block_bytes


@pytest.mark.parametrize("name", SHAPES)
def test_disaggregated_is_colocated_whatever_the_cuts_and_pages(lab: Any, name: str) -> None:
    """Alone; with other cuts and pages; after a reused prefix; and decoded by another, from the blocks that it got."""
    prompt, programs = lab.prompt(5, PROMPT), programs_of(name)
    for device in jax.local_devices()[:2]:
        compiled(programs, Place((device,)))

    async def main() -> Any:
        one = lab.executor("one", 0, programs=programs)
        two = lab.executor("two", 1, programs=programs)
        first = await lab.prefill(one, prompt, PAGES)
        blocks = await blocks_of(one, PAGES[:6])
        colocated = [first, *await lab.decode(one, first, PROMPT, PAGES, STEPS)]
        all_bits = bits(await blocks_of(one, PAGES), name, PROMPT + STEPS)

        assert await lab.prefill(two, prompt, OTHERS, cuts=(1, 7, 30)) == first
        cut = bits(await blocks_of(two, OTHERS[:6]), name, PROMPT)
        await two.on_thread(lambda: two.poison(OTHERS))
        await two.on_thread(lambda: two.write_pages(OTHERS[:6], blocks))
        handed = [first, *await lab.decode(two, first, PROMPT, OTHERS, STEPS)]
        handed_bits = bits(await blocks_of(two, OTHERS), name, PROMPT + STEPS)
        reused = await lab.prefill(one, prompt, PAGES, start=16)
        return (
            first,
            blocks,
            colocated,
            all_bits,
            cut,
            handed,
            handed_bits,
            reused,
            bits(await blocks_of(one, PAGES), name, PROMPT),
        )

    first, blocks, colocated, all_bits, cut, handed, handed_bits, reused, reused_bits = lab.run(main)
    prompt_bits = bits(blocks, name, PROMPT)
    assert not np.isnan(prompt_bits.view(np.float32)).any()
    assert handed == colocated
    assert reused == first
    np.testing.assert_array_equal(cut, prompt_bits)
    np.testing.assert_array_equal(reused_bits, prompt_bits)
    np.testing.assert_array_equal(handed_bits, all_bits)


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("deepseek_v3", 2),
        ("deepseek_v3", 4),
        ("gemma2", 2),
    ],
)
@pytest.mark.check_long
def test_over_devices_tokens_are_those_of_one_within_the_margin(lab: Any, name: str, devices: int) -> None:
    """And blocks are of the same layout: one device goes on from them. Latents lie on every device whole."""
    prompt, programs = lab.prompt(6, PROMPT), programs_of(name)
    place = Place(tuple(jax.local_devices()[:devices]))
    compiled(programs, place)
    compiled(programs, Place.of(jax.local_devices()[-1]))
    if shape_of(name).latent:
        assert programs.on(place).page_bytes == programs.page_bytes

    async def main() -> Any:
        many = lab.executor("many", place, programs=programs)
        one = lab.executor("one", -1, programs=programs)
        first = await lab.prefill(many, prompt, PAGES)
        blocks = await blocks_of(many, PAGES[:6])
        own = [first, *await lab.decode(many, first, PROMPT, PAGES, STEPS)]
        await one.on_thread(lambda: one.write_pages(OTHERS[:6], blocks))
        np.testing.assert_array_equal(await blocks_of(one, OTHERS[:6]), blocks)
        return own, [first, *await lab.decode(one, first, PROMPT, OTHERS, STEPS)]

    judge = Judge(Programs(programs.weights, reference_geometry(GEOMETRY)), jax.local_devices()[-1])
    for output in lab.run(main):
        (found,) = judge.shortfalls([Answer(prompt, np.asarray(output, np.int32), Sampling())])
        assert found.max() <= TOLERANCES[4]
