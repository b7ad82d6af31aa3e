"""Weka traces: what the reader makes of them and refuses, and when their sessions send what."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax import aio
from mcjax.backends.virtual import VirtualLoop
from mcjax.errors import ConfigError, TraceError
from mcjax.types import NS_PER_S
from mcjax.workload.analysis import play
from mcjax.workload.base import Turn
from mcjax.workload.driver import Answer, ScriptBook, drive
from mcjax.workload.reblocked import Reblocked
from mcjax.workload.slice import Slice
from mcjax.workload.superposed import Superposed
from mcjax.workload.weka import Weka


def call(t: float, tokens: int, ids: list[Any], **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "s", "model": "m", "in": tokens, "out": 3, "hash_ids": ids, **more}


def agent(t: float, name: str, *requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "subagent", "agent_id": name, "subagent_type": "Explore", "requests": [*requests], **more}


def conversation(*requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "c", "models": ["m"], "block_size": 4, "hash_id_scope": "local", "requests": [*requests], **more}


TREE = conversation(
    call(0, 8, [1, 2], api_time=2.0),
    agent(3, "a", call(3, 4, [7], api_time=1), call(6, 9, [7, 8], api_time=4, think_time=0.5), duration_ms=7500),
    agent(4, "b", call(4, 4, [9], api_time=1), status="completed"),
    agent(4, "late", call(5, 4, [9], api_time=50), status="async_launched", duration_ms=None),
    call(11, 12, [1, 2, 3], type="n", api_time=1.0, think_time=9.0),
    call(20, 17, [1, 2, 3, 4, 5], api_time=1.0, think_time=0.25),
)
"""Turn 0 starts `a`, `b` and `late` 1, 2 and 3 s after it ended; turn 1 follows half a second after `a` has."""


def write(path: Path, *conversations: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in conversations))
    return str(path)


def drive_with(workload: Any, seconds: Callable[[int], float], refuse: int | None = None) -> list[tuple[Any, ...]]:
    """(sent at, request id, session, turn) of every request; request `i` takes `seconds(i)`; `refuse` is not served."""
    log: list[tuple[Any, ...]] = []

    async def submit(turn: Turn) -> Answer:
        request = turn.request
        log.append((aio.now_ns() / NS_PER_S, request.request_id, request.session, request.turn))
        assert request.turn == 0 or request.arrival_ns == aio.now_ns()
        await aio.sleep_ns(round(seconds(request.request_id) * NS_PER_S))
        return Answer(request.request_id != refuse)

    async def main() -> None:
        await drive(workload, submit, ScriptBook())

    VirtualLoop().run(main)
    return log


def test_sub_agents_run_side_by_side_and_the_next_turn_waits_for_all_but_the_background(tmp_path: Path) -> None:
    workload = Weka(write(tmp_path / "t.jsonl", TREE), seed=1)
    start_s = next(workload.sessions()).start_ns / NS_PER_S
    log = [(time_s - start_s, *rest) for time_s, *rest in drive_with(workload, lambda request: 10.0)]
    assert log == [
        (pytest.approx(0), 0, "c", 0),
        (pytest.approx(11), 1, "c/a", 0),
        (pytest.approx(12), 3, "c/b", 0),
        (pytest.approx(13), 4, "c/late", 0),
        (pytest.approx(21.5), 2, "c/a", 1),
        (pytest.approx(32), 5, "c", 1),  # a ended at 31.5; 11 s - (3 + 7.5) s of the record remain
        (pytest.approx(42.25), 6, "c", 2),
    ]


def test_the_next_turn_goes_by_the_slowest_sub_agent_not_by_the_record(tmp_path: Path) -> None:
    workload = Weka(write(tmp_path / "t.jsonl", TREE), seed=1)
    start_s = next(workload.sessions()).start_ns / NS_PER_S
    times = {request: time_s - start_s for time_s, request, *_ in drive_with(workload, slow)}
    assert times[5] == pytest.approx(1 + 2 + 100 + 0.5)


def slow(request: int) -> float:
    return 100.0 if request == 3 else 1.0


def test_a_background_agent_keeps_the_drive_alive_but_holds_nobody_up(tmp_path: Path) -> None:
    workload = Weka(write(tmp_path / "t.jsonl", TREE), seed=1)
    log = drive_with(workload, lambda request: 1000.0 if request == 4 else 1.0)
    assert len(log) == 7
    assert log[-1][1] == 6


@pytest.mark.parametrize(
    ("refused", "sent"),
    [(0, {0}), (1, {0, 1, 3, 4}), (3, {0, 1, 2, 3, 4}), (4, {0, 1, 2, 3, 4, 5, 6}), (5, {0, 1, 2, 3, 4, 5})],
)
def test_a_refused_request_ends_its_agent_and_those_who_wait_for_it(
    tmp_path: Path, refused: int, sent: set[int]
) -> None:
    workload = Weka(write(tmp_path / "t.jsonl", TREE), seed=1)
    assert {request for _, request, *_ in drive_with(workload, lambda request: 1.0, refused)} == sent


def turns_of(session: Any) -> list[Turn]:
    """A session's turns, each followed by those of its children."""
    found: list[Turn] = []
    for turn in iter(lambda: session.next_turn(None), None):
        found.append(turn)
        for child in (*turn.children, *turn.background):
            found += turns_of(child)
    return found


def test_requests_and_their_blocks(tmp_path: Path) -> None:
    workload = Weka(write(tmp_path / "t.jsonl", TREE), seed=1)
    turns = [turn for session in workload.sessions() for turn in turns_of(session)]
    requests = [turn.request for turn in turns]
    assert workload.block_tokens == 4
    assert workload.total_requests == len(requests) == 7
    assert [request.request_id for request in requests] == [0, 1, 2, 3, 4, 5, 6]
    assert [request.parent for request in requests] == [None, 0, 1, 0, 0, 0, 5]
    assert [request.prompt_tokens for request in requests] == [8, 4, 9, 4, 4, 12, 17]
    ids = [list(request.trace_ids or ()) for request in requests]
    assert [len(blocks) for blocks in ids] == [2, 1, 2, 1, 1, 3, 5]
    assert ids[0] == ids[5][:2] == ids[6][:2]
    assert ids[1] == ids[2][:1]
    assert ids[3] == ids[4], "two agents with the same system prompt share it"
    assert len({ids[0][0], ids[1][0], ids[3][0]}) == 3
    assert [turn.script.output_tokens for turn in turns] == [3] * 7
    short = Weka(str(tmp_path / "t.jsonl"), max_tokens=2)
    assert {turn.script.output_tokens for turn in turns_of(next(short.sessions()))} == {2}


def test_an_id_means_its_block_after_all_before_it_and_missing_ids_are_private(tmp_path: Path) -> None:
    moved = conversation(call(0, 8, [1, 2]), call(1, 8, [3, 2]), call(2, 16, [1]), call(3, 16, [1]), call(4, 6, []))
    found = [
        list(turn.request.trace_ids or ()) for turn in turns_of(next(Weka(write(tmp_path / "t", moved)).sessions()))
    ]
    assert found[0][1] != found[1][1], "the same text in another place is another block"
    assert [len(ids) for ids in found] == [2, 2, 4, 4, 1]
    assert found[2][0] == found[3][0] == found[0][0]
    assert not set(found[2][1:]) & set(found[3][1:])


def test_scopes(tmp_path: Path) -> None:
    def shared(scope: str) -> bool:
        entry = conversation(call(0, 4, [5]), hash_id_scope=scope)
        ids = [
            turns_of(session)[0].request.trace_ids for session in Weka(write(tmp_path / "t", entry, entry)).sessions()
        ]
        return ids[0] == ids[1]

    assert not shared("local")
    assert shared("global")


def test_a_folder_is_its_json_files_and_arrivals_are_drawn(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.json").write_text(json.dumps(conversation(call(0, 4, [1]), id=name), indent=1))
    workload = Weka(str(tmp_path), seed=3)
    assert [turns_of(session)[0].request.session for session in workload.sessions()] == ["a", "b"]
    assert [Path(name).name for name in workload.inputs()] == ["a.json", "b.json"]
    assert Weka(str(tmp_path), seed=3, limit=1).total_requests == 1
    starts = [session.start_ns for session in workload.sessions()]
    assert starts == sorted(starts)
    assert starts != [session.start_ns for session in workload.reseeded(4).sessions()]
    assert starts == [session.start_ns for session in Weka(str(tmp_path), seed=3).sessions()]


def test_pauses(tmp_path: Path) -> None:
    entry = conversation(
        call(0, 4, [1]),
        call(9, 4, [1]),  # without api_time the old server's time counts as a pause
        call(30, 4, [1], api_time=100),
        call(40, 4, [1], think_time=-0.001),  # overlapped in the record
        agent(41, "empty", duration_ms=3000),
        call(50, 4, [1]),
        agent(50, "relative", call(0.5, 4, [1], api_time=2), call(4, 4, [1])),
        call(60, 4, [1]),
    )

    def pauses(**options: Any) -> list[float]:
        turns = turns_of(next(Weka(write(tmp_path / "t", entry), **options).sessions()))
        return [turn.request.arrival_ns / NS_PER_S for turn in turns[1:]]

    assert pauses() == [9, 21, 0, 6, 0.5, 1.5, 6]
    assert pauses(max_think_s=5) == [5, 5, 0, 5, 0.5, 1.5, 5]


def test_a_sub_agent_recorded_first_is_started_by_the_first_request(tmp_path: Path) -> None:
    entry = conversation(agent(0, "a", call(0, 4, [2])), call(1, 4, [1]), call(2, 4, [1]))
    turns = turns_of(next(Weka(write(tmp_path / "t", entry)).sessions()))
    assert [turn.request.session for turn in turns] == ["c", "c/a", "c"]


WRONG: list[tuple[Any, str, str]] = [
    ("{", "line", "is not JSON"),
    ("3", "line", "must be a JSON object"),
    (conversation(block_size=0), "block_size", "must lie in 1"),
    ({"id": "x"}, "block_size", "is missing"),
    (conversation(hash_id_scope="here"), "hash_id_scope", "must be local or global, not 'here'"),
    (conversation(), "requests", "is empty"),
    (conversation(requests=3), "requests", "must be a list of objects"),
    (conversation(requests=[3]), "requests[0]", "must be an object"),
    (conversation(call(0, 4, [1], type="x")), "requests[0].type", "must be one of n, s, subagent, not 'x'"),
    (conversation(call(-1, 4, [1])), "requests[0].t", "must lie in 0"),
    (conversation(call(0, 0, [])), "requests[0].in", "must lie in 1"),
    (conversation(call(0, 4, [1, 2])), "requests[0].hash_ids", "has 2 ids, but 4 tokens make 1 blocks of 4"),
    (conversation(call(0, 4, [1], api_time="soon")), "requests[0].api_time", "must be a number, not 'soon'"),
    (conversation(call(0, 4, [1], think_time=float("nan"))), "requests[0].think_time", "must lie within"),
    (conversation(agent(0, "a", call(0, 4, [1]))), "requests[0].type", "is a sub-agent, but there is no request"),
    (
        conversation(call(0, 4, [1]), agent(1, "a", call(0, 4, [1]), call(1, 4, ["q"]))),
        "requests[1].requests[1].hash_ids",
        "must hold whole numbers",
    ),
]


@pytest.mark.parametrize(("entry", "field", "problem"), WRONG)
def test_errors_name_file_line_and_field(tmp_path: Path, entry: Any, field: str, problem: str) -> None:
    text = entry if isinstance(entry, str) else json.dumps(entry)
    path = tmp_path / "t.jsonl"
    path.write_text(f"{json.dumps(conversation(call(0, 4, [1])))}\n\n{text}\n")
    with pytest.raises(TraceError, match=re.escape(f"{path}, line 3, field '{field}': {problem}")):
        Weka(str(path))


def test_other_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"workload\.path=.*no such file or folder"):
        Weka(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"holds no \.json files"):
        Weka(str(tmp_path))
    (tmp_path / "t.jsonl").write_text("\n")
    with pytest.raises(TraceError, match="holds no conversations"):
        Weka(str(tmp_path / "t.jsonl"))
    (tmp_path / "t.json").write_text('{"id": "x",\n "block_size": 4,\n "requests": [}')
    with pytest.raises(TraceError, match=r"t\.json, line 3, field 'line': is not JSON"):
        Weka(str(tmp_path / "t.json"))
    two_sizes = write(tmp_path / "two", conversation(call(0, 4, [1])), conversation(call(0, 4, [1]), block_size=8))
    with pytest.raises(TraceError, match="line 2, field 'block_size': is 8, but the first conversation's is 4"):
        Weka(two_sizes)
    for key, value in {"rate_per_s": 0, "max_tokens": 0, "max_think_s": -1, "limit": 0, "seed": -1}.items():
        with pytest.raises(ConfigError, match=rf"workload\.{key}="):
            Weka(two_sizes, **{key: value})  # type: ignore[arg-type]


def test_other_workloads_change_sub_agents_too(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", TREE, TREE)
    both = Superposed({"x": Weka(path), "y": Weka(path)}, seed=2)
    requests = [turn.request for session in both.sessions() for turn in turns_of(session)]
    assert len({request.request_id for request in requests}) == both.total_requests == 28
    assert {request.session for request in requests} >= {"x/c", "y/c/a", "x/c/b", "y/c/late"}
    mine, theirs = ({i for r in requests if r.session[0] == part for i in r.trace_ids or ()} for part in "xy")
    assert not mine & theirs
    assert {r.parent for r in requests} - {None} <= {r.request_id for r in requests}
    large = [t.request for s in Reblocked(Weka(path), 8).sessions() for t in turns_of(s)]
    assert {r.trace_block_tokens for r in large} == {8}
    assert [len(r.trace_ids or ()) for r in large[:7]] == [1, 1, 1, 1, 1, 2, 3]
    part = Slice(Weka(path, seed=2), limit=1)
    assert len(turns_of(next(part.sessions()))) == 7
    assert [request for _, request, *_ in drive_with(part, slow)] == [0, 1, 3, 2, 4, 5, 6]


def test_analysis_knows_when_sub_agents_are_sent(tmp_path: Path) -> None:
    workload = Weka(write(tmp_path / "t.jsonl", TREE), seed=1)
    start_s = next(workload.sessions()).start_ns / NS_PER_S
    times_s = play(workload).arrival_ns / NS_PER_S - start_s
    assert times_s.tolist() == pytest.approx([0, 1, 1.5, 2, 2.5, 2.75, 3])


Trees = st.recursive(
    st.builds(lambda gap, api: ("call", gap, api), st.integers(0, 5), st.integers(0, 5)),
    lambda inner: st.builds(lambda kids: ("agent", kids), st.lists(inner, max_size=4)),
    max_leaves=12,
)


@given(st.lists(Trees, max_size=6), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_every_request_is_sent_once_and_no_turn_before_what_it_waits_for(
    tmp_path_factory: pytest.TempPathFactory, tree: list[Any], salt: int
) -> None:
    clock = [0.0]

    def entries(nodes: list[Any]) -> list[dict[str, Any]]:
        found = [call(clock[0], 4, [1], api_time=1)]
        for index, node in enumerate(nodes):
            clock[0] += 2
            if node[0] == "call":
                clock[0] += node[1]
                found.append(call(clock[0], 4, [1], api_time=node[2]))
            else:
                start = clock[0]
                found.append(agent(start, f"{index}", *entries(node[1])))
        return found

    path = write(tmp_path_factory.mktemp("weka") / "t.jsonl", conversation(*entries(tree)))
    workload = Weka(path)
    waits: dict[int, set[int]] = {}

    def note(session: Any) -> set[int]:
        """Every request of a session and of those it waits for; fills in what each waits for."""
        before: set[int] = set()
        for turn in iter(lambda: session.next_turn(None), None):
            waits[turn.request.request_id] = set(before)
            before.add(turn.request.request_id)
            for child in turn.children:
                before |= note(child)
        return before

    for session in workload.sessions():
        note(session)
    seconds = {request: float((request * 7919 + salt) % 11) for request in waits}
    log = drive_with(workload, seconds.__getitem__)
    assert sorted(request for _, request, *_ in log) == sorted(waits) == list(range(workload.total_requests))
    ends = {request: time_s + seconds[request] for time_s, request, *_ in log}
    for time_s, request, *_ in log:
        assert all(ends[other] <= time_s + 1e-9 for other in waits[request])
