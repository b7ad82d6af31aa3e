"""Digests of large files are computed once, and never those of another content."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from mcjax.models import digests

CONTENT = b"weights" * 1000


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is large, as far as these tests go, and has not changed for a while."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "KEPT_BYTES", 1000)
    monkeypatch.setattr(digests, "SETTLED_NS", -1)
    path = tmp_path / "model.safetensors"
    path.write_bytes(CONTENT)
    return path


def named(content: bytes) -> list[str]:
    return [hashlib.sha256(content).hexdigest()]


def notes(file: Path) -> list[Path]:
    return sorted((file.parent / "cache").rglob("*.json"))


def test_a_file_is_read_once(file: Path) -> None:
    assert digests.sha256_of([file]) == named(CONTENT)
    (note,) = notes(file)
    said = json.loads(note.read_text())
    assert said["file"] == str(file)
    note.write_text(json.dumps({**said, "sha256": "f" * 64}))
    assert digests.sha256_of([file]) == ["f" * 64]  # so it was not read
    link = file.with_name("link.safetensors")
    link.symlink_to(file)  # as the cache of the hub has it
    assert digests.sha256_of([link, file]) == ["f" * 64] * 2


def test_a_file_that_changed_is_read_again(file: Path) -> None:
    digests.sha256_of([file])
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    other = CONTENT[:-1] + b"!"
    file.write_bytes(other)
    os.utime(file, ns=times)  # of equal size, and as old as before
    assert digests.sha256_of([file]) == named(other)


def test_what_changed_just_now_is_not_kept(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "SETTLED_NS", 10**12)
    assert digests.sha256_of([file]) == named(CONTENT)
    assert notes(file) == []


def test_small_files_are_not_kept(file: Path) -> None:
    file.write_bytes(b"small")
    assert digests.sha256_of([file]) == named(b"small")
    assert notes(file) == []


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"state": 1}', "\xff"])
def test_notes_that_cannot_be_read_are_none(file: Path, damage: str) -> None:
    digests.sha256_of([file])
    (note,) = notes(file)
    note.write_bytes(damage.encode("latin-1"))
    assert digests.sha256_of([file]) == named(CONTENT)


def test_without_a_place_to_keep_them(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # no directory
    assert digests.sha256_of([file]) == named(CONTENT)


def test_long_reading_says_how_far_it_is(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(digests, "TOLD_BYTES", 1000)
    monkeypatch.setattr(digests, "READ_BYTES", 100)
    digests.sha256_of([file])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 11
    assert "once" in said[0]
    assert "50%" in said[5]
    caplog.clear()
    digests.sha256_of([file])
    assert caplog.records == []
