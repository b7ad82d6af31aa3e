"""The engine with other kernels than XLA's: the same tokens within the margin, and blocks of the same layout."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mcjax.backends.jax.judge import Judge, reference_geometry
from mcjax.backends.jax.numerics import TOLERANCES, Answer
from mcjax.backends.jax.placement import Place
from mcjax.backends.jax.programs import Geometry, Programs
from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError
from mcjax.kernels.choice import KernelChoice
from mcjax.models import builtin
from mcjax.types import Sampling

pytestmark = pytest.mark.timeout(600)  # interpreted kernels take long to compile

GEOMETRY = Geometry(pages=14, page_tokens=8, max_batch=2, chunk_tokens=16, max_context_tokens=56, move_pages=4)
SMALL = dataclasses.replace(builtin.DEFAULT_SHAPE, layers=2)  # interpreted kernels are slow
PALLAS = KernelChoice("pallas", "pallas", "pallas", "heads_first")
FIRST, SECOND = list(range(7)), [13, 2, 9, 4, 11, 0, 7]
PROMPT, STEPS = 27, 8
"""A full chunk and a part of one, which ends inside of a page."""


class Engines:
    """Programs by what they run, and what XLA's kernels say of answers."""

    def __init__(self) -> None:
        self.model = builtin.build(SMALL, max_positions=GEOMETRY.max_context_tokens)
        self._programs: dict[str, Programs] = {}
        self._judge = Judge(Programs(self.model, reference_geometry(GEOMETRY)), jax.local_devices()[0])

    def programs(self, choice: KernelChoice) -> Programs:
        return self._programs.setdefault(repr(choice), Programs(self.model, GEOMETRY, choice))

    def shortfall(self, prompt: np.ndarray, output: list[int]) -> float:
        (found,) = self._judge.shortfalls([Answer(prompt, np.asarray(output, np.int32), Sampling())])
        return float(found.max())


def compiled(programs: Programs, place: Place) -> Programs:
    """All that a test will run. An engine that compiles as it goes would run out of the tests' patience."""
    on = programs.on(place)
    on.model(1, GEOMETRY.chunk_tokens)
    on.model(GEOMETRY.max_batch, 1)
    on.sampler(1)
    on.sampler(GEOMETRY.max_batch)
    assert callable(on.gather)
    assert callable(on.scatter)
    return programs


@pytest.fixture(scope="module")
def engines() -> Engines:
    return Engines()


@pytest.fixture
def lab(lab: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The moves of the other engine tests, in this geometry."""
    monkeypatch.setattr(type(lab), "geometry", GEOMETRY)
    return lab


def numbers(blocks: np.ndarray, tokens: int) -> np.ndarray:
    """`[L, 2, tokens, Hkv, D]` of canonical blocks."""
    shape = (len(blocks), *SMALL.page_shape(GEOMETRY.page_tokens))
    return np.concatenate(list(blocks.view(np.float32).reshape(shape)), axis=2)[:, :, :tokens]


async def served(lab: Any, executor: Any, pages: list[int], start: int = 0) -> tuple[list[int], np.ndarray]:
    """Tokens of the prompt from `start` on and `STEPS` more, and the blocks of the prompt's pages before those."""
    prompt = lab.prompt(5, PROMPT)
    first = await lab.prefill(executor, prompt, pages, start=start)
    blocks = await executor.on_thread(lambda: executor.read_pages(pages[:4]))
    return [first, *await lab.decode(executor, first, PROMPT, pages, STEPS)], blocks


CASES = {
    "pallas": (PALLAS, 1),
    "pallas over a mesh": (PALLAS, 2),
    "xla, heads first, where devices share key heads": (KernelChoice(pages="heads_first"), 4),
}
MORE = {
    "prefill alone is pallas": (dataclasses.replace(PALLAS, decode="xla", kv_pack="xla"), 1),
    "decode alone is pallas": (dataclasses.replace(PALLAS, prefill="reference", kv_pack="xla"), 1),
    "pallas where devices share key heads": (PALLAS, 4),
}


@pytest.mark.parametrize(
    ("choice", "devices"),
    [
        *(pytest.param(*case, id=name) for name, case in CASES.items()),
        *(pytest.param(*case, id=name, marks=pytest.mark.check_long) for name, case in MORE.items()),
    ],
)
def test_tokens_are_those_of_xla_within_the_margin(
    lab: Any, engines: Engines, choice: KernelChoice, devices: int
) -> None:
    """Alone; handed from an engine of XLA's kernels, and to it, by canonical blocks; and after a reused prefix."""
    place = Place(tuple(jax.local_devices()[:devices]))
    prompt = lab.prompt(5, PROMPT)
    programs = compiled(engines.programs(choice), place)
    plain = compiled(engines.programs(KernelChoice()), Place.of(jax.local_devices()[-1]))

    async def main() -> Any:
        ours = lab.executor("ours", place, programs=programs)
        xla = lab.executor("xla", -1, programs=plain)
        own, blocks = await served(lab, ours, FIRST)
        theirs, their_blocks = await served(lab, xla, FIRST)

        async def handed(source_blocks: np.ndarray, token: int, target: Any) -> list[int]:
            await target.on_thread(lambda: target.write_pages(SECOND[:4], source_blocks))
            there = await target.on_thread(lambda: target.read_pages(SECOND[:4]))
            np.testing.assert_array_equal(there, source_blocks)
            return [token, *await lab.decode(target, token, PROMPT, SECOND, STEPS)]

        crossed = [await handed(blocks, own[0], xla), await handed(their_blocks, theirs[0], ours)]
        # Two whole pages of XLA's lie there; the rest of the prompt is computed again on top of them.
        reused, _ = await served(lab, ours, SECOND, start=16)
        return own, blocks, theirs, their_blocks, [*crossed, reused]

    own, blocks, theirs, their_blocks, others = lab.run(main)
    np.testing.assert_allclose(numbers(blocks, PROMPT), numbers(their_blocks, PROMPT), atol=2e-4, rtol=2e-4)
    for output in (own, theirs, *others):
        assert engines.shortfall(prompt, output) <= TOLERANCES[4]
    assert own == theirs, "no two logits are so close here that rounding decides"


@pytest.mark.check_long
@pytest.mark.parametrize("devices", [1, 2])
def test_windows_soft_caps_and_scales_arrive_at_pallas(lab: Any, devices: int) -> None:
    """A window shorter than the chunks and than the prompt; over a mesh too. Each option matters to the tokens."""
    shape = dataclasses.replace(
        SMALL,
        layer_windows=(9, 0),
        attention_soft_cap=2.0,
        query_scale=0.4,
        max_context_tokens=64,
        tied_embeddings=True,
    )
    model = builtin.build(shape, max_positions=GEOMETRY.max_context_tokens)
    place = Place(tuple(jax.local_devices()[:devices]))
    ours = compiled(Programs(model, GEOMETRY, PALLAS), place)
    plain = compiled(Programs(model, GEOMETRY), Place.of(jax.local_devices()[-1]))

    async def main() -> Any:
        found = []
        for name, where, programs in (("ours", place, ours), ("xla", -1, plain)):
            found.append(await served(lab, lab.executor(name, where, programs=programs), FIRST))
        return found

    (own, blocks), (theirs, their_blocks) = lab.run(main)
    np.testing.assert_allclose(numbers(blocks, PROMPT), numbers(their_blocks, PROMPT), atol=2e-4, rtol=2e-4)
    prompt = lab.prompt(5, PROMPT)

    def shortfall(shape: ModelShape) -> float:
        other = builtin.build(shape, max_positions=GEOMETRY.max_context_tokens)
        judge = Judge(Programs(other, reference_geometry(GEOMETRY)), jax.local_devices()[0])
        (found,) = judge.shortfalls([Answer(prompt, np.asarray(own, np.int32), Sampling())])
        return float(found.max())

    assert own == theirs
    assert shortfall(shape) <= TOLERANCES[4]
    for without in ({"layer_windows": ()}, {"attention_soft_cap": 0.0}, {"query_scale": 0.0}):
        assert shortfall(dataclasses.replace(shape, **without)) > TOLERANCES[4], without


def test_unwritten_pages_are_nan_whatever_their_layout(lab: Any, engines: Engines) -> None:
    programs = compiled(engines.programs(PALLAS), Place.of(jax.local_devices()[0]))

    async def main() -> np.ndarray:
        executor = lab.executor("ours", programs=programs)
        await executor.on_thread(lambda: executor.write_pages([3], np.zeros((1, programs.page_bytes), np.uint8)))
        executor.poison([3])
        return await executor.on_thread(lambda: executor.read_pages([3, 5]))

    assert np.isnan(lab.run(main).view(np.float32)).all()


@pytest.mark.check_long
def test_blocks_of_bfloat16_pages_are_the_same_words(lab: Any) -> None:
    """Pages of Pallas kernels are of the model's dtype on a CPU too; blocks are words, as XLA's pages are."""
    shape = dataclasses.replace(SMALL, dtype_bytes=2, kv_dtype_bytes=2, layers=1)
    model = builtin.build(shape, max_positions=GEOMETRY.max_context_tokens)
    place = Place.of(jax.local_devices()[0])
    ours, xla = (compiled(Programs(model, GEOMETRY, choice), place) for choice in (PALLAS, KernelChoice()))
    assert (ours.block_dtype, xla.block_dtype, ours.page_dtype) == (np.uint16, np.uint16, jnp.bfloat16)

    async def main() -> Any:
        results = []
        for name, programs in (("ours", ours), ("xla", xla)):
            executor = lab.executor(name, programs=programs)
            results.append(await served(lab, executor, FIRST))
        return results

    (tokens, blocks), (_, their_blocks) = lab.run(main)
    judge = Judge(Programs(model, reference_geometry(GEOMETRY)), jax.local_devices()[0])
    (found,) = judge.shortfalls([Answer(lab.prompt(5, PROMPT), np.asarray(tokens, np.int32), Sampling())])
    assert found.max() <= TOLERANCES[2]
    wide, theirs = (array.view(jnp.bfloat16).astype(np.float32) for array in (blocks, their_blocks))
    np.testing.assert_array_equal(np.isnan(wide), np.isnan(theirs))
    np.testing.assert_allclose(wide[~np.isnan(wide)], theirs[~np.isnan(wide)], atol=0.1)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of a user's own, in a working directory."""
    (tmp_path / "kernels_of_mine.py").write_text(
        textwrap.dedent(
            """
            from mcjax.kernels.attention.reference import paged_attention
            from mcjax.kernels.xla import Gather, WriteThenRead

            SEEN = []

            def attention(queries, keys, values, pages, layer, page_table, positions, sharpness=1.0):
                SEEN.append((queries.shape, pages.shape))
                plain = WriteThenRead(paged_attention, "tokens_first")
                return plain(queries * sharpness, keys, values, pages, layer, page_table, positions)

            class Pack(Gather):
                def __init__(self):
                    super().__init__("tokens_first")
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "kernels_of_mine"
    sys.modules.pop("kernels_of_mine", None)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_kernel_of_the_users_own(lab: Any, engines: Engines, mine: str, devices: int) -> None:
    """On a mesh it sees the heads of one device."""
    own = {"_target_": f"{mine}.attention", "sharpness": 1.0}
    plain = Programs(engines.model, GEOMETRY, KernelChoice(decode=own, kv_pack={"_target_": f"{mine}.Pack"}))
    sharp = Programs(engines.model, GEOMETRY, KernelChoice(decode={**own, "sharpness": 0.1}))
    place = Place(tuple(jax.local_devices()[:devices]))
    for programs in (plain, sharp):
        compiled(programs, place)

    async def main() -> Any:
        outputs = []
        for name, programs in (("plain", plain), ("sharp", sharp)):
            outputs.append(await served(lab, lab.executor(name, place, programs=programs), FIRST))
        return outputs

    (output, _), (other, _) = lab.run(main)
    assert engines.shortfall(lab.prompt(5, PROMPT), output) <= TOLERANCES[4]
    assert engines.shortfall(lab.prompt(5, PROMPT), other) > TOLERANCES[4], "its argument arrives"
    heads = {(queries[2], pages[4]) for queries, pages in sys.modules[mine].SEEN}
    assert heads == {(SMALL.heads // devices, SMALL.kv_heads // devices)}


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"prefill": "flash"}, r"kernels\.prefill=flash: .*allowed: xla, pallas, reference"),
        ({"kv_pack": "reference"}, r"kernels\.kv_pack=reference: .*allowed: xla, pallas$"),
        ({"pages": "pages_first"}, r"kernels\.pages=pages_first: .*allowed: tokens_first, heads_first"),
        ({"decode": "pallas"}, r"kernels\.decode=pallas: .*allowed: xla, kernels\.pages=heads_first"),
        ({"decode": {"sharpness": 2}}, r"kernels\.decode=.* needs a _target_"),
    ],
)
def test_choices_that_cannot_be_are_refused_with_those_that_can(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        KernelChoice(**wrong)
