"""A drawn picture and the numbers in it, saved together."""

from __future__ import annotations

import base64
import csv
import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcjax.errors import ConfigError
from mcjax.track.arrow import Table
from mcjax.track.plots.style import styled

SUFFIXES = (".pdf", ".png", ".svg")
PRINT_DPI, SCREEN_DPI = 300, 150


@dataclass(frozen=True, slots=True)
class Drawn:
    """A `matplotlib.figure.Figure`, and the plotted numbers as a `pyarrow.Table`, low and high ends of bands too."""

    figure: Any = field(repr=False)
    data: Table = field(repr=False)
    kind: str = ""
    title: str = ""
    note: str = field(default="", repr=False)
    """What the picture shows, how it is read, and what its bands are."""
    missing: Sequence[str] = ()
    """Runs that should be in the picture, and are not."""

    def save(self, path: str | Path, dpi: int = PRINT_DPI) -> tuple[Path, Path]:
        """Write the picture (PDF, PNG or SVG by its suffix) and, beside it, its numbers as CSV. Returns both paths.

        Raises `ConfigError` for another suffix, or a place that cannot be written.
        """
        picture = Path(path)
        if picture.suffix not in SUFFIXES:
            raise ConfigError("out", path, "its suffix says what is written", SUFFIXES)
        numbers = picture.with_suffix(".csv")
        try:
            picture.parent.mkdir(parents=True, exist_ok=True)
            picture.write_bytes(self._bytes(picture.suffix[1:], dpi))
            numbers.write_text(self.csv(), encoding="utf-8", newline="")
        except OSError as problem:
            raise ConfigError("out", path, f"cannot be written: {problem.strerror or problem}") from problem
        return picture, numbers

    def csv(self) -> str:
        """The plotted numbers, with a head line; what is not there is empty."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.data.column_names)
        columns = [column.to_pylist() for column in self.data.columns]
        writer.writerows([_cell(value) for value in row] for row in zip(*columns, strict=True))
        return text.getvalue()

    def svg(self, transparent: bool = False) -> str:
        """As SVG; `transparent` leaves the paper out."""
        return self._bytes("svg", PRINT_DPI, transparent).decode()

    def png(self, dpi: int = SCREEN_DPI) -> bytes:
        return self._bytes("png", dpi)

    def _bytes(self, form: str, dpi: int, transparent: bool = False) -> bytes:
        # Without dates: the same runs give the same file.
        metadata = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {"Software": None}}[form]
        file = io.BytesIO()
        with styled():
            self.figure.savefig(file, format=form, dpi=dpi, metadata=metadata, transparent=transparent)
        return file.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png()

    def _repr_html_(self) -> str:
        width_px = round(96 * self.figure.get_size_inches()[0] * 1.3)
        picture = base64.b64encode(self.png(2 * SCREEN_DPI)).decode()
        return (
            f"<img alt='{html.escape(self.title, quote=True)}' width='{width_px}' "
            f"src='data:image/png;base64,{picture}'><p><small>{html.escape(self.note)}</small></p>"
        )


def _cell(value: Any) -> Any:
    return "" if value is None or (isinstance(value, float) and not math.isfinite(value)) else value
