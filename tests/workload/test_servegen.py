"""ServeGen: rates and lengths of the public clients come out again; streams are apart; broken files are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.errors import ConfigError, TraceError
from mcjax.workload.servegen import ServeGen
from mcjax.workload.servegen_file import parse_distribution, parse_lengths, parse_windows

GOOD = "{10: 0.25, 20: 0.75}"


def client(folder: Path, number: int, windows: list[str], lengths: dict[str, dict[str, str]] | None = None) -> None:
    (folder / f"chunk-{number}-trace.csv").write_text("\n".join(windows))
    given = lengths or {"0": {"input_tokens": GOOD, "output_tokens": "{3: 1.0}"}}
    (folder / f"chunk-{number}-dataset.json").write_text(json.dumps(given))


def arrivals_s(workload: ServeGen) -> np.ndarray:
    return np.array([session.start_ns for session in workload.sessions()]) / 1e9


def test_public_clients_send_at_their_rates(traces: Callable[[str], Path]) -> None:
    folder = traces("servegen/language_m-large/chunk-61-trace.csv").parent
    windows = parse_windows((folder / "chunk-61-trace.csv").read_bytes().splitlines(), "f")
    workload = ServeGen(str(folder), seed=3, clients=[61], start_s=1200, hours=0.5)
    expected = sum(w.rate_per_s * 600 for w in windows if 1200 <= w.start_s < 3000)
    assert workload.total_requests == pytest.approx(expected, rel=0.03)
    turns = [session.next_turn(None) for session in workload.sessions()]
    assert {turn.request.tenant for turn in turns if turn} == {"client-61"}
    text = json.loads((folder / "chunk-61-dataset.json").read_bytes())["0"]["input_tokens"]
    shares = parse_distribution(text, "f", "0")
    assert shares is not None
    mean = float((shares.values * np.diff(shares.cumulative, prepend=0)).sum())
    assert np.mean([turn.request.prompt_tokens for turn in turns if turn]) == pytest.approx(mean, rel=0.02)


def test_every_public_client_can_be_played(traces: Callable[[str], Path]) -> None:
    folder = traces("servegen/reason_deepseek-r1/chunk-12-trace.csv").parent
    workload = ServeGen(str(folder), seed=1, start_s=50_400, hours=1.0, rate_scale=0.2)
    assert workload.total_requests > 100
    assert len(workload.inputs()) == 16


@pytest.mark.parametrize(("family", "shape"), [("Gamma", 0.2), ("Weibull", 0.4), ("Gamma", 4.0)])
def test_the_mean_count_is_the_rate_even_in_bursty_windows(tmp_path: Path, family: str, shape: float) -> None:
    """A process that began at a gap's start would send (cv^2 - 1) / 2 more; here 2 to 4.4 of 60."""
    client(tmp_path, 1, [f"0,0.1,2,{family},{shape},9", f"600,0.3,2,{family},{shape},9"])
    counts = np.array([ServeGen(str(tmp_path), seed, hours=900 / 3600).total_requests for seed in range(400)])
    assert abs(counts.mean() - 150) < 4 * counts.std() / 20
    assert (shape > 1) == (counts.std() < np.sqrt(150))


def test_windows_scale_and_the_part_asked_for(tmp_path: Path) -> None:
    client(tmp_path, 1, ["0,1,1,Gamma,1,1", "600,0,0,,0,0", "1200,2,1,Gamma,1,0.5"])
    times = arrivals_s(ServeGen(str(tmp_path), 1, start_s=300, hours=0.5, rate_scale=10))
    counts = np.histogram(times, [0, 300, 900, 1500])[0]
    assert counts[1] == 0
    assert counts[0] == pytest.approx(3000, abs=250)
    assert counts[2] == pytest.approx(12_000, abs=500)
    assert times.max() < 1500
    with pytest.raises(ConfigError, match=r"workload\.start_s"):
        ServeGen(str(tmp_path), 1, start_s=600, hours=0.1)


def test_a_client_does_not_depend_on_the_others_and_seeds_do(tmp_path: Path) -> None:
    for number in (1, 2):
        client(tmp_path, number, ["0,1,1,Weibull,0.5,1"])
    alone = arrivals_s(ServeGen(str(tmp_path), 7, clients=[2]))
    both = ServeGen(str(tmp_path), 7)
    turns = [turn for session in both.sessions() if (turn := session.next_turn(None)) is not None]
    assert [t.request.arrival_ns / 1e9 for t in turns if t.request.tenant == "client-2"] == alone.tolist()
    assert arrivals_s(both.reseeded(7)).tolist() == arrivals_s(both).tolist()
    assert arrivals_s(both.reseeded(8)).tolist() != arrivals_s(both).tolist()
    assert np.all(np.diff(arrivals_s(both)) >= 0)


def test_an_empty_length_window_takes_the_one_before(tmp_path: Path) -> None:
    empty = {"input_tokens": "{}", "output_tokens": "{}"}
    lengths = {"0": empty, "600": {"input_tokens": "{5: 1.0}", "output_tokens": "{6: 1.0}"}, "1200": empty}
    client(tmp_path, 1, [f"{start},1,1,Gamma,1,1" for start in (0, 600, 1200)], lengths)
    turns = [session.next_turn(None) for session in ServeGen(str(tmp_path), 1, hours=0.5).sessions()]
    assert {turn.request.prompt_tokens for turn in turns if turn} == {5}
    client(tmp_path, 1, ["0,1,1,Gamma,1,1"], {"0": empty})
    with pytest.raises(TraceError, match="no window has lengths"):
        list(ServeGen(str(tmp_path), 1).sessions())


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("600,1,1,Gamma,1", "line"),
        ("0,1,1,Gamma,1,1", "window start"),
        ("x,1,1,Gamma,1,1", "window start"),
        ("600,-1,1,Gamma,1,1", "rate"),
        ("600,1,nan,Gamma,1,1", "cv"),
        ("600,1,1,Pareto,1,1", "family"),
        ("600,1,1,Gamma,0,1", "family argument 1"),
    ],
)
def test_trace_errors_name_line_and_field(line: str, field: str) -> None:
    with pytest.raises(TraceError) as caught:
        parse_windows([b"0,1,1,Gamma,1,1", line.encode()], "f")
    assert (caught.value.line, caught.value.field) == (2, field)


@pytest.mark.parametrize(
    "text", ["", "{1: 1.0", "[1]", "{1: 2}", "{1: 0.5}", "{'a': 1.0}", "{-1: 1.0}", "__import__('os')", "{1: nan}"]
)
def test_distributions_that_cannot_be_read(text: str) -> None:
    with pytest.raises(TraceError, match="input_tokens"):
        parse_distribution(text, "f", "0.input_tokens")


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[]", b"{}", b'{"x": {}}', b'{"0": 3}', b'{"0": {"input_tokens": "{}"}}']
)
def test_datasets_that_cannot_be_read(data: bytes) -> None:
    with pytest.raises(TraceError, match=r"^f, line 1"):
        parse_lengths(data, "f")


@pytest.mark.parametrize(
    "setting", [{"clients": [9]}, {"clients": []}, {"clients": [1, 1]}, {"hours": 0}, {"seed": -1}]
)
def test_values_that_cannot_work(tmp_path: Path, setting: dict[str, object]) -> None:
    client(tmp_path, 1, ["0,1,1,Gamma,1,1"])
    with pytest.raises(ConfigError, match=f"workload.{next(iter(setting))}"):
        ServeGen(str(tmp_path), **{"seed": 1, **setting})  # pyright: ignore[reportArgumentType]


@given(st.text(alphabet="{}:,.0123456789e-[]()'\"nax ", max_size=30))
@settings(max_examples=150)
def test_any_text_is_a_distribution_or_a_trace_error(text: str) -> None:
    try:
        found = parse_distribution(text, "f", "q")
    except TraceError:
        return
    assert found is None or found.cumulative[-1] == 1.0
