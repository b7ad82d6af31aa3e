"""Names for the content of large files: their sha256, computed once and kept. Free of jax.

Weights are named by every byte that they have, so that equal files have equal names on every machine; but 140 GB are
not read again at each start. What was computed lies in `$XDG_CACHE_HOME/mcjax/digests` (`~/.cache` if unset), for the
file of this path, device, inode, size and times of change: who alters a file without altering those is not found out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

KEPT_BYTES = 64 << 20
"""Files from this size on are remembered; others are read again, which takes no time."""
TOLD_BYTES = 2 << 30
"""Reading so much takes long enough to say so."""
SETTLED_NS = 2_000_000_000
"""A file that changed just now may change again within the resolution of its clock."""
READ_BYTES = 8 << 20

_logger = logging.getLogger(__name__)


def sha256_of(files: Iterable[Path]) -> list[str]:
    """Hex sha256 of each, from memory where it is kept. Raises `OSError`."""
    wanted = [file.resolve() for file in files]
    found = [_kept(file) for file in wanted]
    left = sum(file.stat().st_size for file, digest in zip(wanted, found, strict=True) if digest is None)
    progress = _Progress(left)
    return [digest or _read(file, progress) for file, digest in zip(wanted, found, strict=True)]


class _Progress:
    """Says how far it is at every tenth, where that takes long."""

    def __init__(self, total: int):
        self._total, self._done, self._told = total, 0, 0
        if total >= TOLD_BYTES:
            _logger.warning("reading %.1f GB of weights to name their content; this is done once", total / 1e9)

    def add(self, size: int) -> None:
        self._done += size
        if self._total >= TOLD_BYTES and self._done * 10 // self._total > self._told:
            self._told = self._done * 10 // self._total
            _logger.warning("%d%% of %.1f GB read", self._told * 10, self._total / 1e9)


def _read(file: Path, progress: _Progress) -> str:
    before = _state(file)
    digest = hashlib.sha256()
    room = memoryview(bytearray(READ_BYTES))
    with file.open("rb", buffering=0) as opened:
        while size := opened.readinto(room):
            digest.update(room[:size])
            progress.add(size)
    result = digest.hexdigest()
    _, _, size, changed_ns, status_ns = before
    settled = time.time_ns() - max(changed_ns, status_ns) > SETTLED_NS
    if size >= KEPT_BYTES and settled and _state(file) == before:
        _keep(file, before, result)
    return result


def _state(file: Path) -> list[int]:
    status = file.stat()
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _place(file: Path) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "mcjax" / "digests" / f"{hashlib.sha256(os.fsencode(file)).hexdigest()}.json"


def _kept(file: Path) -> str | None:
    """What is kept of the file as it is now. A note that cannot be read is none."""
    state = _state(file)
    if state[2] < KEPT_BYTES:
        return None
    try:
        note = json.loads(_place(file).read_text(encoding="utf-8"))
        same = note["state"] == state and len(note["sha256"]) == 64
        return str(note["sha256"]) if same else None
    except (OSError, ValueError, LookupError, TypeError, RuntimeError):
        return None


def _keep(file: Path, state: list[int], digest: str) -> None:
    # Where it cannot be written, the file is read again next time.
    with contextlib.suppress(OSError, RuntimeError):
        place = _place(file)
        place.parent.mkdir(parents=True, exist_ok=True)
        ours = place.with_suffix(f".{os.getpid()}")
        ours.write_text(json.dumps({"file": str(file), "state": state, "sha256": digest}), encoding="utf-8")
        ours.replace(place)
