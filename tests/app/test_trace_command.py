"""`mcjax trace` writes a file, says which, and names what it cannot do."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import pytest
from conftest_app import SMALL, runs

import mcjax
from mcjax.app.trace import command


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = mcjax.run(
        [*SMALL, f"track.sinks.0.directory={tmp_path_factory.mktemp('made')}"], progress=False
    ).directory
    assert directory is not None
    return directory


@pytest.fixture
def run(made: Path, place: Path) -> Path:
    """The run, in the working directory's `runs`."""
    shutil.copytree(made, place / "runs" / made.name)
    return place / "runs" / made.name


def test_a_whole_run_and_some_of_its_requests(run: Path, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command([str(run)]) == 0
    whole = place / f"{run.name}.pftrace.gz"
    out = capfd.readouterr().out
    assert whole.name in out
    assert "MB" in out
    assert "https://ui.perfetto.dev" in out
    assert command([run.name, "--request", "0", "1", "--request", "2000", "--out", "some.pftrace"]) == 0
    content = (place / "some.pftrace").read_bytes()
    assert b"request 2000" in content
    assert b"request 3000" not in content
    assert b"request 3000" in gzip.decompress(whole.read_bytes())
    assert command([run.name, "--request", "0"]) == 0
    assert (place / f"{run.name}-request-0.pftrace.gz").exists()
    assert command([run.name, "--from", "0.1", "--to", "0.2", "--out", "part.pftrace.gz"]) == 0
    assert (place / "part.pftrace.gz").stat().st_size < whole.stat().st_size


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing"], "nothing: no such run"),
        (["RUN", "--request", "77"], "no request 77; the nearest are 0, 1, 2, "),
        (["RUN", "--out", "no/folder.pftrace"], "--out=no/folder.pftrace: cannot be written"),
        (["RUN", "--from", "3", "--to", "2"], "--to=2.0: lies before 3"),
    ],
)
def test_what_to_mend_is_one_message(
    run: Path, place: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    before = sorted(place.rglob("*"))
    capfd.readouterr()
    assert command([run.name if word == "RUN" else word for word in arguments]) == 2
    captured = capfd.readouterr()
    assert captured.err.startswith("mcjax: ")
    assert told in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert sorted(place.rglob("*")) == before


def test_a_run_without_tables_is_refused(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mcjax.run([*SMALL, "track.level=summary"], progress=False)
    capfd.readouterr()
    assert command([str(runs(place)[0])]) == 2
    assert "track.level" in capfd.readouterr().err
