"""The device tier with a real model: bit for bit what one engine gives that keeps nothing on its device.

`verify=true` serves everything again on one colocated instance; `backend.poison=true` overwrites pages with NaN as soon
as nobody has them, so that a page read after it had left cannot go unnoticed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import mcjax
from mcjax.app.replay import replay
from mcjax.backends.jax.device_store import DevicePages
from mcjax.backends.jax.executor import JaxExecutor
from mcjax.engine.base import OnStep, Progress, StepPlan
from mcjax.engine.pages import Held, Pages
from mcjax.track.run import Run
from mcjax.types import NS_PER_S, Request, Script, Tokens
from mcjax.workload.base import Session, Turn

LOAD = ("workload.sessions=4", "workload.turns=3", "workload.rate_per_s=20", "workload.think_time_s=0.05")
REQUESTS = 12
CLUSTERS = ("1p1d", "1m")


def serve(runs: Path, *overrides: str) -> Run:
    fixed = ["backend.poison=true", f"track.sinks.0.directory={runs}", "verify=false", *LOAD]
    return mcjax.run([*fixed, *overrides], progress=False)


@pytest.fixture(scope="module", params=CLUSTERS)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    runs = tmp_path_factory.mktemp("kept")
    return serve(runs, f"cluster={request.param}", "kvpool.hbm_cache=true", "verify=true")


def test_tokens_and_blocks_are_those_of_one_engine(kept: Run) -> None:
    assert kept.state == "done"
    assert kept.summary["verified"]["requests"] == REQUESTS
    assert kept.summary["verified"]["kv_blocks"] > REQUESTS
    assert kept.summary["tokens_by_tier"]["hbm"] > 0
    assert kept.summary["compilations_after_warm_up"] == 0


def test_tokens_are_the_same_without_it(kept: Run, tmp_path: Path) -> None:
    cluster = "1m" if "m0" in kept.requests.column("prefill_instance").to_pylist() else "1p1d"
    done = serve(tmp_path, f"cluster={cluster}")
    assert done.summary["tokens_by_tier"]["hbm"] == 0
    outputs = [
        dict(zip(run.requests.column("request_id").to_pylist(), run.requests.column("output").to_pylist(), strict=True))
        for run in (kept, done)
    ]
    assert len(outputs[0]) == REQUESTS
    assert outputs[0] == outputs[1]


def test_it_is_decided_again_from_its_log(kept: Run) -> None:
    assert kept.directory is not None
    result = replay(mcjax.load(kept.directory))
    assert result.agrees, (result.differing_placements, [str(difference) for difference in result.differences])
    assert result.unanswered == 0


@pytest.mark.check_long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("numerics", ["invariant", "fast"])
def test_with_pages_for_little_more_than_one_context(cluster: str, numerics: str, tmp_path: Path) -> None:
    small = ("backend.pages=132", "workload.sessions=24", "engine.headroom_tokens=16", f"backend.numerics={numerics}")
    done = serve(tmp_path, f"cluster={cluster}", "kvpool.hbm_cache=true", "verify=true", *small)
    assert done.summary["verified"]["requests"] == 72
    events = done.events.to_pylist()
    on_device = Counter(event["kind"] for event in events if event["tier"] == "hbm")
    assert min(on_device[kind] for kind in ("insert", "hit", "evict")) > 0, on_device


def watch_writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every plan that would write into a page which holds a block, from now on."""
    stores: dict[str, DevicePages] = {}
    found: list[str] = []
    make, step = DevicePages.__init__, JaxExecutor.run

    def noted(self: DevicePages, node: str, executor: JaxExecutor, poison: bool = False) -> None:
        make(self, node, executor, poison)
        stores[executor.name] = self

    async def looked_at(self: JaxExecutor, plan: StepPlan, max_steps: int, on_step: OnStep | None = None) -> Progress:
        page_tokens = self.capacity().page_tokens
        for item in plan.items if self.name in stores else ():
            last = (item.start + item.q_len + max_steps - 2) // page_tokens
            for page in item.pages[item.start // page_tokens : last + 1]:
                if stores[self.name].header(page) is not None:
                    found.append(f"{self.name}: request {item.request_id} writes into page {page}")
        return await step(self, plan, max_steps, on_step)

    monkeypatch.setattr(DevicePages, "__init__", noted)
    monkeypatch.setattr(JaxExecutor, "run", looked_at)
    return found


class Alike:
    """The same prompt again and again, whole blocks long; each session is one turn, well after the one before."""

    name = "alike"
    block_tokens: int | None = None

    def inputs(self) -> dict[str, str]:
        return {}

    def sessions(self) -> Iterator[Session]:
        for number in range(3):
            tokens = np.arange(1, 49, dtype=np.int32)
            start_ns = number * NS_PER_S // 2
            yield Once(Turn(Request(number, start_ns, len(tokens), 8, tokens=tokens), Script(8)))


class Once:
    """A session of one turn."""

    def __init__(self, turn: Turn):
        self.start_ns = turn.request.arrival_ns
        self._turn: Turn | None = turn

    def next_turn(self, answer: Tokens | None) -> Turn | None:
        turn, self._turn = self._turn, None
        return turn


def test_a_write_into_a_shared_page_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is all there is computed from its last token on, into a copy of its last page; once not a copy."""
    found = watch_writes(monkeypatch)

    def play() -> Run:
        overrides = ["cluster=1m", "kvpool.hbm_cache=true", "kvpool.block_tokens=16", "verify=false"]
        return mcjax.run([*overrides, f"track.sinks.0.directory={tmp_path}"], progress=False, workload=Alike())

    tiers = play().events.column("tier").to_pylist()
    assert tiers.count("hbm>hbm") == 2
    assert found == []
    take = Pages.take

    async def wrong(
        self: Pages, owner: int, count: int, blocks: Sequence[int] = (), most: int = 0, *more: bool
    ) -> Held:
        return await take(self, owner, count, blocks, len(blocks), *more)

    monkeypatch.setattr(Pages, "take", wrong)
    play()
    assert len(found) == 2
