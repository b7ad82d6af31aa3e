"""How a run stands, from the marker in its directory: `done`, `failed`, `running`, or `killed`."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from mcjax.errors import RunError

RUNNING, DONE, FAILED = "RUNNING", "DONE", "FAILED"
MARKERS = (RUNNING, DONE, FAILED)


def marker_of(directory: Path) -> str:
    """The one marker. Raises `RunError` for what has none, or several."""
    if not directory.is_dir():
        raise RunError(f"{directory}: no such directory")
    found = [marker for marker in MARKERS if (directory / marker).exists()]
    if len(found) != 1:
        raise RunError(f"{directory}: no run directory (it needs exactly one of {', '.join(MARKERS)}, found {found})")
    return found[0]


def state_of(directory: Path) -> tuple[str, str]:
    """`("done", "")`, or another state with what is known of it: why a run failed, who runs it. `("", "")`: no run."""
    if os.path.exists(f"{directory}/{DONE}"):  # nearly all; thousands are asked for a list
        return "done", ""
    try:
        marker = marker_of(directory)
    except RunError:
        return "", ""
    if marker == DONE:  # since the first look
        return "done", ""
    try:
        note = (directory / marker).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        note = ""
    if marker == FAILED:
        return "failed", note
    return who(note)


def who(note: str) -> tuple[str, str]:
    """Whether it is `running` or was `killed`, and who runs (or ran) it, from what RUNNING says."""
    try:
        owner = json.loads(note)
        host, pid = str(owner["host"]), int(owner["pid"])
    except (ValueError, KeyError, TypeError):
        return "killed", "its marker RUNNING is damaged"
    if host != socket.gethostname():
        return "running", f"running or killed: process {pid} on {host}"
    if _alive(pid):
        return "running", f"process {pid} is running it"
    return "killed", f"process {pid}, which ran it, was killed"


def _alive(pid: int) -> bool:
    """A process that has ended counts as dead also where nobody has asked how (in containers, whose first process may
    take care of no orphans)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # no such files on this system
        return True
    return state not in ("Z", "X")
