"""Reads what a compiled CUDA kernel uses, from its ELF file (cubin): registers, local and shared memory, instructions.

Sections and attributes as `cuobjdump -elf` and `-res-usage` name them, instructions as `nvdisasm -hex` does; the tests
hold what both say of a kernel of each kind.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

INSTRUCTIONS = {
    0x1F0: "HGMMA",  # warpgroup tensor core, 16-bit floats; one opcode whether the left operand is in registers or not
    0x1F1: "IGMMA",  # the same, int8
    0x1F3: "QGMMA",  # the same, fp8
    0x03C: "HMMA",  # warp tensor core, 16-bit and TF32 floats
    0x037: "IMMA",
    0x183: "LDL",  # load from local memory: spilled registers, or an array that registers could not hold
    0x187: "STL",
    0x181: "LDG",  # load from device memory
    0x186: "STG",
    0x184: "LDS",  # load from shared memory
    0x188: "STS",
    0x1AE: "LDGSTS",  # cp.async: from device memory to shared memory
    0x1B4: "UTMALDG",  # TMA: a tile, likewise
    0x1B5: "UTMASTG",
    0x1BA: "UBLKCP",  # a block of bytes, likewise
}
"""By the low 9 bits of an instruction; the 3 above them say where its operands are."""

_REGISTERS, _FRAME_BYTES, _THREADS, _STACK_BYTES = 0x2F, 0x11, 0x10, 0x12  # EIATTR_*


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What one kernel of a cubin uses."""

    name: str
    registers: int
    """Of each thread."""
    threads: int | None
    """Of each block; None where the kernel leaves it to its launch."""
    stack_bytes: int
    """Local memory of each thread. A hot kernel has none: it lies in device memory."""
    static_shared_bytes: int
    dynamic_shared_bytes: int | None
    """Asked for at launch; None where unknown."""
    instructions: Mapping[str, int]
    """How many of those named in `INSTRUCTIONS` its code has; they are not counted as often as they run."""

    @property
    def spills(self) -> int:
        """Instructions that touch local memory."""
        return self.instructions.get("STL", 0) + self.instructions.get("LDL", 0)

    @property
    def shared_bytes(self) -> int | None:
        """Of each block, as far as known."""
        return None if self.dynamic_shared_bytes is None else self.static_shared_bytes + self.dynamic_shared_bytes

    @property
    def has_wgmma(self) -> bool:
        """Whether it runs on the tensor cores a warpgroup at a time."""
        return any(self.instructions.get(name) for name in ("HGMMA", "IGMMA", "QGMMA"))


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    data: bytes
    size: int


def read_cubin(code: bytes, dynamic_shared_bytes: int | None = None) -> list[KernelReport]:
    """A report on each kernel of a cubin; bytes may follow it. Raises `ValueError` if it is none."""
    sections = {section.name: section for section in _sections(code)}
    symbols = _symbols(sections)
    of_all: dict[tuple[str, int], int] = {}
    for attribute, value in _attributes(sections[".nv.info"].data if ".nv.info" in sections else b""):
        if attribute in (_REGISTERS, _FRAME_BYTES, _STACK_BYTES) and len(value) == 8:
            symbol, number = struct.unpack("<2I", value)
            of_all[symbols[symbol], attribute] = number
    found: list[KernelReport] = []
    for name, section in sections.items():
        if not name.startswith(".text.") or f".nv.info.{name[6:]}" not in sections:
            continue
        kernel = name[6:]
        own = dict(_attributes(sections[f".nv.info.{kernel}"].data))
        shared = sections.get(f".nv.shared.{kernel}")
        found.append(
            KernelReport(
                name=kernel,
                registers=of_all[kernel, _REGISTERS],
                threads=_product(own[_THREADS]) if _THREADS in own else None,
                stack_bytes=max(of_all.get((kernel, _FRAME_BYTES), 0), of_all.get((kernel, _STACK_BYTES), 0)),
                static_shared_bytes=0 if shared is None else shared.size,
                dynamic_shared_bytes=dynamic_shared_bytes,
                instructions=_instructions(section.data),
            )
        )
    return found


def _instructions(code: bytes) -> Mapping[str, int]:
    """By name; each instruction is 16 bytes."""
    return Counter(
        INSTRUCTIONS[word & 0x1FF]
        for (word,) in struct.iter_unpack("<H14x", code[: len(code) // 16 * 16])
        if word & 0x1FF in INSTRUCTIONS
    )


def _sections(elf: bytes) -> Iterator[_Section]:
    if elf[:4] != b"\x7fELF" or elf[4] != 2:
        raise ValueError("no ELF file of 64 bits")
    (at,) = struct.unpack_from("<Q", elf, 40)
    size, count, names_index = struct.unpack_from("<3H", elf, 58)
    headers = [struct.unpack_from("<2I4Q", elf, at + size * index) for index in range(count)]
    names_at = headers[names_index][4]
    for name, kind, _, _, offset, length in headers:
        start = names_at + name
        no_bits = kind == 8  # only a size, such as that of shared memory
        data = b"" if no_bits else elf[offset : offset + length]
        yield _Section(elf[start : elf.index(b"\0", start)].decode(), data, length)


def _symbols(sections: Mapping[str, _Section]) -> list[str]:
    names = sections[".strtab"].data
    return [
        names[name : names.index(b"\0", name)].decode()
        for (name,) in struct.iter_unpack("<I20x", sections[".symtab"].data)
    ]


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Attributes of a `.nv.info` section: a format, a number, and a value whose size follows only format 4."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<2BH", info, at)
        at += 4
        if form != 4:
            yield attribute, info[at - 2 : at]
            continue
        yield attribute, info[at : at + size]
        at += size


def _product(values: bytes) -> int:
    product = 1
    for (value,) in struct.iter_unpack("<I", values):
        product *= value
    return product
