"""What controller and worker say to each other: one frame a message, plain JSON with raw buffers behind it. No pickles.

    magic (4 bytes) | header bytes (u32) | body bytes (u64) | header: [kind, values, [bytes of each buffer]] | buffers

The socket belongs to the two processes alone. All the same nothing that arrives is taken on trust: sizes are bounded
before memory is, and a frame that is not one ends the conversation.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from mcjax.errors import McjaxError

MAGIC = b"mcj1"
HEAD = struct.Struct(">4sIQ")
MOST_HEADER_BYTES = 64 << 20
MOST_BODY_BYTES = 1 << 30


class FrameBroken(McjaxError):
    """Bytes that are no frame."""


@dataclass(frozen=True, slots=True)
class Message:
    """`values` are plain JSON; `buffers` are bytes that would not go well into it."""

    kind: str
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    buffers: Sequence[bytes] = ()


def encode(message: Message) -> bytes:
    """The message as one frame. Raises `FrameBroken` for one that is too long, which no reader would take."""
    sizes = [len(buffer) for buffer in message.buffers]
    header = json.dumps([message.kind, message.values, sizes], separators=(",", ":")).encode()
    _check_sizes(len(header), sum(sizes))
    return b"".join((HEAD.pack(MAGIC, len(header), sum(sizes)), header, *message.buffers))


class Frames:
    """Cuts what arrives into messages, wherever the pieces begin and end."""

    def __init__(self) -> None:
        self._arrived = bytearray()

    def feed(self, piece: bytes) -> list[Message]:
        """The messages that are complete with this piece. Raises `FrameBroken`; nothing more can be read then."""
        self._arrived += piece
        found: list[Message] = []
        while len(self._arrived) >= HEAD.size:
            magic, header_bytes, body_bytes = HEAD.unpack_from(self._arrived)
            if magic != MAGIC:
                raise FrameBroken(f"a frame begins with {magic!r}")
            _check_sizes(header_bytes, body_bytes)
            end = HEAD.size + header_bytes + body_bytes
            if len(self._arrived) < end:
                break
            whole = bytes(memoryview(self._arrived)[HEAD.size : end])
            del self._arrived[:end]
            found.append(_decode(whole[:header_bytes], whole[header_bytes:]))
        return found


def _check_sizes(header_bytes: int, body_bytes: int) -> None:
    if header_bytes > MOST_HEADER_BYTES or body_bytes > MOST_BODY_BYTES:
        raise FrameBroken(f"a frame of {header_bytes} + {body_bytes} bytes")


def _decode(header: bytes, body: bytes) -> Message:
    try:
        read = json.loads(header)
    except (ValueError, RecursionError) as problem:
        raise FrameBroken(f"a header that is no JSON: {problem}") from None
    parts = cast("list[Any]", read) if isinstance(read, list) else []
    if len(parts) != 3 or not isinstance(parts[0], str) or not isinstance(parts[1], dict):
        raise FrameBroken("a header that is not [kind, values, sizes]")
    kind, values, sizes = cast("tuple[str, dict[str, Any], Any]", tuple(parts))
    if not isinstance(sizes, list) or any(type(size) is not int or size < 0 for size in cast("list[Any]", sizes)):
        raise FrameBroken("sizes that are not whole numbers")
    counts = cast("list[int]", sizes)
    if sum(counts) != len(body):
        raise FrameBroken(f"buffers of {sum(counts)} bytes in a body of {len(body)}")
    buffers: list[bytes] = []
    start = 0
    for count in counts:
        buffers.append(body[start : start + count])
        start += count
    return Message(kind, values, tuple(buffers))
