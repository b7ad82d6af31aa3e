"""Safetensors files that are damaged: anywhere and anyhow, it is an error that names the file, and takes no memory."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize
from safetensors.numpy import save

from mcjax.errors import ConfigError
from mcjax.models.safetensors_directory import SafetensorsDirectory
from mcjax.models.safetensors_header import read_header

TENSORS = {
    "model.a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "model.b": np.arange(5, dtype=np.float16),
    "model.c": np.ones((2, 0), np.float32),
    "d": np.array(3, np.float32),
    "e": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
}
GOOD = save(TENSORS, {"format": "pt"})
HEADER_END = 8 + int.from_bytes(GOOD[:8], "little")


def opened(path: Path, content: bytes) -> SafetensorsDirectory | None:
    """None: refused, by file. Anything else that goes wrong is raised."""
    (path / "model.safetensors").write_bytes(content)
    try:
        directory = SafetensorsDirectory(path)
        for name in directory.names:
            np.asarray(directory.tensor(name)).sum()
    except ConfigError as refused:
        problem = str(refused)
    else:
        return directory
    assert "model.safetensors" in problem
    assert len(problem) < 600
    return None


def file_of(header: Any, data: bytes = b"") -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_what_safetensors_writes_is_read(tmp_path: Path) -> None:
    directory = opened(tmp_path, GOOD)
    assert directory is not None
    assert sorted(directory.names) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        found = directory.tensor(name)
        assert found.dtype == tensor.dtype
        np.testing.assert_array_equal(found, tensor)
    directory.forget()
    np.testing.assert_array_equal(directory.tensor("model.a"), TENSORS["model.a"])


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    for size in range(len(GOOD)):
        assert opened(tmp_path, GOOD[:size]) is None, size
    assert opened(tmp_path, GOOD + b"\0") is None


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, HEADER_END - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_in_the_header_end_in_nothing_worse(place: Path, changes: list[tuple[int, int]]) -> None:
    content = bytearray(GOOD)
    for at, byte in changes:
        content[at] = byte
    tracemalloc.start()
    directory = opened(place, bytes(content))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    if directory is None:
        return
    # What we take, the library takes too, and finds the same bytes.
    theirs = dict(deserialize(bytes(content)))
    assert sorted(directory.names) == sorted(theirs)
    for name, said in theirs.items():
        assert list(directory.shape(name)) == said["shape"]
        assert directory.tensor(name).tobytes() == bytes(said["data"])


A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"GGUF", "it has 4 bytes"),
        ((2**63).to_bytes(8, "little"), "its header would have 9223372036854775808 bytes"),
        ((50).to_bytes(8, "little") + b"{}", "would end at byte 58 of 10"),
        (file_of("[" * 100_000), "is no JSON"),
        (file_of("[]"), "no JSON object"),
        ((1).to_bytes(8, "little") + b"\xff", "no JSON"),
        (file_of('{"a": {"shape": 1e999}}'), "a lacks a dtype"),
        (file_of({"a": 1}), "a is not described"),
        (file_of({"a": {**A, "shape": {}}}, bytes(8)), "a lacks a dtype, a shape"),
        (file_of({"a": {**A, "shape": [-2]}}, bytes(8)), "a lacks a dtype, a shape"),
        (file_of({"a": {**A, "shape": [2**62, 4]}}, bytes(8)), "of F32, has 8 bytes"),
        (file_of({"a": {**A, "shape": [True, 2]}}, bytes(8)), "a lacks"),
        (file_of({"a": {**A, "data_offsets": [8, 0]}}, bytes(8)), "a ends before it begins"),
        (file_of({"a": {**A, "data_offsets": [4, 12]}}, bytes(12)), "a begins at byte"),
        (file_of({"a": A, "b": A}, bytes(8)), "b begins at byte"),
        (file_of({"a": A}, bytes(4)), "its tensors end at byte"),
        (file_of({"a": A}, bytes(16)), "its tensors end at byte"),
        (file_of('{"a": %s, "a": %s}' % ((json.dumps(A),) * 2), bytes(8)), "has the tensor a twice"),
        (file_of('{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 8]}}' % ("9" * 5000)), "no JSON"),
    ],
)  # fmt: skip
def test_headers_that_cannot_be_right(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"model\.safetensors: is no safetensors file, or a damaged one.*{message}"):
        SafetensorsDirectory(tmp_path)


def test_a_tensor_of_a_dtype_that_nobody_knows_is_refused_when_asked_for(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(file_of({"a": {**A, "dtype": "F6_E2M3"}}, bytes(8)))
    directory = SafetensorsDirectory(tmp_path)
    with pytest.raises(ConfigError, match=r"its tensor a is of dtype F6_E2M3.*allowed: F32, F16, BF16"):
        directory.tensor("a")


def test_the_header_alone_is_read() -> None:
    assert read_header(memoryview(GOOD))["d"].shape == ()
