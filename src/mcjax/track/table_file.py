"""A table that grows on disk while its run goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mcjax.track.arrow import Table, arrow, give_back
from mcjax.track.digest import TableDigest
from mcjax.track.tables import writer

ROW_GROUP_BYTES = 4 << 20
"""Pieces wait until they hold so many bytes: larger row groups compress better, smaller ones take less memory."""


class TableFile:
    """Writes pieces to `NAME.parquet.part`, which `finish` renames. Keeps the digest of what it was given.

    An error in writing is raised at once and again by every later call: no row is lost without a word.
    """

    def __init__(self, name: str, directory: Path):
        self.digest = TableDigest(name)
        self.nbytes = 0
        """Written so far."""
        self._name = name
        self._path = directory / f"{name}.parquet"
        self._part = directory / f"{name}.parquet.part"
        self._waiting: list[Table] = []
        self._waiting_bytes = 0
        self._writer: Any = None
        self._problem: OSError | None = None

    def take(self, piece: Table, kept: Table) -> None:
        """`kept` is what to write of `piece`: all of it, or its rows and cells that a lower level keeps."""
        self.digest.add(piece)
        self._waiting.append(kept)
        self._waiting_bytes += kept.nbytes
        if self._waiting_bytes >= ROW_GROUP_BYTES:
            self._write()

    def finish(self) -> None:
        """Write what waits, and close the file; it now has its name. An empty table of outcomes is left out."""
        if self._waiting or self._name != "outcomes":
            self._write()
        if self._writer is not None:
            self._writer.close()
            os.replace(self._part, self._path)

    def _write(self) -> None:
        if self._problem is not None:
            raise self._problem
        try:
            if self._writer is None:
                self._writer = writer(self._name, self._part)
            if self._waiting:
                self._writer.write_table(arrow().concat_tables(self._waiting))
                self.nbytes = self._part.stat().st_size
        except OSError as problem:
            self._problem = problem
            raise
        self._waiting.clear()
        give_back()
        self._waiting_bytes = 0
