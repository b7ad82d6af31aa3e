"""Trace files: where they are, what they hash to, and lines of JSON and CSV whose errors say file, line and field."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from mcjax.errors import ConfigError, TraceError
from mcjax.types import NS_PER_S

MAX_TOKENS = 2**31 - 1
NS_PER_MS = 1_000_000
MAX_SECONDS = 2**62 // NS_PER_S


OTHER_NAMES: Mapping[str, str] = {
    "conversation_trace.jsonl": "mooncake_fast25_conversation.jsonl",
    "synthetic_trace.jsonl": "mooncake_fast25_synthetic.jsonl",
}
"""Published names of traces, and those under which collections of traces keep them."""


def places(path: Path) -> list[Path]:
    """Where a file that a config names may lie: as given, below `$MCJAX_TRACES`, below `./traces`; by either name."""
    traces = os.environ.get("MCJAX_TRACES")
    folders = [] if path.is_absolute() else [*([Path(traces)] if traces else []), Path("traces")]
    names = [path, *([Path(OTHER_NAMES[str(path)])] if str(path) in OTHER_NAMES else [])]
    return [path, *(folder / name for folder in folders for name in names)]


def find(path: str, source: str, folder: bool | None = False, key: str = "workload.path") -> Path:
    """The file (or folder; None: either) that `path` means: as given, or under `$MCJAX_TRACES`, or under `./traces`.

    Raises `ConfigError` that lists every place tried, and `source`: where such files come from.
    """
    candidates = places(Path(path).expanduser())
    for candidate in candidates:
        if (folder is not True and candidate.is_file()) or (folder is not False and candidate.is_dir()):
            return candidate
    tried = ", ".join(str(candidate) for candidate in candidates)
    kind = {False: "file", True: "folder", None: "file or folder"}[folder]
    unset = "" if os.environ.get("MCJAX_TRACES") else " (MCJAX_TRACES, a folder to look in, is not set)"
    raise ConfigError(key, path, f"no such {kind}; tried {tried}{unset}. {source}")


def contents(path: Path, key: str = "workload.path") -> tuple[list[bytes], str]:
    """The lines of a file and its sha256. Raises `ConfigError` if it cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise ConfigError(key, str(path), f"cannot be read: {problem.strerror}") from problem
    return data.splitlines(), hashlib.sha256(data).hexdigest()


def opened(path: str, source: str) -> tuple[list[bytes], str, dict[str, str]]:
    """The lines of the file that `path` means, its name for errors, and its sha256 as `Workload.inputs` has it."""
    found = find(path, source)
    lines, sha256 = contents(found)
    return lines, str(found), {str(found): sha256}


def shown(value: object) -> str:
    """A value as an error shows it: short."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


class JsonObject:
    """A JSON object of a trace under examination. It knows where it is, for the errors; `within`: as a part of what."""

    def __init__(self, path: str, number: int, fields: dict[str, Any], within: str = ""):
        self.path = path
        self.number: int = number
        self.fields = fields
        self._within = within

    def error(self, name: str, problem: str) -> TraceError:
        return TraceError(self.path, self.number, self._within + name, problem)

    def value(self, name: str) -> Any:
        if name not in self.fields:
            there = ", ".join(self.fields) or "nothing"
            raise self.error(name, f"is missing; there is {there if len(there) <= 100 else f'{there[:97]}...'}")
        return self.fields[name]

    def whole(self, name: str, least: int, most: int = MAX_TOKENS) -> int:
        """A whole number, of tokens if nothing else is said."""
        value = self.value(name)
        if type(value) is not int:
            raise self.error(name, f"must be a whole number, not {shown(value)}")
        if not least <= value <= most:
            raise self.error(name, f"must lie in {least} .. {most}, not {shown(value)}")
        return value

    def seconds_ns(self, name: str) -> int:
        """Seconds in the file, rounded to nanoseconds."""
        return self._time_ns(name, NS_PER_S, "seconds")

    def milliseconds_ns(self, name: str) -> int:
        """Milliseconds in the file; fractions, which generated traces have, are rounded to nanoseconds."""
        return self._time_ns(name, NS_PER_MS, "milliseconds")

    def _time_ns(self, name: str, unit_ns: int, unit: str) -> int:
        value = self.value(name)
        if type(value) not in (int, float):
            raise self.error(name, f"must be a number of {unit}, not {shown(value)}")
        most = MAX_SECONDS * NS_PER_S // unit_ns
        if not 0 <= value <= most:  # also refuses NaN
            raise self.error(name, f"must lie in 0 .. {most} {unit}, not {shown(value)}")
        return round(value * unit_ns)

    def wholes(self, name: str, most: int) -> list[int]:
        """A list of whole numbers in `0 .. most`."""
        value = self.value(name)
        if not isinstance(value, list):
            raise self.error(name, f"must be a list of whole numbers, not {shown(value)}")
        entries = cast("list[Any]", value)
        for entry in entries:
            if type(entry) is not int or not 0 <= entry <= most:
                raise self.error(name, f"must hold whole numbers in 0 .. {most}, not {shown(entry)}")
        return entries

    def text(self, name: str, default: str) -> str:
        """A string, or `default` where the field is absent or null."""
        value = self.fields.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, not {shown(value)}")
        return value

    def objects(self, name: str) -> list[JsonObject]:
        """A list of objects."""
        value = self.value(name)
        if not isinstance(value, list):
            raise self.error(name, f"must be a list of objects, not {shown(value)}")
        found: list[JsonObject] = []
        for index, entry in enumerate(cast("list[Any]", value)):
            if not isinstance(entry, dict):
                raise self.error(f"{name}[{index}]", f"must be an object, not {shown(entry)}")
            fields = cast("dict[str, Any]", entry)
            found.append(JsonObject(self.path, self.number, fields, f"{self._within}{name}[{index}]."))
        return found


class JsonLine(JsonObject):
    """One line of a JSONL file, or a file that is one object."""

    def __init__(self, path: str, number: int, line: bytes):
        super().__init__(path, number, {})
        try:
            parsed = json.loads(line.decode())
        except RecursionError:
            raise self.error("line", "is nested too deeply") from None
        except json.JSONDecodeError as problem:
            self.number += problem.lineno - 1  # a file that is one object has it over many lines
            wrong = f"is not JSON ({problem.msg} at column {problem.colno}); it must be one JSON object"
            raise self.error("line", wrong) from None
        except ValueError as problem:  # bad UTF-8, a number with thousands of digits
            raise self.error("line", f"is not JSON ({problem})") from None
        if not isinstance(parsed, dict):
            raise self.error("line", f"must be a JSON object, not {type(parsed).__name__}")
        self.fields = cast("dict[str, Any]", parsed)


def json_lines(lines: Iterable[bytes], path: str) -> Iterator[JsonLine]:
    """The lines that are not blank."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield JsonLine(path, number, line)


class CsvLine:
    """One line of a CSV file under examination: fields by the header's names."""

    def __init__(self, path: str, number: int, fields: dict[str, str]):
        self.path = path
        self.number: int = number
        self.fields = fields

    def error(self, name: str, problem: str) -> TraceError:
        return TraceError(self.path, self.number, name, problem)

    def text(self, name: str) -> str:
        return self.fields[name].strip()

    def whole(self, name: str, least: int) -> int:
        text = self.text(name)
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise self.error(name, f"must be a whole number, not {shown(text)}")
        if not least <= int(text) <= MAX_TOKENS:
            raise self.error(name, f"must lie in {least} .. {MAX_TOKENS}, not {text}")
        return int(text)

    def number_of(self, name: str, most: float) -> float:
        """A number in `0 .. most`."""
        text = self.text(name)
        try:
            value = float(text)
        except ValueError:
            raise self.error(name, f"must be a number, not {shown(text)}") from None
        if not 0 <= value <= most:  # also refuses NaN
            raise self.error(name, f"must lie in 0 .. {most:g}, not {shown(text)}")
        return value


def csv_lines(
    lines: Iterable[bytes], path: str, needed: Sequence[str], header: Sequence[str] | None = None
) -> Iterator[CsvLine]:
    """The data lines of a CSV file that has at least the columns `needed`; blank lines are passed over.

    `header` names the columns of a file that has no header line of its own. Raises `TraceError`.
    """
    names = list(header) if header is not None else None
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            cells = [cell for row in csv.reader([text], strict=True) for cell in row]
        except (UnicodeDecodeError, csv.Error) as problem:
            raise TraceError(path, number, "line", f"is not CSV ({problem})") from None
        if not any(cell.strip() for cell in cells):
            continue
        if names is None:
            names = [cell.strip() for cell in cells]
            for name in needed:
                if name not in names:
                    raise TraceError(path, number, name, f"is not in the header, which has {shown(','.join(names))}")
            continue
        if len(cells) != len(names):
            raise TraceError(path, number, "line", f"has {len(cells)} fields, not {len(names)}")
        yield CsvLine(path, number, dict(zip(names, cells, strict=True)))
