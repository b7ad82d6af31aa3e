"""One placement: every decision about where a job goes, a function of cluster state, strategies and a generator.

The conductor calls it as jobs arrive; `mcjax replay` calls it again on a run's journal. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mcjax.errors import ConfigError, InstanceDown, Rejected
from mcjax.sched.base import (
    Admission,
    DecodeSelection,
    Expectation,
    Fetch,
    Located,
    Missing,
    PrefillChoice,
    PrefillSelection,
    Recompute,
    Reject,
    Replica,
    Roles,
    Stage,
    is_asked,
    strategy_name,
)
from mcjax.sched.job import Placement
from mcjax.sched.state import ClusterState
from mcjax.sched.view import ClusterView
from mcjax.types import NS_PER_S, SLO, BlockId, Decision, Recorder, Request, Role, Span, Tier
from mcjax.workload.base import LengthPredictor
from mcjax.workload.lengths import MaxTokens


@dataclass(frozen=True, slots=True)
class Strategies:
    """The decisions that the conductor makes, one strategy each."""

    prefill: PrefillSelection
    decode: DecodeSelection
    fetch: Fetch
    admission: Admission
    roles: Roles
    lengths: LengthPredictor = field(default_factory=MaxTokens)


def place(
    request: Request,
    blocks: Sequence[BlockId],
    slo: SLO,
    state: ClusterState,
    strategies: Strategies,
    rng: np.random.Generator,
    now_ns: int,
    recorder: Recorder,
    attempt: int = 1,
) -> Placement:
    """Choose instances for a request, record each choice beside its estimates, and ask admission.

    Only the first attempt arrives: a request that was taken on, and lost its place, is not turned away for that.

    Raises:
        Rejected: admission refused.
        InstanceDown: nobody is there to take the request.
    """
    view = state.view(now_ns, request.prompt_tokens, blocks, strategies.lengths.predict(request))
    if not view.names:
        raise InstanceDown("(no instance computes prompts)")
    choice = strategies.prefill.choose(request, view, rng)
    _check_choice(strategies.prefill, choice, view)
    decision, ttft_s, prefill_s = _record_prefill(request, view, strategies, choice, now_ns, recorder)
    prefill = state.members[view.names[choice.instance]]
    decode_decision: Decision | None = None
    if prefill.role is Role.MIXED:
        decode, tbt_s = prefill, state.step_estimate_s(prefill, request.prompt_tokens)
    else:
        if not view.decode.names:
            raise InstanceDown("(no instance decodes)")
        ready_ns = now_ns + round(ttft_s * NS_PER_S)
        chosen = strategies.decode.choose(request, view, ready_ns, rng)
        if not 0 <= chosen.instance < len(view.decode.names):
            raise ConfigError(
                "sched.decode", strategy_name(strategies.decode), f"chose decode instance {chosen.instance}"
            )
        decode, tbt_s = state.members[view.decode.names[chosen.instance]], chosen.expected_tbt_s
        decode_decision = recorder.decision(
            Decision(
                now_ns,
                request.request_id,
                "decode",
                strategy_name(strategies.decode),
                decode.name,
                expected_s=tbt_s,
                names=view.decode.names,
                candidates={"step_s": view.decode.step_s(1, request.prompt_tokens)},
                reason=f"lengths: {strategies.lengths.name}",
            )
        )
    placement = Placement(
        prefill=prefill.name,
        decode=decode.name,
        source_node=None if choice.source is None else view.nodes[choice.source],
        reused_tokens=choice.reused_tokens,
        available_tokens=view.available_tokens,
        receiving_node=decode.node,
        expected_ttft_s=ttft_s,
        expected_tbt_s=tbt_s,
        decision=decision,
        decode_decision=decode_decision,
        prefill_index=prefill.index,
        decode_index=decode.index,
        prefill_estimate_ns=round(prefill_s * NS_PER_S),
    )
    if attempt == 1 and is_asked(strategies.admission, Stage.ARRIVAL):
        admit(request, placement, slo, view, Stage.ARRIVAL, strategies.admission, rng, now_ns, recorder)
    return placement


def admit(
    request: Request,
    placement: Placement,
    slo: SLO,
    view: ClusterView,
    stage: Stage,
    admission: Admission,
    rng: np.random.Generator,
    now_ns: int,
    recorder: Recorder,
) -> None:
    """Ask admission. Raises `Rejected` if it refuses; only refusals are recorded."""
    expectation = Expectation(placement.expected_ttft_s, placement.expected_tbt_s, slo.ttft_s, slo.tbt_s)
    answer = admission.admit(request, expectation, view, stage, rng)
    if isinstance(answer, Reject):
        strategy = strategy_name(admission)
        expected_s = expectation.ttft_s if answer.reason == "ttft" else expectation.tbt_s
        recorder.decision(
            Decision(
                now_ns,
                request.request_id,
                f"admission.{stage}",
                strategy,
                "reject",
                expected_s=expected_s,
                reason=answer.reason,
            )
        )
        raise Rejected(request.request_id, f"{answer.reason} at {stage}", answer.retry_after_s)


def _check_choice(strategy: PrefillSelection, choice: PrefillChoice, view: ClusterView) -> None:
    name = strategy_name(strategy)
    if not isinstance(choice, PrefillChoice):  # pyright: ignore[reportUnnecessaryIsInstance]  (it may be a user's)
        raise ConfigError("sched.prefill", name, f"chose {choice!r}, which is no PrefillChoice")
    if not 0 <= choice.instance < len(view.names):
        raise ConfigError("sched.prefill", name, f"chose instance {choice.instance} of {len(view.names)}")
    if choice.source is not None and not 0 <= choice.source < len(view.names):
        raise ConfigError("sched.prefill", name, f"chose source {choice.source} of {len(view.names)}")


def _record_prefill(
    request: Request,
    view: ClusterView,
    strategies: Strategies,
    choice: PrefillChoice,
    now_ns: int,
    recorder: Recorder,
) -> tuple[Decision, float, float]:
    """The decision's row, the expected TTFT and the expected compute time, all seconds."""
    at, local = choice.instance, view.prefix_tokens
    compute_s = view.prefill_s(local)
    candidates = {"queue_s": view.queue_s, "transfer_s": np.zeros(len(view.names)), "prefill_s": compute_s}
    prefill_s, fetch_s = float(compute_s[at]), 0.0
    if choice.source is not None:
        candidates["transfer_s"] = view.transfer_s(choice.source, np.maximum(choice.reused_tokens - local, 0))
        fetch_s = float(candidates["transfer_s"][at])
    elif view.ssd is not None:
        candidates["load_s"] = view.load_s(view.ssd.tokens)
        fetch_s = float(view.load_s(np.maximum(choice.reused_tokens - local, 0))[at])
    if choice.source is not None or fetch_s:
        prefill_s = float(view.prefill_s(np.full_like(local, choice.reused_tokens))[at])
    ttft_s = float(view.queue_s[at]) + fetch_s + prefill_s
    decision = recorder.decision(
        Decision(
            now_ns,
            request.request_id,
            "prefill",
            strategy_name(strategies.prefill),
            view.names[at],
            source="" if choice.source is None else view.names[choice.source],
            reused_tokens=choice.reused_tokens,
            expected_s=ttft_s,
            names=view.names,
            candidates=candidates,
        )
    )
    return decision, ttft_s, prefill_s


def locate(
    request: Request,
    blocks: Sequence[BlockId],
    have: int,
    exclude: Sequence[tuple[str, Tier]],
    produced: int,
    state: ClusterState,
    strategies: Strategies,
    rng: np.random.Generator,
    now_ns: int,
    recorder: Recorder,
) -> Located:
    """A prefill instance has the first `have` blocks, not `blocks`, which were expected: from where, or compute?

    `exclude`: where it has looked already. `produced`: output tokens that the client has.
    """
    first, tokens = have * state.block_tokens, len(blocks) * state.block_tokens
    asker = state.placed_at(request.request_id)
    replicas: list[Replica] = []
    for node, tier in state.replicas(blocks):
        transfer_s = state.transfer_s(node, tier, asker, tokens)
        if transfer_s is not None and (node, tier) not in exclude:
            replicas.append(Replica(node, transfer_s, tier))
    missing = Missing(
        Span(tuple(blocks)),
        replicas,
        recompute_s=state.cost.prefill_ns(first, tokens) / NS_PER_S,
        priority=request.priority,
        remaining_tokens=max(0, strategies.lengths.predict(request) - produced),
    )
    answer = strategies.fetch.source(missing, rng)
    fetched = isinstance(answer, Replica)
    transfers_s = [replica.transfer_s for replica in replicas]
    decision = Decision(
        now_ns,
        request.request_id,
        "fetch",
        strategy_name(strategies.fetch),
        answer.place if fetched else answer.value,
        expected_s=answer.transfer_s if fetched else missing.recompute_s,
        names=[*(replica.place for replica in replicas), Recompute.RECOMPUTE.value],
        candidates={
            "transfer_s": np.array([*transfers_s, 0.0]),
            "prefill_s": np.array([*(0.0 for _ in replicas), missing.recompute_s]),
        },
        reason=f"priority {missing.priority}, {missing.remaining_tokens} tokens to come",
    )
    return Located(answer, recorder.decision(decision))
