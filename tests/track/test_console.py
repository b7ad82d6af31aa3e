"""Progress lines and the table at the end."""

from __future__ import annotations

import io

from track_fixtures import ARGUMENTS, fabricate

from mcjax.track.console import (
    Figures,
    NullProgress,
    Progress,
    ProgressDisplay,
    duration,
    print_summary,
    progress_line,
    size,
    summary_rows,
)
from mcjax.track.summary import summarise

FIGURES = Figures(2_000_000_000, 40, 20, 18, 2, 3000, 1000, 250)


class Clock:
    """Moves only when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_line_says_how_far_and_how_fast() -> None:
    line = progress_line(FIGURES, 11.0, virtual=True, total_requests=44)
    assert line == (
        "40/44 submitted, 20 completed, 18 running, 2 not served, 1,500 tokens/s, 25.0% of prompt tokens hit, "
        "2 s virtual in 11 s real, 11 s left"
    )
    assert (
        progress_line(Figures(), 0.5, virtual=False, total_requests=0) == "0 submitted, 0 completed, 0 running, 500 ms"
    )


def test_without_a_terminal_lines_are_few() -> None:
    output, clock = io.StringIO(), Clock()
    progress: ProgressDisplay = Progress(virtual=True, total_requests=44, output=output, clock=clock)
    with progress:
        progress.stage("compile", 0.5)
        for tick in range(100):
            clock.now = tick * 0.25
            progress.update(FIGURES)
    lines = output.getvalue().splitlines()
    assert lines[0] == "compile 50%"
    assert len(lines) == 3
    assert "\x1b" not in output.getvalue()


def test_on_a_terminal_the_display_is_live(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    output, clock = io.StringIO(), Clock()
    with Progress(virtual=False, total_requests=44, output=output, clock=clock) as progress:
        clock.now = 1.0
        progress.update(FIGURES)
    assert "40/44 submitted" in output.getvalue()
    assert "\x1b" in output.getvalue()


def test_null_progress_shows_nothing(capsys) -> None:
    with NullProgress() as progress:
        progress.stage("compile")
        progress.update(FIGURES)
    assert capsys.readouterr().out == ""


def test_the_table_holds_what_is_promised() -> None:
    output = io.StringIO()
    print_summary(summarise(fabricate().tables(), **ARGUMENTS), "runs/one", output)
    text = " ".join(output.getvalue().split())
    for part in (
        "4 submitted: 2 completed, 1 rejected, 1 cancelled, 0 failed",
        "time to first token p50 37.5 ms, p90 47.5 ms, p99 49.8 ms",
        "time between tokens p50 3 ms",
        "goodput 10 requests/s",
        "50 tokens/s",
        "dram local 16.0%, dram remote 8.0%, computed 76.0%; hit rate 24.0%",
        "sim 96 B",
        "36.0% of prefill time",
        "run directory: runs/one",
    ):
        assert part in text


def test_an_empty_run_has_a_table_too() -> None:
    tables = {name: table.slice(0, 0) for name, table in fabricate().tables().items()}
    output = io.StringIO()
    print_summary(summarise(tables, **ARGUMENTS), output=output)
    assert "no data" in output.getvalue()


def test_units() -> None:
    spans = [0.0, 2.5e-6, 0.0125, 1.5, 119.0, 150.0, 7260.0]
    assert [duration(span) for span in spans] == [
        "0 s",
        "2.5 us",
        "12.5 ms",
        "1.5 s",
        "119 s",
        "2 min 30 s",
        "2 h 01 min",
    ]
    assert [size(count) for count in (0, 1023, 1536, 5 * 2**30, 3 * 2**50)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5 GiB",
        "3072 TiB",
    ]


def test_a_real_engine_tells_of_padding_memory_and_late_programs() -> None:
    world = {
        "padding": {
            "prefill": {"widths": [64, 256], "expected": 0.05, "actual": 0.125},
            "decode": {"batches": [8], "actual": None},
        },
        "device_memory": {
            "p0": {"devices": ["cpu:0", "cpu:1"], "weights_bytes": 2048, "pages_bytes": 1 << 20, "workspace_bytes": 5}
        },
        "compilations_after_warm_up": 2,
    }
    summary = summarise(fabricate().tables(), **ARGUMENTS, world=world)
    rows = dict(summary_rows(summary))
    padding = "12.5% of prefill tokens (5.0% expected, widths 64 256), no data of decode rows (batches 8)"
    assert rows["padding"] == padding
    assert rows["memory of p0"] == "cpu:0 cpu:1: weights 2 KiB, pages 1 MiB, workspace 5 B"
    assert rows["compiled after warm-up"].startswith("2 programs")
    summary["compilations_after_warm_up"] = 0
    assert "compiled after warm-up" not in dict(summary_rows(summary))
