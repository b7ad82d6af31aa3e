"""`mcjax report`: everything that must be on the page is, as text that no label can turn into markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from conftest_app import SIM
from figures_fixtures import OFTEN, QUESTION

import mcjax
from mcjax.app import report as app
from mcjax.errors import RunError
from mcjax.track.plots.kinds import KINDS
from mcjax.track.report.inline import LARGEST_SVG_BYTES
from mcjax.track.report.page import report
from mcjax.track.run import Run
from mcjax.track.runs import Runs, load_all
from mcjax.track.sweep import Sweep

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Elements, their texts, and whether every one is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.texts.append(data.strip())

    def values(self, attribute: str) -> list[str]:
        return [attributes[attribute] for _, attributes in self.elements if attribute in attributes]


@pytest.fixture(scope="module")
def path(drawn_sweep: Sweep) -> Path:
    return report(drawn_sweep, drawn_sweep.directory / "report.html")


@pytest.fixture(scope="module")
def page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_what_is_on_the_page(page: Page, drawn_sweep: Sweep) -> None:
    text = "\n".join(page.texts)
    assert QUESTION in text
    assert "mcjax -m backend=sim" in text
    assert "2026-01-01T10:00:00+00:00" in text
    for section in ("differences", "comparison", "figures", "runs", "left-out", "how"):
        assert section in page.values("id")
    assert [name for name in page.values("id") if name.startswith("figure-")] == [f"figure-{kind}" for kind in KINDS]
    assert "sched/prefill" in page.texts  # what differs
    assert "workload.rate_per_s" in page.texts  # what does not
    assert "goodput" in text
    for kind in KINDS.values():
        assert kind.note in text
        assert f"mcjax plot selections kind={kind.name} out={kind.name}.pdf" in text
    assert "3 runs a group" in text
    for run in load_all(drawn_sweep.runs()):
        assert run.directory is not None
        assert run.directory.name in page.texts
        assert run.summary["seed"] in (0, 1, 2)


def test_failed_points_are_on_the_page_with_their_reason(page: Page) -> None:
    assert "failed: Deadlock: <nobody> moves" in page.texts
    assert "sched/prefill=random seed=3" in page.texts
    assert "Not among them: 1 point of the sweep that did not finish." in "\n".join(page.texts)


def test_links_lead_to_the_runs(page: Page, path: Path) -> None:
    links = [link for link in page.values("href") if not link.startswith("#")]
    assert len([link for link in links if link.endswith("/")]) == 6
    assert len([link for link in links if link.endswith("/overview.png")]) == 2
    for link in links:
        assert "//" not in link
        assert (path.parent / unquote(link)).exists()
    for link in page.values("href"):
        if link.startswith("#"):
            assert link[1:] in page.values("id")


def test_nothing_comes_from_elsewhere_and_nothing_runs(page: Page, path: Path) -> None:
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "iframe", "object", "embed", "link", "form"}
    sources = [*page.values("src"), *page.values("xlink:href")]
    assert sources
    assert all(source.startswith(("data:image/png;base64,", "#")) for source in sources)
    assert not re.search(r"url\((?!#)|@import", path.read_text(encoding="utf-8"))
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    (policy,) = [value for value in page.values("content") if value.startswith("default-src")]
    assert policy.startswith("default-src 'none'")


def test_ids_are_unique_and_references_lead_somewhere(page: Page, path: Path) -> None:
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"url\(#([^)]+)\)", text) + [
        link[1:] for link in page.values("xlink:href") if link[0] == "#"
    ]:
        assert name in ids


def test_labels_are_text(page: Page, path: Path) -> None:
    assert "<script" not in path.read_text(encoding="utf-8")
    assert "&lt;script&gt;" in path.read_text(encoding="utf-8")


@pytest.mark.check_long
def test_equal_runs_give_an_equal_page(path: Path, drawn_sweep: Sweep) -> None:
    kinds = ["tbt_cdf", "pareto", "links"]
    first, second = (report(drawn_sweep, path.with_name("again.html"), kinds).read_bytes() for _ in range(2))
    assert first == second


def test_figures_follow_the_colours_of_the_page(page: Page) -> None:
    drawn = [attributes for _, attributes in page.elements if attributes.get("class", "").startswith("drawn")]
    assert len(drawn) == len(KINDS)
    svgs = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in svgs)
    assert any("currentColor" in attributes.get("style", "") for _, attributes in page.elements)


def test_large_pictures_become_pngs(monkeypatch: pytest.MonkeyPatch, path: Path, drawn_sweep: Sweep) -> None:
    assert LARGEST_SVG_BYTES == 300_000
    monkeypatch.setattr("mcjax.track.report.inline.LARGEST_SVG_BYTES", 1000)
    text = report(drawn_sweep, path.with_name("small.html"), ["goodput"]).read_text(encoding="utf-8")
    assert '<img class="drawn paper" alt="Goodput"' in text
    assert "<svg" not in text


def test_the_command(drawn_sweep: Sweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(drawn_sweep.base.parent)
    assert app.command(["selections", "--kinds", "goodput,pareto", "--out", "small.html"]) == 0
    assert capsys.readouterr().out == "small.html\n"
    small = Page(Path("small.html").read_text(encoding="utf-8"))
    assert [name for name in small.values("id") if name.startswith("figure-")] == ["figure-goodput", "figure-pareto"]
    assert app.command([str(drawn_sweep.directory), "--kinds", "goodput"]) == 0
    assert capsys.readouterr().out == f"{drawn_sweep.directory}/report.html\n"
    assert app.command(["selections", "--kinds", "goodptu"]) == 2
    assert "did you mean goodput" in capsys.readouterr().err
    assert app.command(["nowhere"]) == 2
    assert "nowhere: no such run" in capsys.readouterr().err


@pytest.mark.check_long
def test_one_run_and_runs_that_keep_only_some_tables(drawn_sweep: Sweep, tmp_path: Path) -> None:
    (one,) = load_all(drawn_sweep.runs()[:1])
    page = Page(report(one, tmp_path / "one.html", ["ttft_cdf"]).read_text(encoding="utf-8"))
    assert QUESTION in "\n".join(page.texts)
    bare = mcjax.run([*SIM, *OFTEN, "track=none"], progress=False)
    stripped = Run(None, {**bare.summary, "level": "summary"}, bare.config, {}, record=bare.record)
    text = "\n".join(Page(report(stripped, tmp_path / "bare.html").read_text(encoding="utf-8")).texts)
    assert "Not drawn" in text
    assert "kept at track.level=summary" in text
    assert KINDS["goodput"].note in text


def test_without_a_finished_run_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no finished run to report; it was killed"):
        report(Runs([], [("runs/x", "it was killed")]), tmp_path / "report.html")
    assert not list(tmp_path.iterdir())
