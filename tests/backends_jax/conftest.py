"""A small engine on CPU devices, and the few moves that every test here makes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from mcjax.backends.jax.compilation import Watch
from mcjax.backends.jax.executor import JaxExecutor
from mcjax.backends.jax.placement import Place
from mcjax.backends.jax.programs import Geometry, Programs
from mcjax.cost.model_shape import ModelShape
from mcjax.engine.base import Kind, Progress, StepItem, StepPlan
from mcjax.models import builtin
from mcjax.types import Recorder, Sampling

# Before anything here computes; importing JAX fixes neither.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

GREEDY = Sampling()


class Lab:
    """Compiled programs shared by all tests, and executors that end with the test."""

    geometry = Geometry(pages=40, page_tokens=8, max_batch=4, chunk_tokens=32, max_context_tokens=200)

    def __init__(self, shape: ModelShape = builtin.DEFAULT_SHAPE) -> None:
        self.model = builtin.build(shape, max_positions=self.geometry.max_context_tokens)
        self.programs = Programs(self.model, self.geometry)
        self.executors: list[JaxExecutor] = []

    def executor(self, name: str = "p0", device: int | Place = 0, **options: Any) -> JaxExecutor:
        where = device if isinstance(device, Place) else jax.local_devices()[device]
        executor = JaxExecutor(name, options.pop("programs", self.programs), where, **options)
        self.executors.append(executor)
        return executor

    def run(self, main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        async def body() -> Any:
            try:
                return await asyncio.wait_for(main(), 60)
            finally:
                for executor in self.executors:
                    await executor.close()
                self.executors.clear()

        return asyncio.run(body())

    @staticmethod
    def prompt(seed: int, length: int) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, 256, length, dtype=np.int32)

    @staticmethod
    def item(
        kind: Kind, tokens: Sequence[int] | np.ndarray, start: int, pages: list[int], forced: int = 0, **options: Any
    ) -> StepItem:
        sampling = options.pop("sampling", GREEDY)
        array = np.asarray(tokens, dtype=np.int32)
        q_len = len(array) - forced
        return StepItem(7, kind, start, q_len, pages, sampling, array, forced=forced, **options)

    async def prefill(
        self,
        executor: JaxExecutor,
        tokens: np.ndarray,
        pages: list[int],
        cuts: Sequence[int] = (),
        start: int = 0,
        sampling: Sampling = GREEDY,
    ) -> int:
        """Compute `tokens[start:]`, cut at `cuts` and wherever a chunk is full; the next token."""
        first, answer = start, -1
        while first < len(tokens):
            later = [cut for cut in cuts if cut > first]
            end = min([first + self.geometry.chunk_tokens, len(tokens), *later])
            last = end == len(tokens)
            item = self.item(Kind.PREFILL, tokens[first:end], first, pages, samples=last, sampling=sampling)
            progress = await executor.run(StepPlan([item]), 1)
            produced = progress.tokens[0]
            assert produced is not None
            assert len(produced) == last
            answer = int(produced[0]) if last else -1
            first = end
        return answer

    async def decode(
        self, executor: JaxExecutor, token: int, start: int, pages: list[int], steps: int, **options: Any
    ) -> list[int]:
        """Feed `token` at `start`, then go on; `steps` tokens."""
        progress: Progress = await executor.run(
            StepPlan([self.item(Kind.DECODE, [token], start, pages, **options)]), steps
        )
        assert progress.tokens[0] is not None
        return progress.tokens[0].tolist()

    async def kv(self, executor: JaxExecutor, pages: list[int], tokens: int) -> np.ndarray:
        """`[L, 2, tokens, Hkv, D]` as bits: the KV of the first `tokens` positions of `pages`."""
        raw = await executor.on_thread(lambda: executor.read_pages(pages))
        blocks = raw.view(np.uint32).reshape(len(pages), *self.programs.block_shape)
        return np.concatenate(list(blocks), axis=2)[:, :, :tokens]


@pytest.fixture(autouse=True)
def nothing_compiles_late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A world that compiles anything after its warm-up fails the test, unless the test is about that."""
    watches: list[Watch] = []
    make = Watch.__init__

    def made(watch: Watch, recorder: Recorder) -> None:
        watches.append(watch)
        make(watch, recorder)

    monkeypatch.setattr(Watch, "__init__", made)
    yield
    if request.node.get_closest_marker("compiles_late") is None:
        assert [name for watch in watches for name in watch.late] == []


@pytest.fixture(scope="session")
def lab() -> Lab:
    return Lab()
