"""Perfetto's trace format, as far as a run needs it: tracks, slices, instants and counters with arguments and flows.

A trace is a protobuf `Trace` of `TracePacket`s, one behind the other, so that a file of any length is written as it
comes; the reader sorts packets by time. Only a dozen fields are needed: written by hand they take no dependency, and
the tests read them back with Perfetto's own descriptors. Field numbers are those of `trace_packet.proto`,
`track_event.proto`, `track_descriptor.proto`, `counter_descriptor.proto`, `debug_annotation.proto` and
`interned_data.proto` in Perfetto's `protos/perfetto/trace`.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterable, Mapping
from typing import BinaryIO, TypeAlias

Value: TypeAlias = "bool | int | float | str | Arguments"
Arguments: TypeAlias = Mapping[str, Value]

SLICE_BEGIN, SLICE_END, INSTANT, COUNTER = 1, 2, 3, 4
"""`TrackEvent.Type`"""

SEQUENCE = 1
STATE_CLEARED, NEEDS_STATE = 1, 2
"""`TracePacket.SequenceFlags`: interned names begin anew, are needed."""

EXPLICIT = 3
"""`TrackDescriptor.ChildTracksOrdering`: children stand in the order of their ranks."""


def varint(value: int) -> bytes:
    """A number from 0 to 2^64 - 1."""
    if value < 0x80:
        return bytes((value,))
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def number(field: int, value: int) -> bytes:
    """An integer, enumeration or boolean. Negative ones are written as 64 bits of two's complement."""
    return varint(field << 3) + varint(value & 0xFFFF_FFFF_FFFF_FFFF)


def fixed64(field: int, value: int) -> bytes:
    return varint(field << 3 | 1) + struct.pack("<Q", value)


def double(field: int, value: float) -> bytes:
    return varint(field << 3 | 1) + struct.pack("<d", value)


def nested(field: int, content: bytes) -> bytes:
    """A message, a text in UTF-8, or bytes."""
    return varint(field << 3 | 2) + varint(len(content)) + content


def text(field: int, value: str) -> bytes:
    return nested(field, value.encode(errors="replace"))


class PacketWriter:
    """Writes packets to `file`. Times are nanoseconds; tracks are known by the numbers that `track` returns.

    `flows` are numbers: each ties the slices and instants that bear it, one after the other in order of their begin.
    """

    def __init__(self, file: BinaryIO | gzip.GzipFile):
        self._file = file
        self._tracks = 0
        self._words: dict[tuple[int, str], int] = {}
        self._new_words: list[bytes] = []
        """Interned since the last packet, which the next one explains."""
        self._flags = STATE_CLEARED | NEEDS_STATE

    def track(self, name: str, parent: int = 0, rank: int = 0, unit: str | None = None) -> int:
        """A new track below `parent` (0: at the top). With a unit, which may be "", it is one of values over time.

        Tracks of one name below one parent are shown as one: slices that overlap are given to several.
        """
        self._tracks += 1
        parts = [number(1, self._tracks), text(2, name), number(11, EXPLICIT)]
        parts += [number(5, parent)] if parent else []
        parts += [number(12, rank)] if rank else []
        parts += [nested(8, text(6, unit))] if unit is not None else []
        self._file.write(nested(1, nested(60, b"".join(parts)) + _ON_SEQUENCE))
        return self._tracks

    def begin(
        self, track: int, name: str, time_ns: int, category: str, arguments: Arguments, flows: Iterable[int] = ()
    ) -> None:
        """A slice begins; it may do so within another one of its track, and must then end within it."""
        self._event(time_ns, SLICE_BEGIN, track, self._body(name, category, arguments, flows))

    def end(self, track: int, time_ns: int) -> None:
        """The slice of the track that began last ends."""
        self._event(time_ns, SLICE_END, track)

    def instant(
        self, track: int, name: str, time_ns: int, category: str, arguments: Arguments, flows: Iterable[int] = ()
    ) -> None:
        """Something that took no time."""
        self._event(time_ns, INSTANT, track, self._body(name, category, arguments, flows))

    def value(self, track: int, time_ns: int, value: float) -> None:
        """What a counter shows from now on."""
        self._event(time_ns, COUNTER, track, double(44, value))

    def _body(self, name: str, category: str, arguments: Arguments, flows: Iterable[int]) -> bytes:
        parts = [text(23, name), number(3, self._word(1, category))]
        parts += [nested(4, self._argument(word, value)) for word, value in arguments.items()]
        parts += [fixed64(47, flow) for flow in flows]
        return b"".join(parts)

    def _argument(self, word: str, value: Value) -> bytes:
        name = number(1, self._word(3, word))
        if isinstance(value, str):
            return name + text(6, value)
        if isinstance(value, bool):
            return name + number(2, value)
        if isinstance(value, int):
            return name + number(4, value)
        if isinstance(value, float):
            return name + double(5, value)
        return name + b"".join([nested(11, self._argument(inner, of_inner)) for inner, of_inner in value.items()])

    def _word(self, kind: int, word: str) -> int:
        """The number that stands for a word that comes often; `kind` is its field in `InternedData`."""
        found = self._words.get((kind, word))
        if found is None:
            found = self._words[kind, word] = len(self._words) + 1
            self._new_words.append(nested(kind, number(1, found) + text(2, word)))
        return found

    def _event(self, time_ns: int, kind: int, track: int, body: bytes = b"") -> None:
        parts = [number(8, time_ns), _ON_SEQUENCE, number(13, self._flags)]
        if self._new_words:
            parts.append(nested(12, b"".join(self._new_words)))
            self._new_words.clear()
        parts.append(nested(11, number(9, kind) + number(11, track) + body))
        self._file.write(nested(1, b"".join(parts)))
        self._flags = NEEDS_STATE


_ON_SEQUENCE = number(10, SEQUENCE)
