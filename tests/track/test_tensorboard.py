"""What TensorBoard gets, read back from the event file."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from track_fixtures import ARGUMENTS, fabricate

from mcjax.track.sinks import tensorboard
from mcjax.track.sinks.base import RunInfo, Sink
from mcjax.track.sinks.files import Files
from mcjax.track.sinks.guard import Guarded
from mcjax.track.sinks.tensorboard import TensorBoard
from mcjax.track.summary import summarise
from mcjax.track.tracker import Tracker


def points(path: Path) -> Iterator[tuple[str, int, Any]]:
    """Tag, step and value of an event file: records of length (8 bytes), its checksum (4), a message, its checksum."""
    from tensorboardX.proto import event_pb2  # pyright: ignore[reportMissingImports]

    data, at = path.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack("<Q", data[at : at + 8])
        event = event_pb2.Event()  # pyright: ignore[reportAttributeAccessIssue]
        event.ParseFromString(data[at + 12 : at + 12 + length])
        at += 16 + length
        for value in event.summary.value:
            kind = value.WhichOneof("value")
            text = value.tensor.string_val[0].decode() if kind == "tensor" else None
            yield value.tag, event.step, value.simple_value if kind == "simple_value" else text or value.image


def test_an_event_file_holds_what_we_say(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="needs `pip install 'mcjax[tensorboard]'`")
    sinks: list[Sink] = [Files(str(tmp_path / "runs")), TensorBoard()]
    tracker = Tracker(sinks, RunInfo("sim", 7, "", {"seed": 7, "sched": {"alpha": 0.5}}))
    for second in range(1, 4):
        tracker.log(second * 1_000_000_000, {"completed": second, "prefix_hit_rate": 0.25 * second})
    tables = fabricate().tables()
    run = tracker.finish(tables, summarise(tables, **ARGUMENTS))
    assert run.directory is not None
    (path,) = (run.directory / "tensorboard").iterdir()
    found = list(points(path))
    assert [point for point in found if point[0] == "live/completed"] == [
        ("live/completed", 1000, 1.0),
        ("live/completed", 2000, 2.0),
        ("live/completed", 3000, 3.0),
    ]
    values = {tag: value for tag, _, value in found}
    assert values["summary/ttft_s.p90"] == pytest.approx(run.summary["ttft_s"]["p90"])
    assert "alpha: 0.5" in values["config/text_summary"]
    assert (values["overview"].width, values["overview"].height) == (1560, 960)


def test_a_folder_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="needs `pip install 'mcjax[tensorboard]'`")
    warnings: list[str] = []
    for directory in (str(tmp_path / "boards"), None):
        sink = Guarded(TensorBoard(directory), warn=warnings.append)
        sink.start(RunInfo("sim", 7, "named"))
        sink.finish({"goodput_rps": 3.5}, None)
    (path,) = (tmp_path / "boards" / "named").iterdir()
    assert ("summary/goodput_rps", 0, 3.5) in list(points(path))
    assert len(warnings) == 1
    assert "no run directory to write into" in warnings[0]


def test_an_absent_package_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(tensorboard.importlib, "import_module", absent)
    warnings: list[str] = []
    sink = Guarded(TensorBoard(str(tmp_path)), warn=warnings.append)
    sink.start(RunInfo("sim", 7))
    sink.finish({}, None)
    assert "tensorboardX is not installed; `pip install 'mcjax[tensorboard]'` brings it" in warnings[0]
