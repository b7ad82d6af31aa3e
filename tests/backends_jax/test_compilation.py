"""Compiled once: kept between processes, and noticed when it happens after the warm-up."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

from mcjax import aio
from mcjax.backends.jax.compilation import Watch, use_cache
from mcjax.backends.jax.world import JaxWorld
from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError
from mcjax.types import NullRecorder, Role

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

START = """
import hashlib, json, sys
import jax, jax.monitoring, numpy as np
from mcjax import aio
from mcjax.backends.jax.compilation import use_cache
from mcjax.backends.jax.programs import Geometry, Programs, pack_row
from mcjax.models import builtin

heard = []
jax.monitoring.register_event_listener(lambda event, **about: heard.append(event.rsplit("/")[-1]))
folder = use_cache("auto")
geometry = Geometry(pages=8, page_tokens=8, max_batch=2, chunk_tokens=16, max_context_tokens=64)
programs = Programs(builtin.build(max_positions=64), geometry)
on = programs.on(jax.local_devices()[0])
heard.clear()
row = pack_row(16, 16, 0, np.arange(16, dtype=np.int32), [0, 1], geometry)
logits, pages = on.model(1, 16)(on.weights, on.new_pages(), row[None])
print(json.dumps({
    "folder": str(folder),
    "hits": heard.count("cache_hits"),
    "misses": heard.count("cache_misses"),
    "bits": hashlib.sha256(np.asarray(logits).tobytes() + np.asarray(pages).tobytes()).hexdigest(),
}))
"""


def start(home: Path) -> dict[str, Any]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(home), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", START], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_second_process_loads_what_the_first_compiled_and_computes_the_same_bits(tmp_path: Path) -> None:
    first, second = start(tmp_path), start(tmp_path)
    assert first["folder"].startswith(str(tmp_path / "mcjax" / "xla"))
    assert (first["hits"], first["misses"]) == (0, 2)
    assert (second["hits"], second["misses"]) == (2, 0)
    assert second["bits"] == first["bits"]


def test_damaged_programs_are_compiled_anew(tmp_path: Path) -> None:
    first = start(tmp_path)
    for file in Path(first["folder"]).iterdir():
        file.write_bytes(b"no program")
    assert start(tmp_path)["bits"] == first["bits"]


def test_a_folder_of_ones_own_must_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"backend\.compilation_cache=.*cannot be used.*allowed: auto, null"):
        use_cache(str(tmp_path / "file"))


def test_no_cache_changes_nothing() -> None:
    before = jax.config.values["jax_compilation_cache_dir"]
    assert use_cache(None) is None
    assert jax.config.values["jax_compilation_cache_dir"] == before


class Rows(NullRecorder):
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.outcomes: list[tuple[Any, ...]] = []

    def event(self, time_ns, kind, request_id, place, **more):
        self.events.append((kind, place, more["detail"]))

    def outcome(self, time_ns, mechanism, call, payload):
        self.outcomes.append((mechanism, call, payload))


class Clock:
    """One that does at once what it is handed."""

    def post(self, callback, *args):
        callback(*args)

    def now_ns(self):
        return 5


@pytest.mark.compiles_late
def test_a_watch_hears_hidden_programs_only_while_it_is_sealed(caplog: pytest.LogCaptureFixture) -> None:
    recorder, clock = Rows(), cast("aio.Clock", Clock())
    watch = Watch(recorder)
    one = jnp.zeros(3)

    def compiles(steps: int) -> None:
        jax.jit(lambda x: x + steps).lower(one).compile()

    compiles(1)
    watch.seal(clock)
    watch.seal(clock)
    with caplog.at_level(logging.WARNING):
        compiles(2)
        assert (jnp.arange(17) * 3)[2] == 6  # nobody asked for a program
    found = list(watch.late)
    watch.close()
    watch.close()
    compiles(4)
    assert watch.late == found
    assert found[0] == "<lambda>"
    assert len(found) >= 2
    assert recorder.events == [("compile", "", name) for name in found]
    assert [(call, payload["what"]) for _, call, payload in recorder.outcomes] == list(enumerate(found))
    assert "compiled after warm-up: <lambda>" in caplog.text


@pytest.mark.compiles_late
def test_a_forgotten_program_is_counted_and_leaves_an_event() -> None:
    recorder = Rows()
    world = JaxWorld(SHAPE, **SIZES, recorder=recorder)

    async def main() -> None:
        await world.prepare([("p0", Role.PREFILL), ("d0", Role.DECODE)], lambda what, share: None)
        parts = world.instance("p0", "n0", Role.PREFILL)
        executor: Any = parts.executor
        await executor.warm_up(prefill=False, decode=True)  # nobody said that p0 decodes
        await executor.on_thread(lambda: None)
        await world.close()

    world.run(main)
    assert world.figures()["compilations_after_warm_up"] == 3
    names = ["model_2x1", "sampler_2", "full_sampler_2"]
    assert recorder.events == [("compile", "p0", name) for name in names]
    late = [(call, payload["what"]) for mechanism, call, payload in recorder.outcomes if mechanism == "compile"]
    assert late == list(enumerate(names))


def test_instances_that_join_later_are_prepared_too() -> None:
    roles = [Role.PREFILL, Role.DECODE, Role.PREFILL]
    world = JaxWorld(SHAPE, **SIZES, roles=roles)

    async def main() -> None:
        names = [("p0", Role.PREFILL), ("d0", Role.DECODE), ("p+1", Role.PREFILL)]
        await world.prepare(names, lambda what, share: None)
        joined: Any = world.instance("p+1", "n2", Role.PREFILL).executor
        await joined.warm_up(prefill=True, decode=False)
        await world.close()

    world.run(main)
    memory = world.figures()["device_memory"]
    assert [memory[name]["devices"] for name in ("p0", "d0", "p+1")] == [("cpu:0",), ("cpu:1",), ("cpu:2",)]
