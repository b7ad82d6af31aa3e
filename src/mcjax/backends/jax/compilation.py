"""What is known about compiling: the persistent cache, and who compiled anything after the warm-up was over."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import threading
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
from jax.experimental.compilation_cache import compilation_cache

from mcjax import aio
from mcjax.errors import ConfigError
from mcjax.types import Recorder

AUTO = "auto"
COMPILED = "/jax/core/compile/backend_compile_duration"
"""JAX's own event: a program was made ready, by its compiler or from the cache."""

_logger = logging.getLogger(__name__)


def use_cache(where: str | None) -> Path | None:
    """Keep compiled programs in a folder that outlives the process; the folder, or None for no such cache.

    `auto` is `$XDG_CACHE_HOME/mcjax/xla` (`~/.cache` without that variable), unless JAX was told of a cache already; a
    home that cannot be written to means no cache. A folder of one's own must be writable. Inside lies a folder for each
    kind of processor, since XLA compiles for this one's instructions. JAX itself tells programs of other versions and
    flags apart, and compiles anew what it cannot read. It holds for the whole process.
    """
    if where is None:
        return None
    told = jax.config.values["jax_compilation_cache_dir"]
    if told and where == AUTO:
        return Path(told)
    root = _user_folder() if where == AUTO else Path(where).expanduser()
    folder = root / _processor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")
    except OSError as problem:
        if where == AUTO:
            _logger.warning("compiled programs are not kept: %s", problem)
            return None
        raise ConfigError("backend.compilation_cache", where, f"cannot be used: {problem}", [AUTO, "null"]) from problem
    if told != str(folder):
        compilation_cache.reset_cache()  # else the folder in use stays the first one
        jax.config.update("jax_compilation_cache_dir", str(folder))
    # Many small programs make a start slow, not only the large ones.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


class Watch:
    """Notices every program that anybody in this process makes ready while it is sealed, hidden ones of JAX too.

    Each is warned of, counted, and recorded: as an event of kind `compile`, and as an outcome of the mechanism of that
    name, since no procedure of a replay would make the event.
    """

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._lock = threading.Lock()
        self._clock: aio.Clock | None = None
        self._recorded = 0
        self.late: list[str] = []
        """Names of the programs that came after the seal, in order."""

    def seal(self, clock: aio.Clock) -> None:
        """From now on all programs should be there; others are recorded by the loop of this clock."""
        with self._lock:
            if self._clock is None:
                jax.monitoring.register_event_duration_secs_listener(self._heard)
                self._clock = clock

    def close(self) -> None:
        """Watch no longer."""
        with self._lock:
            if self._clock is not None:
                jax.monitoring.unregister_event_duration_listener(self._heard)
                self._clock = None

    def _heard(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        """On whatever thread it was that compiled."""
        if event != COMPILED:
            return
        name = str(kwargs.get("fun_name", "a program"))
        name = name.removeprefix("jit(").removesuffix(")")
        thread = threading.current_thread().name
        _logger.warning("compiled after warm-up: %s, %.2f s on thread %s", name, duration_secs, thread)
        with self._lock:
            self.late.append(name)
            if self._clock is not None:
                place = thread.removeprefix("mcjax-") if thread.startswith("mcjax-") else ""
                with contextlib.suppress(RuntimeError):  # the loop has ended: the count remains
                    self._clock.post(self._record, self._clock, name, place, duration_secs)

    def _record(self, clock: aio.Clock, name: str, place: str, seconds: float) -> None:
        payload = {"what": name, "place": place, "seconds": seconds}
        self._recorder.outcome(clock.now_ns(), "compile", self._recorded, payload)
        self._recorded += 1
        self._recorder.event(clock.now_ns(), "compile", -1, place, detail=name)


def _user_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path("~/.cache").expanduser()) / "mcjax" / "xla"


def _processor() -> str:
    """A name for the processor's instructions; code made for others may not run here."""
    flags = ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features", "model name")):
                flags += line
            elif not line:  # the first processor stands for all
                break
    except OSError:
        flags = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:12]}"
