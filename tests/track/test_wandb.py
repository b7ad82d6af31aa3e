"""What Weights & Biases gets: from its own offline file, which wandb writes and `wandb sync` uploads."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from track_fixtures import ARGUMENTS, fabricate

from mcjax.errors import ConfigError
from mcjax.track.record import RunRecord
from mcjax.track.run import Run
from mcjax.track.sinks import wandb as sinks_wandb
from mcjax.track.sinks.base import RunInfo, Sink
from mcjax.track.sinks.files import Files
from mcjax.track.sinks.guard import Guarded
from mcjax.track.sinks.wandb import Wandb, uploaded
from mcjax.track.summary import summarise
from mcjax.track.tracker import Tracker

LOG_BLOCK_BYTES = 32_768
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Any]:
    """The records of a `.wandb` file: LevelDB's log format behind a header of 7 bytes, a protobuf message each."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] in (b":W&B", b"")
    at, message = 7, b""
    while at + 7 <= len(data):
        left = LOG_BLOCK_BYTES - at % LOG_BLOCK_BYTES
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        assert kind in (WHOLE, FIRST, MIDDLE, LAST)
        if at + 7 + length > len(data):  # not yet written
            return
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (WHOLE, LAST):
            record = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]
            record.ParseFromString(message)
            yield record
            message = b""


def values(items: Any) -> dict[str, Any]:
    """What a list of updates says: `{"a.b": 1}`."""
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """wandb without an account, and with all its folders in the test's own."""
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def kept(place: Path, **options: Any) -> Run:
    """A run that was kept in a directory and in wandb, with a secret in its config."""
    info = RunInfo(
        "sim",
        7,
        "",
        {"seed": 7, "sched": {"alpha": 0.5}, "text": "is hunter2-key"},
        record=RunRecord(run_key="abcdef", sweep="sweep-1"),
        sources={"my_policy.py": "class Mine: ..."},
    )
    sinks: list[Sink] = [Files(str(place / "runs")), Wandb(directory=str(place / "runs"), **options)]
    tracker = Tracker(sinks, info)
    for second in range(1, 4):
        tracker.log(second * 1_000_000_000, {"completed": second, "prefix_hit_rate": 0.25 * second})
    tables = fabricate().tables()
    return tracker.finish(tables, summarise(tables, **ARGUMENTS))


def found(place: Path) -> tuple[Any, dict[str, Any], list[dict[str, Any]], Any]:
    """Run, last summary, curves and artifact in the one offline file below `place`."""
    (path,) = place.glob("runs/wandb/offline-run-*/*.wandb")
    for _ in range(1000):  # wandb's own process may still be writing
        if any(record.WhichOneof("record_type") == "exit" for record in records(path)):
            break
        time.sleep(0.02)
    run, artifact, summary, curves = None, None, dict[str, Any](), list[dict[str, Any]]()
    for record in records(path):
        match record.WhichOneof("record_type"):
            case "run":
                run = record.run
            case "history":
                curves.append(values(record.history.item))
            case "summary":
                summary.update(values(record.summary.update))
            case "artifact":
                artifact = record.artifact
            case _:
                pass
    return run, summary, curves, artifact


def test_an_offline_run_holds_what_we_say(
    quiet: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "hunter2-key")
    kept_run = kept(quiet)
    assert kept_run.directory is not None
    run, summary, curves, artifact = found(quiet)
    assert not [record for record in caplog.records if record.name == "mcjax"]
    assert (run.display_name, run.run_group, run.job_type) == (kept_run.directory.name, "sweep-1", "sim")
    config = values(run.config.update)
    assert (config["seed"], config["sched"], config["run_key"]) == (7, {"alpha": 0.5}, "abcdef")
    assert config["text"] == "is <redacted>"
    assert [(curve["time_s"], curve["completed"], curve["prefix_hit_rate"]) for curve in curves] == [
        (1, 1, 0.25),
        (2, 2, 0.5),
        (3, 3, 0.75),
    ]
    assert summary["ttft_s.p90"] == kept_run.summary["ttft_s"]["p90"] > 0
    assert summary["digest"] == kept_run.summary["digest"]
    contents = {entry.path: entry for entry in artifact.manifest.contents}
    assert sorted(contents) == [
        "config.yaml",
        "environment.json",
        "overview.png",
        "requests.parquet",
        "run.json",
        "strategies/my_policy.py",
        "summary.json",
    ]
    for path, entry in contents.items():
        assert Path(entry.local_path).is_absolute()
        assert Path(entry.local_path) == kept_run.directory / path
        assert entry.size == (kept_run.directory / path).stat().st_size
    (folder,) = (quiet / "runs" / "wandb").glob("offline-run-*")
    assert not any(b"hunter2" in path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert capsys.readouterr().out == f"wandb sync {folder.relative_to(quiet)}  # uploads this run\n"


def test_an_upload_has_a_bound(quiet: Path) -> None:
    kept(quiet, tables=["requests", "events"], upload_bytes=40_000)
    _, _, _, artifact = found(quiet)
    names = {entry.path for entry in artifact.manifest.contents}
    assert json.loads(artifact.metadata) == {"left_out": ["overview.png"]}
    assert {"requests.parquet", "events.parquet", "summary.json"} <= names
    assert sum(entry.size for entry in artifact.manifest.contents) <= 40_000


def test_what_is_uploaded(tmp_path: Path) -> None:
    names = ["DONE", "summary.json", "events.parquet", "requests.parquet", "requests.parquet.part", "a.csv", "b.pdf"]
    for name in [*names, "strategies/deep/my.py", "tensorboard/events.out"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link.png").symlink_to(tmp_path / "DONE")
    sent = [path.relative_to(tmp_path).as_posix() for path in uploaded(tmp_path, ["events"])]
    assert sent == ["a.csv", "b.pdf", "events.parquet", "strategies/deep/my.py", "summary.json"]
    assert list(uploaded(tmp_path, []))


def test_a_run_without_a_directory_has_curves_and_summary(quiet: Path) -> None:
    warnings: list[str] = []
    sink = Guarded(Wandb(directory=str(quiet / "runs")), warn=warnings.append)
    sink.start(replace(RunInfo("jax", 7, "named"), config={"a": 1}))
    sink.log(500_000_000, {"running": 2})
    sink.finish({"goodput_rps": 3.5}, None)
    run, summary, curves, artifact = found(quiet)
    assert not warnings
    assert (run.display_name, run.run_group, run.job_type) == ("named", "", "jax")
    assert summary["goodput_rps"] == 3.5
    assert curves[0]["time_s"] == 0.5
    assert artifact is None


def test_an_absent_wandb_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(sinks_wandb.importlib, "import_module", absent)
    warnings: list[str] = []
    sink = Guarded(Wandb(directory=str(tmp_path), mode="offline"), warn=warnings.append)
    sink.start(RunInfo("sim", 7))
    sink.finish({}, None)
    assert "wandb is not installed; `pip install wandb` brings it" in warnings[0]


@pytest.mark.parametrize(("key", "mode"), [("", "offline"), ("0123456789", "online")])
def test_an_account_decides_the_mode(monkeypatch: pytest.MonkeyPatch, key: str, mode: str) -> None:
    monkeypatch.setenv("WANDB_API_KEY", key)
    assert Wandb().mode == mode
    assert Wandb(mode="online").mode == "online"


def test_bad_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="auto, online, offline"):
        Wandb(mode="sometimes")
    with pytest.raises(ConfigError, match=r"tables=latencies: no such table; allowed: requests, events"):
        Wandb(tables=["latencies"])
    with pytest.raises(ConfigError, match=r"upload_bytes=-1"):
        Wandb(upload_bytes=-1)
