"""Runs of earlier schema versions: real ones, kept as data, that load, tell and compare as today's do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mcjax.app.replay import replay
from mcjax.errors import RunError
from mcjax.track import migrations
from mcjax.track.plots.overview import overview
from mcjax.track.run import Run, load
from mcjax.track.runs import load_all
from mcjax.track.schemas import DIGESTED, SCHEMA_VERSION, SCHEMAS, schema_of
from mcjax.track.summary import summarise
from mcjax.types import NS_PER_S

DATA = Path(__file__).parent / "data"
VERSIONS = range(1, SCHEMA_VERSION)


def old(version: int) -> Run:
    return load(DATA / f"run_v{version}")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_data_is_of_its_version(version: int) -> None:
    directory = DATA / f"run_v{version}"
    assert json.loads((directory / "summary.json").read_text())["schema"] == version
    for name in DIGESTED:
        schema = pq.read_schema(directory / f"{name}.parquet")
        assert schema.metadata[b"mcjax_schema"] == str(version).encode()
        assert schema.names == migrations.columns_at(version, name)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_table_is_as_todays(version: int) -> None:
    run = old(version)
    for name in SCHEMAS:
        table = run.table(name)
        assert table.schema.remove_metadata() == schema_of(name).remove_metadata(), name
        columns = [column for column, _ in SCHEMAS[name]][::-1]
        assert run.columns(name, *columns).to_pydict() == table.select(columns).to_pydict()
        pieces = [row for piece in run.pieces(name, *columns) for row in piece.to_pylist()]
        assert pieces == table.select(columns).to_pylist()
    ended = set(run.requests.column("finish_reason").to_pylist())
    assert ended == ({"stop"} if version >= 3 else {""})
    assert set(run.requests.column("hbm_tokens").to_pylist()) == {0}
    assert set(run.requests.column("missed_evicted_tokens").to_pylist()) == {None}
    assert run.requests.num_rows == 12


@pytest.mark.parametrize("version", VERSIONS)
def test_its_figures_come_out_again(version: int) -> None:
    run = old(version)
    again = summarise(
        run.tables,
        backend="sim",
        seed=7,
        wall_s=run.summary["wall_s"],
        duration_ns=round(run.summary["duration_s"] * NS_PER_S),
        warmup_ns=0,
        block_tokens=16,
        bytes_by_transport=run.summary["bytes_by_transport"],
    )
    # Block hit rates need the block size, which no summary says, and tables do not say how much of them was kept.
    changed = {"schema", "digest", "peak_rss_bytes", "prefix_hit_rate", "level"}
    assert {k: v for k, v in again.items() if k not in changed} == {
        k: v for k, v in run.summary.items() if k not in changed
    }
    assert run.summary["digest"] == ""


@pytest.mark.parametrize("version", VERSIONS)
def test_it_tells_and_draws(version: int) -> None:
    run = old(version)
    story = run.request(2)
    assert story.decisions[0].choice == "p0"
    assert any(event.kind == "transfer" for event in story.events)
    assert run.level == "full"
    assert overview(run).axes


def test_old_runs_stand_beside_each_other() -> None:
    runs = load_all([DATA / f"run_v{version}" for version in VERSIONS])
    assert not runs.refused
    frame = runs.summary
    assert len(frame) == len(VERSIONS)
    assert frame["goodput_rps"].nunique() == 1


@pytest.mark.parametrize("version", VERSIONS)
def test_an_old_run_is_not_replayed(version: int) -> None:
    with pytest.raises(RunError, match=f"schema version {version} can be read, but not replayed"):
        replay(old(version))


@pytest.mark.parametrize("found", [0, 5, "later", None])
def test_other_versions_are_refused_by_name(tmp_path: Path, found: object) -> None:
    directory = shutil.copytree(DATA / "run_v2", tmp_path / "run")
    summary = json.loads((directory / "summary.json").read_text())
    (directory / "summary.json").write_text(json.dumps({**summary, "schema": found}))
    with pytest.raises(RunError, match=rf"run: summary\.json has schema version {found}, this mcjax reads .* 1 to 4"):
        load(directory)


def test_each_version_has_a_step() -> None:
    assert sorted(migrations.STEPS) == list(range(2, SCHEMA_VERSION + 1))
