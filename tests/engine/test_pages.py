"""The Python of these packages' pages runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "printed"),
    [("sched", r"\{'token': 0\.\d+, 'block': 0\.\d+\} \d"), ("transfer", r"^8192$"), ("engine", r"^\d+\.\d+")],
)
def test_a_pages_example_runs(
    page: str, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], f"{page}.md", "exec", dont_inherit=True), {"__name__": page})
    assert re.search(printed, capsys.readouterr().out.strip())


@pytest.mark.parametrize("page", ["sched", "transfer", "engine"])
def test_a_page_names_only_files_that_exist(page: str) -> None:
    package = DOCS.parent / "src" / "mcjax" / page
    table = (DOCS / f"{page}.md").read_text().split("## The walk")[0]
    for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", row):
            for part in name.split():
                assert (package / part).exists() or list(package.rglob(part)), f"{page}.md names {part}"
