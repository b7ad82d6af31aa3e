"""Reads ServeGen client files: rates and burstiness by ten minutes, length distributions by six hours."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import ConfigError, TraceError
from mcjax.workload.files import MAX_SECONDS, MAX_TOKENS, contents, csv_lines, shown

COLUMNS = ("window start", "rate", "cv", "family", "family argument 1", "family argument 2")
FAMILIES = {"Gamma": "gamma", "Weibull": "weibull", "": ""}
NAME = re.compile(r"chunk-(\d+)-trace\.csv")
QUANTITIES = ("input_tokens", "output_tokens")
MAX_RATE_PER_S = 1e6
MIN_SHAPE = 0.01


@dataclass(frozen=True, slots=True)
class Window:
    """Traffic of one client in `[start_s, end_s)`. `family` is "" without traffic; `shape` is that of unit gaps."""

    start_s: float
    end_s: float
    rate_per_s: float
    family: str
    shape: float


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """`values` (`[V]` tokens) and their cumulative probabilities (`[V]`, the last is 1)."""

    values: NDArray[np.int64]
    cumulative: NDArray[np.float64]

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        return self.values[np.searchsorted(self.cumulative, rng.random(count), side="right")]


class Client:
    """One client's files, checked; distributions are parsed when their window is first asked for."""

    def __init__(self, number: int, windows: list[Window], path: str, lengths: Mapping[int, Mapping[str, str]]):
        self.number = number
        self.windows = windows
        self._path = path
        self._texts = lengths
        self._starts = sorted(lengths)
        self._parsed: dict[tuple[int, str], Distribution | None] = {}

    def lengths(self, time_s: float, quantity: str) -> Distribution:
        """The distribution in force at `time_s`. Where its window is empty: the nearest earlier one, else later one.

        Raises `TraceError` if there is none at all.
        """
        past = [start for start in self._starts if start <= time_s]
        for start in [*reversed(past), *self._starts[len(past) :]]:
            found = self._distribution(start, quantity)
            if found is not None:
                return found
        raise TraceError(self._path, 1, quantity, "the client has traffic, but no window has lengths")

    def _distribution(self, start: int, quantity: str) -> Distribution | None:
        place = (start, quantity)
        if place not in self._parsed:
            text = self._texts[start][quantity]
            self._parsed[place] = parse_distribution(text, self._path, f"{start}.{quantity}")
        return self._parsed[place]


def parse_distribution(text: str, path: str, field: str) -> Distribution | None:
    """A `{value: probability, ...}` literal; None if it is empty. Raises `TraceError`; nothing is ever evaluated."""
    try:
        parsed = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as problem:
        raise TraceError(path, 1, field, f"is no literal ({type(problem).__name__}): {shown(text)}") from None
    if not isinstance(parsed, dict):
        raise TraceError(path, 1, field, f"must be a {{value: probability}} literal, not {shown(parsed)}")
    entries = cast("dict[Any, Any]", parsed)
    for value, share in entries.items():
        if type(value) is not int or not 0 <= value <= MAX_TOKENS:
            raise TraceError(path, 1, field, f"values must be whole numbers of tokens, not {shown(value)}")
        if type(share) not in (int, float) or not 0 <= share <= 1:
            raise TraceError(path, 1, field, f"probabilities must lie in 0 .. 1, not {shown(share)}")
    if not entries:
        return None
    values = sorted(entries)
    shares = np.array([entries[value] for value in values], np.float64)
    total = float(shares.sum())
    if not 0.99 < total < 1.01:
        raise TraceError(path, 1, field, f"probabilities add up to {total:.4g}, not 1")
    cumulative = np.cumsum(shares / total)
    cumulative[-1] = 1.0  # above every draw, whatever the rounding
    return Distribution(np.array(values, np.int64), cumulative)


def parse_windows(lines: Iterable[bytes], path: str) -> list[Window]:
    """Windows in order of time; each ends where the next begins, the last is as long as the one before."""
    rows: list[tuple[float, float, str, float]] = []
    for line in csv_lines(lines, path, COLUMNS, header=COLUMNS):
        start_s = line.number_of("window start", MAX_SECONDS)
        if rows and start_s <= rows[-1][0]:
            raise line.error("window start", f"{start_s:g} s is not after {rows[-1][0]:g} s")
        rate_per_s = line.number_of("rate", MAX_RATE_PER_S)
        line.number_of("cv", float("inf"))
        family = line.text("family")
        if family not in FAMILIES:
            raise line.error("family", f"must be one of {', '.join(filter(None, FAMILIES))}, or empty, not {family!r}")
        shape = line.number_of("family argument 1", 1e6)
        if family and rate_per_s > 0 and shape < MIN_SHAPE:
            raise line.error(
                "family argument 1", f"is the shape of the gaps and must be {MIN_SHAPE} or more, not {shape:g}"
            )
        rows.append((start_s, rate_per_s, FAMILIES[family], shape))
    if not rows:
        raise TraceError(path, 1, "window start", "the file holds no rows")
    starts = [row[0] for row in rows]
    ends = [*starts[1:], starts[-1] + (starts[-1] - starts[-2] if len(starts) > 1 else 600.0)]
    return [Window(row[0], end, *row[1:]) for row, end in zip(rows, ends, strict=True)]


def parse_lengths(data: bytes, path: str) -> dict[int, dict[str, str]]:
    """Window start (s) to quantity to the text of its distribution. Raises `TraceError`."""
    try:
        parsed = json.loads(data.decode())
    except RecursionError:
        raise TraceError(path, 1, "file", "is nested too deeply") from None
    except ValueError as problem:
        raise TraceError(path, getattr(problem, "lineno", 1), "file", f"is not JSON ({problem})") from None
    if not isinstance(parsed, dict) or not parsed:
        raise TraceError(path, 1, "file", "must be a JSON object with at least one window")
    lengths: dict[int, dict[str, str]] = {}
    for key, window in cast("dict[str, Any]", parsed).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 12):
            raise TraceError(path, 1, shown(key), "must be a window start in whole seconds")
        if not isinstance(window, dict):
            raise TraceError(path, 1, key, f"must be an object, not {shown(window)}")
        quantities = cast("dict[str, Any]", window)
        for quantity in QUANTITIES:
            if not isinstance(quantities.get(quantity), str):
                raise TraceError(path, 1, f"{key}.{quantity}", "must be a string that holds a distribution")
        lengths[int(key)] = {quantity: quantities[quantity] for quantity in QUANTITIES}
    return lengths


def read_clients(folder: Path, chosen: list[int] | None) -> tuple[list[Client], dict[str, str]]:
    """The chosen clients (all if None) of a folder in order of their numbers, and the sha256 of every file read."""
    matches = [NAME.fullmatch(path.name) for path in folder.iterdir()]
    there = sorted(int(match[1]) for match in matches if match is not None)
    if not there:
        raise ConfigError("workload.path", str(folder), "holds no chunk-N-trace.csv")
    missing = [number for number in chosen or [] if number not in there]
    if missing:
        raise ConfigError("workload.clients", missing, "no such client in the folder", there)
    clients: list[Client] = []
    inputs: dict[str, str] = {}
    for number in there if chosen is None else sorted(chosen):
        trace, dataset = folder / f"chunk-{number}-trace.csv", folder / f"chunk-{number}-dataset.json"
        lines, inputs[str(trace)] = contents(trace)
        pieces, inputs[str(dataset)] = contents(dataset)
        windows = parse_windows(lines, str(trace))
        clients.append(Client(number, windows, str(dataset), parse_lengths(b"\n".join(pieces), str(dataset))))
    return clients, inputs
