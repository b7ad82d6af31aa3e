"""The directory a run leaves behind: written piece by piece, marked RUNNING, then DONE or FAILED, never two of them."""

from __future__ import annotations

import errno
import itertools
import json
import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from mcjax.track import tables as table_files
from mcjax.track.arrow import Table
from mcjax.track.record import FILE, RunRecord
from mcjax.track.redaction import redact
from mcjax.track.schemas import SCHEMAS
from mcjax.track.state import DONE, FAILED, RUNNING
from mcjax.track.summary import finite


class RunDirectory:
    """Writes one run. Nothing it writes holds the value of a secret environment variable.

    A process that is killed leaves RUNNING, which names its host and process id.
    """

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def create(cls, base: Path, name: str = "") -> RunDirectory:
        """Make `base/NAME`, dated unless named (`2025-11-29_15-32-10`, with `-2` and so on if taken), marked RUNNING.

        A name that is given is used as it is; an earlier run in it is never overwritten, the next free suffix is taken.
        """
        started = datetime.now().astimezone()
        stem = name or started.strftime("%Y-%m-%d_%H-%M-%S")
        base.mkdir(parents=True, exist_ok=True)
        marker = {"pid": os.getpid(), "host": socket.gethostname(), "started": started.isoformat(timespec="seconds")}
        hidden = base / f".{uuid.uuid4().hex}.new"
        hidden.mkdir()
        (hidden / RUNNING).write_text(json.dumps(marker) + "\n", encoding="utf-8")
        for count in itertools.count(1):
            path = base / (stem if count == 1 else f"{stem}-{count}")
            if path.exists():
                continue
            try:
                os.rename(hidden, path)  # so that there never is a run directory without a marker
            except OSError as problem:
                if problem.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                continue  # somebody was quicker
            return cls(path)
        raise AssertionError("there is always a next number")

    def write_config(self, config: Mapping[str, Any]) -> None:
        """`config.yaml`; `config` is resolved and plain (mappings, lists, scalars)."""
        import yaml

        self._replace("config.yaml", yaml.safe_dump(redact(config), sort_keys=False, allow_unicode=True))

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """`environment.json`, as `environment.describe` makes it."""
        self._replace("environment.json", _json(environment))

    def write_record(self, record: RunRecord) -> RunRecord:
        """`run.json`. Returns what was written: the record without secrets."""
        kept = replace(record, argv=tuple(redact(list(record.argv))), config=finite(redact(record.config)))
        self._replace(FILE, kept.text())
        return kept

    def write_sources(self, sources: Mapping[str, str]) -> None:
        """The user's own code, below `strategies/`."""
        for name, text in sources.items():
            path = self.path / "strategies" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(redact(text), encoding="utf-8")

    def write_tables(self, tables: Mapping[str, Table]) -> None:
        table_files.write(tables, self.path)

    def remove_tables(self) -> None:
        """The tables, of a run that has its summary by now."""
        for name in SCHEMAS:
            (self.path / f"{name}.parquet").unlink(missing_ok=True)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        self._replace("summary.json", _json(summary))

    def done(self) -> None:
        """Everything is written: one rename turns RUNNING into DONE."""
        os.replace(self.path / RUNNING, self.path / DONE)

    def failed(self, reason: str) -> None:
        """The run ended early; FAILED holds the reason."""
        self._replace(RUNNING, redact(reason).rstrip() + "\n")
        os.replace(self.path / RUNNING, self.path / FAILED)

    def _replace(self, name: str, text: str) -> None:
        """Write a whole file or none: a reader never sees half of one."""
        temporary = self.path / f".{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, self.path / name)


def now() -> str:
    """The time of day, to the second, with its zone."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(finite(redact(value)), indent=2, allow_nan=False, default=str) + "\n"
