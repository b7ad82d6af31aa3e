from __future__ import annotations

import asyncio
import dataclasses
import re
import threading
from typing import Any

import numpy as np
import pytest

from mcjax.backends.jax.calibrate import fit
from mcjax.backends.jax.programs import Geometry
from mcjax.backends.jax.world import JaxWorld
from mcjax.cost.model_shape import ModelShape
from mcjax.cost.padded import Padded
from mcjax.engine.base import Kind, StepItem, StepPlan
from mcjax.errors import ConfigError
from mcjax.transfer.base import Copy, CopyResult
from mcjax.types import NullRecorder, Role, Sampling

SHAPE = ModelShape(
    name="tiny", layers=1, d_model=16, heads=2, kv_heads=1, head_dim=8, d_ff=24, vocab=259, tied_embeddings=True,
    dtype_bytes=4, kv_dtype_bytes=4, max_context_tokens=256,
)  # fmt: skip
SIZES: dict[str, Any] = {
    "block_tokens": 8,
    "chunk_tokens": 16,
    "max_batch": 2,
    "max_context_tokens": 128,
    "pages": 20,
    "pool_blocks": 10,
}


class Outcomes(NullRecorder):
    def __init__(self):
        self.rows = []

    def outcome(self, time_ns, mechanism, call, payload):
        self.rows.append((time_ns, mechanism, call, payload))


def test_a_prompt_goes_through_the_world_and_no_thread_stays():
    recorder = Outcomes()
    world = JaxWorld(SHAPE, **SIZES, poison=True, recorder=recorder)
    before = threading.active_count()
    reports = []

    async def main():
        with pytest.raises(RuntimeError, match="prepare"):
            world.cost()
        await world.prepare([("p0", Role.PREFILL), ("d0", Role.DECODE)], lambda *args: reports.append(args))
        store = world.pool_store("n0")
        assert world.pool_store("n0") is store
        assert store.block_bytes == world.kv_format().block_bytes
        prefill = world.instance("p0", "n0", Role.PREFILL)
        decode = world.instance("d0", "n0", Role.DECODE)
        device, local, mesh = world.transports()
        for memory in (prefill.pages, decode.pages, store):
            device.register(memory)
        assert (device.name, local.name, mesh.name) == ("device", "local", "mesh")

        source, kept, target = prefill.pages.reserve(2), store.reserve(2), decode.pages.reserve(3)
        prompt = np.arange(16, dtype=np.int32)
        item = StepItem(1, Kind.PREFILL, 0, 16, source, Sampling(), prompt)
        token = (await prefill.executor.run(StepPlan([item]), 1)).tokens[0]
        for one, two in (
            (prefill.pages.regions(source), store.regions(kept)),
            (store.regions(kept), decode.pages.regions(target[:2])),
        ):
            answer: asyncio.Future[list[CopyResult]] = asyncio.get_running_loop().create_future()
            device.submit([Copy(one, two)]).when_answered(answer.set_result)
            [result] = await answer
            assert result.error is None
        item = StepItem(1, Kind.DECODE, 16, 1, target, Sampling(), token)
        progress = await decode.executor.run(StepPlan([item]), 6)
        joined = world.instance("d1", "n1", Role.DECODE)
        await world.remove("d1")
        await world.close()
        return progress, joined, decode.executor.capacity(), world.figures()

    progress, joined, capacity, figures = world.run(main)
    assert progress.steps == 6
    assert progress.tokens[0] is not None
    assert len(progress.tokens[0]) == 6
    assert threading.active_count() == before
    assert joined.pages.node == "n1"
    assert (capacity.pages, capacity.page_bytes) == (20, world.kv_format().block_bytes)
    cost = world.cost()
    assert cost.prefill_ns(0, 64) > 0
    assert cost.step_ns(2, 50, 1)[0] > 0
    [calibration] = [row for row in recorder.rows if row[1] == "calibration"]
    assert calibration[:3] == (0, "calibration", 0)
    assert sorted(calibration[3]) == [
        "chunk_base_ns",
        "chunk_ps_per_context_token",
        "chunk_tokens",
        "decode_base_ns",
        "decode_ns_per_sequence",
        "decode_ps_per_context_token",
        "name",
    ]
    assert {row[1] for row in recorder.rows} == {"calibration", "link", "world", "p0", "d0", "device"}
    assert figures["compilations_after_warm_up"] == 0
    assert figures["padding"]["decode"] == {"batches": [2], "actual": 0.5}
    whats = [what for what, _ in reports]
    assert "compiling for p0: prefill of 16 (2 of 4)" in whats
    assert "compiling for d0: decode of 2 (4 of 4)" in whats
    shares = [share for _, share in reports]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_run_that_fails_leaves_no_thread():
    world = JaxWorld(SHAPE, **SIZES)
    before = threading.active_count()

    async def main():
        world.instance("p0", "n0", Role.PREFILL)
        raise KeyError("on purpose")

    with pytest.raises(KeyError):
        world.run(main)
    assert threading.active_count() == before


def test_fingerprints_follow_weights_and_shape():
    prints = [JaxWorld(SHAPE, **SIZES, seed=seed).kv_format().fingerprint for seed in (0, 0, 1)]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("numerics", "exact", "allowed: invariant, fast"),
        ("prefill_widths", [8], "one shape.*allowed: auto"),
        ("prefill_widths", "all", "list of whole numbers, or auto"),
        ("mesh", 3, "2 query heads.*allowed: 1, 2"),
        ("max_context_tokens", 300, "stops at 256"),
        ("pages", 3, "takes 16"),
        ("max_batch", 0, "at least 1"),
    ],
)
def test_settings_that_cannot_work(key, value, problem):
    with pytest.raises(ConfigError, match=rf"backend\.{key}={re.escape(str(value))}.*{problem}"):
        JaxWorld(SHAPE, **{**SIZES, key: value})


def test_fit_recovers_the_constants_it_was_made_from():
    geometry = Geometry(pages=64, page_tokens=16, max_batch=8, chunk_tokens=128, max_context_tokens=1024)
    truth = Padded("truth", 128, 3_000_000, 7_000, 500_000, 7_000, 40_000)
    near, far = truth.prefill_ns(0, 128), truth.prefill_ns(896, 128)
    one, full, last = (int(truth.step_ns(batch, context, 1)[0]) for batch, context in ((1, 0), (8, 0), (8, 8 * 1023)))
    found = fit(geometry, (near, far), (one, full), last)
    assert dataclasses.replace(found, name="truth") == truth


def test_fit_never_goes_below_zero():
    geometry = Geometry(pages=64, page_tokens=16, max_batch=8, chunk_tokens=128, max_context_tokens=1024)
    found = fit(geometry, (9e6, 8e6), (5e5, 4e5), 3e5)
    assert (found.chunk_ps_per_context_token, found.decode_ns_per_sequence, found.decode_ps_per_context_token) == (
        0,
        0,
        0,
    )
    assert found.chunk_base_ns == 8_500_000
    assert found.decode_base_ns == 500_000
