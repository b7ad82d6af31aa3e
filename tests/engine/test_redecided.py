"""A run's decisions, made again from its own journal: retries, deaths, refusals and all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_fixtures import CheckBench, Rows

from mcjax import aio
from mcjax.engine.cluster_spec import InstanceSpec
from mcjax.engine.service import Service
from mcjax.sched.admission.early_rejection import EarlyRejection
from mcjax.sched.admission.none import AdmitAll
from mcjax.sched.base import Admission
from mcjax.sched.decode.least_loaded import LeastLoaded
from mcjax.sched.fetch.cheapest import Cheapest
from mcjax.sched.journal import Journal, Redecided
from mcjax.sched.placement import Strategies
from mcjax.sched.prefill.kvcache_centric import KVCacheCentric
from mcjax.sched.prefill.round_robin import RoundRobin
from mcjax.sched.roles.static import Static
from mcjax.types import NS_PER_S, SLO

TIGHT = SLO(float("inf"), 1.82e-3)  # the expected step is 1.75 ms and 20 us for each sequence beside it
LOOSE = SLO(float("inf"), float("inf"))


def strategies(admission: Admission, prefill: Any = None) -> Strategies:
    return Strategies(prefill or KVCacheCentric(1.5), LeastLoaded(), Cheapest(), admission, Static())


def played(admission: Admission, slo: SLO, kill: str) -> tuple[Rows, Service]:
    """Thirty requests of six prefixes on 2p2d; one instance dies in the middle, and one like it joins."""
    bench = CheckBench("2p2d", max_steps=1)
    kept: list[Service] = []

    async def main(service: Service) -> None:
        kept.append(service)
        service.conductor._strategies = strategies(admission)
        service.frontend._slo = lambda request: slo
        successor = InstanceSpec(f"{kill}b", service.cluster.instances[kill].role)
        aio.clock().call_at_ns(NS_PER_S // 25, service.cluster.kill, kill)
        aio.clock().call_at_ns(NS_PER_S // 10, service.cluster.join, successor)
        tickets = []
        for number in range(30):
            prompt = [number % 6] * 13 + [100 + number] * (number % 5)
            tickets.append(service.frontend.submit(bench.request(number, prompt, 1 + number % 9)))
            await aio.sleep_ns(NS_PER_S // 300)
        for ticket in tickets:
            await ticket.task

    bench.run(main)
    return bench.rows, kept[0]


def again(rows: Rows, service: Service, made: Strategies) -> list[Redecided]:
    state = service.conductor.state
    journal = Journal(made, state.cost, state.link, state.bytes_per_token, state.block_tokens, np.random.default_rng(7))
    names = (
        "request_id",
        "arrival_ns",
        "prompt_tokens",
        "max_tokens",
        "tenant",
        "session",
        "turn",
        "parent",
        "priority",
    )
    requests = [
        {name: getattr(row.request, name) for name in names}
        | {"blocks": row.blocks, "slo_ttft_s": row.slo_ttft_s, "slo_tbt_s": row.slo_tbt_s}
        for row in rows.requests
    ]
    columns: tuple[str, ...] = ("time_ns", "tick_ns", "source", "kind", "values")
    reports: list[dict[str, Any]] = [dict(zip(columns, report, strict=True)) for report in rows.reports]
    decided = ("request_id", "stage", "choice", "source", "reused_tokens", "expected_s", "reason")
    decisions = [{name: getattr(decision, name) for name in decided} for decision in rows.decisions]
    return list(journal.walk(requests, reports, decisions))


@pytest.mark.parametrize("kill", ["p0", "d0"])
@pytest.mark.parametrize(("admission", "slo"), [(AdmitAll(), LOOSE), (EarlyRejection(), TIGHT)])
def test_every_decision_is_made_again(admission: Admission, slo: SLO, kill: str) -> None:
    rows, service = played(admission, slo, kill)
    assert any(row.attempts > 1 for row in rows.requests), "a retry is what makes this hard"
    redecided = again(rows, service, strategies(admission))
    assert len(redecided) >= 60
    assert [str(one) for one in redecided if not one.agrees] == []
    if slo is TIGHT:
        stages = {one.stage for one in redecided}
        assert "admission.arrival" in stages or "admission.decode" in stages


def test_another_strategy_would_have_chosen_otherwise() -> None:
    """Or agreement would prove nothing."""
    rows, service = played(AdmitAll(), LOOSE, "p0")
    other = again(rows, service, strategies(AdmitAll(), RoundRobin()))
    assert any(not one.agrees for one in other)
