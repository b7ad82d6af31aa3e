"""A comparison as a table for a terminal, Markdown, CSV, LaTeX and HTML: the same figures in each."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable

import numpy as np
import pytest
from compare_fixtures import policies, summarised

from mcjax.errors import ConfigError
from mcjax.track.compare.comparison import Comparison, compare
from mcjax.track.compare.render import FORMATS, escaped
from mcjax.track.compare.view import number, scale_of
from mcjax.track.metrics import metric

NOISE = np.random.default_rng(1).normal(0, 0.001, (4, 8))


def compared(count: int, name: str = "p{}") -> Comparison:
    return compare(policies({name.format(index): 0.1 * (index + 1) + NOISE[index] for index in range(count)}))


def test_two_groups_side_by_side() -> None:
    lines = compared(2).render().splitlines()
    header = next(line for line in lines if line.startswith(" sched.prefill"))
    assert header.split() == ["sched.prefill", "p0", "p1", "difference", "95", "%", "interval"]
    figures = next(line for line in lines if line.startswith(" TTFT p90 (ms)"))
    some = r"\d+(?:\.\d+)?"
    assert re.fullmatch(rf" TTFT p90 \(ms\)\s+{some} \*\s+{some}\s+\+99\.\d\s+\[\+{some}, \+{some}\]", figures)
    assert "the same in all: submitted 100, completed 100, rejected 0, failed 0" in lines
    assert "* best: the 95 % interval of its difference to the other group excludes zero" in lines


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_terminal_is_never_too_narrow(count: int, width: int) -> None:
    comparison = compared(count)
    text = comparison.render(width=width)
    assert max(map(len, text.splitlines())) <= width
    assert comparison.rows[-1].cells[-1].mean is not None
    assert number(1e3 * comparison.rows[-1].cells[-1].mean) in text


def test_wide_tables_have_groups_across_and_narrow_ones_down() -> None:
    wide, narrow = compared(4).render(width=200), compared(4).render(width=80)
    assert "p0" in wide.splitlines()[1]
    assert "p3" in wide.splitlines()[1]
    assert "difference" in narrow.splitlines()[1]
    assert [line.split()[0] for line in narrow.splitlines() if re.match(r"\s{10,}p\d", line)] == ["p1", "p2", "p3"]


def test_long_labels_are_told_in_a_legend() -> None:
    text = compared(2, "a_policy_with_a_very_long_name_{}").render()
    legend = text.splitlines()
    assert any(re.match(r"\s*2\s+a_policy_with_a_very_long_name_1\s+8", line) for line in legend)
    assert "difference" in text


def test_tidy_csv() -> None:
    comparison = compared(3)
    rows = list(csv.DictReader(io.StringIO(comparison.render("csv"))))
    assert len(rows) == 3 * (len(comparison.rows) + len(comparison.same))
    of_metric = [row for row in rows if row["metric"] == "ttft_s.p90"]
    assert [row["best"] for row in of_metric] == ["true", "false", "false"]
    assert [row["sched.prefill"] for row in of_metric] == ["p0", "p1", "p2"]
    assert of_metric[0]["low"] == ""
    for row, record in zip(rows, comparison.records(), strict=True):
        assert row["mean"] == str(record["mean"])
        assert row["low"] == ("" if record["low"] is None else str(record["low"]))


def test_markdown_has_as_many_cells_in_every_row() -> None:
    text = compared(3, "p|{}").render("md")
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 3
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {5}
    assert "**100" in table[2]
    assert r"p\|1" in table[0]
    assert "\n- the same in all: submitted 100" in text


def test_latex_is_balanced_and_escaped() -> None:
    text = compared(3, "p_{}&50%").render("latex")
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 1
    assert [text.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == [1, 1, 1]
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert all(len(re.findall(r"(?<!\\)&", line)) == 3 for line in body)
    assert r"p\_1\&50\%" in body[0]
    assert r"\textbf{100}$^{*}$" in text or re.search(r"\\textbf\{[\d.]+\}\$\^\{\*\}\$", text)
    for line in body:
        assert line.count("{") == line.count("}")
        assert not re.search(r"(?<!\\)[_%#]", line)
    comments = [line for line in text.splitlines() if line.startswith("%")]
    assert any("the same in all" in line for line in comments)


def test_every_sign_of_latex() -> None:
    assert escaped(r"a_b & 50% {x} ^ ~ \ # $ <|>") == (
        r"a\_b \& 50\% \{x\} \textasciicircum{} \textasciitilde{} \textbackslash{} \# \$ "
        r"\textless{}\textbar{}\textgreater{}"
    )


def test_html_and_rich(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    comparison = compared(2, "<p{}>")
    page = comparison._repr_html_()
    assert page.count("<table>") == page.count("</table>") == 1
    assert "&lt;p1&gt;" in page
    assert "<p1>" not in page
    assert re.search(r"<b>[\d.]+ \*</b>", page)
    Console(width=90).print(comparison)
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert shown == comparison.render(width=90).splitlines()
    assert repr(comparison) == "Comparison(2 groups, 1 figures differ, 0 refused)"


def test_refused_runs_are_told_in_every_format() -> None:
    from mcjax.track.runs import Runs

    runs = Runs(policies({"a": [1.0] * 6, "b": [2.0] * 6}), [("runs/x", "runs/x: unfinished, killed")])
    comparison = compare(runs)
    for format in ("table", "md", "latex"):
        assert "refused: runs/x: unfinished, killed" in comparison.render(format)
    assert "unfinished, killed" in comparison._repr_html_()


def test_what_has_no_figure_is_a_dash() -> None:
    runs = [summarised({"p": "a"}, "a", ttft_s={"p90": 1.0}), summarised({"p": "b"}, "b", ttft_s={"p90": None})]
    text = compare(runs, ["ttft_s.p90"]).render()
    assert re.search(r"TTFT p90 \(s\)\s+1\s+-\s*$", text, re.MULTILINE)


def test_unknown_format() -> None:
    with pytest.raises(ConfigError, match="format=word: no such format; allowed: table, md, csv, latex"):
        compared(2).render("word")
    assert FORMATS == ("table", "md", "csv", "latex")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1234.56, "1,235"),
        (12.3456, "12.35"),
        (0.00123456, "0.001235"),
        (-1e-12, "0"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (100, "100"),
        (99999.4, "99,999"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("name", "mean", "factor", "unit"),
    [
        ("ttft_s.p90", 0.5, 1e3, "ms"),
        ("ttft_s.p90", 0.0000005, 1e6, "us"),
        ("ttft_s.p90", 5.0, 1.0, "s"),
        ("ttft_s.p90", 0.0, 1.0, "s"),
        ("slo_attainment", 0.5, 100.0, "%"),
        ("peak_rss_bytes", 3 * 2**20, 2.0**-20, "MiB"),
        ("goodput_rps", 3.0, 1.0, "1/s"),
        ("requests.failed", 3.0, 1.0, ""),
    ],
)
def test_units(name: str, mean: float, factor: float, unit: str) -> None:
    assert scale_of(metric(name), [None, mean / 2, -mean]) == (factor, unit)


@pytest.mark.parametrize("format", FORMATS)
def test_any_comparison_has_every_format(format: str) -> None:
    shapes: list[Callable[[], Comparison]] = [
        lambda: compared(1),
        lambda: compare([summarised({})]),
        lambda: compare([summarised({}, check={"schedules": 3})], ["check"]),
    ]
    for shape in shapes:
        assert shape().render(format).endswith("\n")
