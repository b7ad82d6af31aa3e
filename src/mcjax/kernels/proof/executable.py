"""Finds the machine code of GPU kernels inside the bytes of a serialized XLA executable.

XLA stores an executable as protocol buffers in a Riegeli record file (one inside the other in newer releases), mostly
compressed by Snappy. Both are small enough to read here, so no package is needed for them:
https://github.com/google/riegeli/blob/master/doc/riegeli_records_file_format.md,
https://github.com/google/snappy/blob/main/format_description.txt. Of the protocol buffers only the wire format is read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

ELF = b"\x7fELF"
CUDA_MACHINE = 190
"""`e_machine` of an ELF file of CUDA code; beside it, Mosaic GPU stores host code as ELF too."""

_RECORD_FILE = bytes.fromhex("83af70d10d884a3f")  # how every Riegeli file begins: the hash of its first header
_BLOCK_BYTES, _BLOCK_HEADER_BYTES, _CHUNK_HEADER_BYTES = 1 << 16, 24, 40

Fields = dict[int, list["int | bytes"]]
Parents = tuple[tuple[int, Fields], ...]
"""The messages around a field, outermost first, each with the number of the field that leads inwards."""


@dataclass(frozen=True, slots=True)
class EmbeddedCubin:
    """CUDA code (an ELF file), and what of its launch only the executable says."""

    code: bytes
    dynamic_shared_bytes: int | None
    """Shared memory asked for at launch; None where the executable does not say it in a way that is read here."""


def cubins(executable: bytes) -> Iterator[EmbeddedCubin]:
    """All CUDA code in what `LoadedExecutable.serialize` of a GPU executable gave.

    Raises `ValueError` if it is no such thing, or is compressed by something else.
    """
    if _RECORD_FILE not in executable:
        raise ValueError("no Riegeli record file inside: not an executable as XLA serializes them")
    for record in _records(executable[executable.index(_RECORD_FILE) :]):
        if _RECORD_FILE in record and record.startswith(_RECORD_FILE):
            yield from cubins(record)
        elif record.startswith(ELF):  # what XLA itself compiled for the program as a whole
            if _machine(record) == CUDA_MACHINE:
                yield EmbeddedCubin(record, None)
        elif ELF in record:
            yield from _embedded(record, ())


def _embedded(message: bytes, parents: Parents) -> Iterator[EmbeddedCubin]:
    fields: Fields = {}
    for number, value in _fields(message):
        fields.setdefault(number, []).append(value)
    for number, values in fields.items():
        path = (*parents, (number, fields))
        for value in values:
            if not isinstance(value, bytes) or ELF not in value:
                continue
            if not value.startswith(ELF):
                yield from _embedded(value, path)
            elif _machine(value) == CUDA_MACHINE:
                yield EmbeddedCubin(value, _dynamic_shared_bytes(path))
            else:
                for code in _within_host_code(value):
                    yield EmbeddedCubin(code, None)


def _dynamic_shared_bytes(path: Parents) -> int | None:
    """Of a `CustomKernelProto` (its sixth field, around two levels of `KernelLoaderSpecProto`) or Mosaic's resources.

    Triton-lowered kernels are the former. Mosaic GPU says it from jax 0.12 on; before, only its host code knows.
    """
    numbers = tuple(number for number, _ in path)
    if numbers[-3:] == (2, 2, 1):
        return _number(path[-3][1].get(6, [0])[-1])
    if numbers[-1:] == (8,):
        return _number(path[-1][1].get(10, [0])[-1])
    return None


def _number(value: int | bytes) -> int | None:
    return value if isinstance(value, int) else None


def _within_host_code(host: bytes) -> Iterator[bytes]:
    at = host.find(ELF, 1)
    while at >= 0:
        code = host[at:]
        if _machine(code) == CUDA_MACHINE:
            yield code
        at = host.find(ELF, at + 1)


def _machine(elf: bytes) -> int:
    return int(struct.unpack_from("<H", elf, 18)[0])


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers and values of a protocol buffer, messages and strings as bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(message, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"no protocol buffer: a field of wire type {kind}")
        yield key >> 3, message[at : at + size]
        at += size


def _records(file: bytes) -> Iterator[bytes]:
    """The records of a Riegeli file that more bytes may follow."""
    at = 0
    while at + _CHUNK_HEADER_BYTES <= len(file):
        header, at = _without_block_headers(file, at, _CHUNK_HEADER_BYTES)
        _, size, _, kind_and_count, _ = struct.unpack("<5Q", header)
        kind, count = chr(kind_and_count & 0xFF), kind_and_count >> 8
        if kind not in "smpr":
            return  # what follows the file; a transposed chunk, which XLA does not write, would end it too
        chunk, at = _without_block_headers(file, at, size)
        if kind == "r":
            yield from _chunk_records(chunk, count)


def _without_block_headers(file: bytes, at: int, size: int) -> tuple[bytes, int]:
    parts: list[bytes] = []
    while size > 0:
        if at % _BLOCK_BYTES == 0:
            at += _BLOCK_HEADER_BYTES
        take = min(size, _BLOCK_BYTES - at % _BLOCK_BYTES)
        parts.append(file[at : at + take])
        at, size = at + take, size - take
    return b"".join(parts), at


def _chunk_records(chunk: bytes, count: int) -> Iterator[bytes]:
    compression = chr(chunk[0])
    size, at = _varint(chunk, 1)
    sizes, values = chunk[at : at + size], chunk[at + size :]
    if compression == "s":
        sizes, values = (snappy_decoded(part[_varint(part, 0)[1] :]) for part in (sizes, values))
    elif compression != "\0":
        raise ValueError(f"records compressed by Riegeli's {compression!r}, of which only none and Snappy are read")
    at = begin = 0
    for _ in range(count):
        size, at = _varint(sizes, at)
        yield values[begin : begin + size]
        begin += size


def snappy_decoded(data: bytes) -> bytes:
    """What raw Snappy data stands for."""
    size, at = _varint(data, 0)
    out = bytearray()
    while at < len(data):
        tag = data[at]
        at += 1
        if tag & 3 == 0:  # literal
            count = tag >> 2
            if count >= 60:
                extra = count - 59
                count = int.from_bytes(data[at : at + extra], "little")
                at += extra
            out += data[at : at + count + 1]
            at += count + 1
            continue
        if tag & 3 == 1:
            count, back = (tag >> 2 & 7) + 4, tag >> 5 << 8 | data[at]
            at += 1
        else:
            width = 2 if tag & 3 == 2 else 4
            count, back = (tag >> 2) + 1, int.from_bytes(data[at : at + width], "little")
            at += width
        start = len(out) - back
        while count > 0:  # a copy may overlap what it makes
            part = out[start : start + count]
            out += part
            start, count = start + len(part), count - len(part)
    if len(out) != size:
        raise ValueError(f"Snappy data of {len(out)} bytes that says {size}")
    return bytes(out)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
