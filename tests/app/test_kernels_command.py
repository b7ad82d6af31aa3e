"""`mcjax kernels`: limits of one device's share, what a measured file adds, the roofline, and refusals by key."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mcjax.app.kernels.command import command
from mcjax.app.kernels.rows import time_text
from mcjax.cost.kernel_cases import KernelCase, device_heads
from mcjax.cost.kernel_timings import VERSION, KernelTiming, read
from mcjax.errors import ConfigError

H200 = ("model=llama3-8b", "hardware=h200x8")
ONE = (*H200, "hardware.count=1")


def kernels_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    assert command([*arguments, "--json"]) == 0
    return {row["kernel"]: row for row in json.loads(capsys.readouterr().out)["kernels"]}


def test_limits_are_flops_and_bytes_over_the_peaks_of_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    rows = kernels_of(capsys, *ONE, "context_tokens=16384", "batch=8")
    prefill, decode, pack, unpack = (rows[name] for name in ("prefill", "decode", "kv_pack", "kv_unpack"))
    assert prefill["flops"] == 16_384 * 16_385 // 2 * 4 * 32 * 128
    assert prefill["limit_s"] == prefill["compute_s"] == prefill["flops"] / 989e12
    assert prefill["bound_by"] == "compute"
    assert decode["read_bytes"] == 8 * (16_384 * 4096 + 32 * 128 * 2)
    assert decode["limit_s"] == decode["memory_s"] == decode["bytes"] / 4.8e12
    assert decode["bound_by"] == "memory"
    assert decode["flops_per_byte"] == decode["flops"] / decode["bytes"]
    assert pack["read_bytes"] == pack["written_bytes"] == 16_384 * 131_072  # the KV of the whole context
    assert (pack["flops"], pack["calls"], prefill["calls"], decode["calls"]) == (0, 1, 32, 32)
    assert unpack["bytes"] == pack["bytes"]
    assert all(row["achieved"] == [] for row in rows.values())


def test_tensor_parallel_devices_share_heads_and_copy_what_is_too_few(capsys: pytest.CaptureFixture[str]) -> None:
    whole, eighth, sixteenth = (kernels_of(capsys, *H200, f"hardware.count={count}", "batch=4") for count in (1, 8, 16))
    assert whole["decode"]["flops"] == 8 * eighth["decode"]["flops"] == 16 * sixteenth["decode"]["flops"]
    assert whole["decode"]["bytes"] == 8 * eighth["decode"]["bytes"]
    assert eighth["kv_pack"]["bytes"] == sixteenth["kv_pack"]["bytes"]  # eight key heads: two devices hold each


def test_a_models_windows_and_latents_have_their_own_rows(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("hardware=h200x8", "hardware.count=1", "context_tokens=8192", "batch=1")
    assert command(["model=gemma3-27b", *sizes, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["kernels"]
    decode = {row["case"]["window"]: row for row in rows if row["kernel"] == "decode"}
    assert {window: row["calls"] for window, row in decode.items()} == {None: 10, 1024: 52}
    assert decode[None]["flops"] == 8 * decode[1024]["flops"]
    latent = kernels_of(capsys, "model=deepseek-v3", *sizes)
    assert latent["kv_pack"]["read_bytes"] == 8192 * 61 * 576 * 2
    assert latent["decode"]["flops"] == 8192 * 2 * 128 * (576 + 512)


def test_sizes_reach_their_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    keys = "context_tokens=32768 chunk_tokens=2048 query_tokens=4 batch=2 page_tokens=16 kv_dtype=int8".split()
    rows = kernels_of(capsys, *ONE, *keys, "block_dtype=bfloat16", "window=4096", "soft_cap=true")
    assert rows["prefill"]["case"]["sequences"] == [[1, 30_720, 2048]]
    assert rows["decode"]["case"]["sequences"] == [[2, 32_768, 4]]
    assert rows["prefill"]["flops"] == 2048 * 4096 * 4 * 32 * 128  # a whole window each
    assert rows["prefill"]["exponentials"] == 2 * 2048 * 4096 * 32
    assert rows["kv_pack"]["case"]["pages"] == 2048
    assert rows["kv_pack"]["read_bytes"] == 32_768 * 32 * 2 * 8 * (128 + 4)
    assert rows["kv_pack"]["written_bytes"] == 32_768 * 131_072
    assert rows["kv_unpack"]["read_bytes"] == rows["kv_pack"]["written_bytes"]


def test_the_table_says_what_it_is_of_and_that_nothing_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert command([*H200, "batch=64", "kv_dtype=float8_e4m3fn"]) == 0
    out = capsys.readouterr().out
    assert "one of 8 devices, tensor-parallel: 4 query and 1 key head of 128" in out
    assert "pages of 64 tokens, float8_e4m3fn" in out
    assert out.count("not measured") == 4
    assert "64 x 1 token, context 8,192" in out


def test_on_a_terminal_it_is_a_table_with_the_same_cells(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    assert command([*ONE]) == 0
    out = capsys.readouterr().out
    assert "─" in out
    assert out.count("not measured") == 4


@pytest.fixture
def measured(tmp_path: Path) -> dict[str, Any]:
    """What the benchmark leaves: decode twice as slow as its limit, by us; and by another."""
    case = KernelCase("decode", 32, 8, 128, 64, sequences=((32, 8192, 1),))
    bytes_ = case.cost().bytes
    timings = [
        KernelTiming(case, "mcjax", bytes_ / 2.4e12, (bytes_ / 2.5e12, bytes_ / 2.0e12)).values(),
        KernelTiming(case, "cudnn", bytes_ / 1.2e12, (bytes_ / 1.2e12, bytes_ / 1.2e12)).values(),
    ]
    about = {"accelerator": "H200-SXM5-141GB", "device": "NVIDIA H200", "date": "a day", "versions": {"jax": "0"}}
    return {"gpu_kernels": {"version": VERSION, "interpreted": False, **about, "timings": timings}}


def written(folder: Path, content: Any) -> str:
    path = folder / "results.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_what_was_measured_stands_beside_the_limit_of_the_same_case_only(
    measured: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, measured)
    rows = kernels_of(capsys, *ONE, "--measured", path)
    ours, theirs = rows["decode"]["achieved"]
    assert (ours["implementation"], theirs["implementation"]) == ("mcjax", "cudnn")
    assert ours["of_limit"] == pytest.approx(0.5)
    assert ours["bytes_per_s"] == pytest.approx(2.4e12)
    assert rows["prefill"]["achieved"] == []
    for other in ("page_tokens=32", "kv_dtype=int8", "window=8192"):
        assert kernels_of(capsys, *ONE, other, "--measured", path)["decode"]["achieved"] == [], other
    assert command([*ONE, "--measured", path]) == 0
    out = capsys.readouterr().out
    assert ", 50%; cudnn" in out
    assert "Measured on NVIDIA H200, a day (jax 0)" in out


def test_the_roofline_shows_limits_and_what_was_reached(
    measured: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "roofline.svg"
    assert command([*ONE, "--measured", written(tmp_path, measured), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"<?xml")
    assert f"picture: {picture}" in capsys.readouterr().out
    assert command([*ONE, "--plot", str(tmp_path / "nowhere" / "r.png")]) == 2
    assert "--plot=" in capsys.readouterr().err


MISTAKES = [
    ("contxt_tokens=3", "contxt_tokens=3: mcjax kernels takes no such key, did you mean context_tokens; allowed"),
    ("batch=1 batch=2", "batch=2: is there twice"),
    ("something", "something=: mcjax kernels takes no such key"),
    ("batch=0", "batch=0: must be 1 to"),
    ("batch=many", "batch=many: must be a whole number"),
    ("page_tokens=1e3", "page_tokens=1e3: must be a whole number"),
    ("context_tokens=99999999999999", "context_tokens=99999999999999: must be 1 to"),
    ("chunk_tokens=8193", "chunk_tokens=8193: is more than context_tokens=8192"),
    ("query_tokens=8193", "query_tokens=8193: is more than context_tokens=8192"),
    ("kv_dtype=int4", "kv_dtype=int4: is no dtype of pages or blocks, did you mean int8; allowed: float32, bfloat16"),
    ("block_dtype=fp8", "block_dtype=fp8: is no dtype of pages or blocks"),
    ("soft_cap=30", "soft_cap=30: must be true or false"),
    ("hardware.count=3", "hardware.count=3: cannot share the 32 query heads of llama3-8b evenly"),
    ("model.kv_dtype_bytes=1", "kv_dtype=: which one, of 1 bytes a number; allowed"),
    ("model.dtype_bytes=3", "model.dtype_bytes=3: no dtype of queries has so many bytes"),
    ("model=llama3-9b", "llama3-9b"),
    ("hardware.peak_flops=0", "hardware.peak_flops=0: must be positive"),
]


@pytest.mark.parametrize(("word", "told"), MISTAKES)
def test_a_mistake_is_told_by_its_key(capsys: pytest.CaptureFixture[str], word: str, told: str) -> None:
    given = [one for one in ONE if one.partition("=")[0] != word.partition("=")[0]]
    assert command([*given, *word.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda whole: "nothing", "cannot be read"),
        (lambda whole: {}, "is no file of benchmarks/gpu_kernels.py"),
        (lambda whole: [], "is no file of benchmarks/gpu_kernels.py"),
        (lambda whole: whole["gpu_kernels"].update(version=99) or whole, "version 99, this mcjax reads version"),
        (lambda whole: whole["gpu_kernels"].update(interpreted=True) or whole, "was written in interpret mode"),
        (lambda whole: whole["gpu_kernels"].update(accelerator="CPU") or whole, "was measured on CPU, and hardware=h2"),
        (lambda whole: whole["gpu_kernels"]["timings"][0].update(seconds=0) or whole, "are no times"),
        (lambda whole: whole["gpu_kernels"]["timings"][0]["case"].update(kernel="sort") or whole, "no case of prefill"),
        (lambda whole: whole["gpu_kernels"]["timings"][0]["case"].update(kv_dtype="int4") or whole, "int4 is none of"),
        (lambda whole: whole["gpu_kernels"]["timings"][0]["case"].update(other=1) or whole, "a case has block_dtype"),
        (lambda whole: whole["gpu_kernels"]["timings"][0].update(case=3) or whole, "a case has block_dtype"),
    ],
)
def test_a_file_that_says_nothing_of_this_device_is_refused(
    measured: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, told: str
) -> None:
    path = written(tmp_path, change(measured))
    assert command([*ONE, "--measured", path]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"mcjax: --measured={path}: ")
    assert told in error
    assert error.count("\n") == 1


def test_a_missing_file_says_who_writes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file; benchmarks/gpu_kernels\.py writes one"):
        read(str(tmp_path / "results.json"))


def test_a_case_comes_back_from_its_values() -> None:
    for case in (
        KernelCase("prefill", 8, 2, 64, 16, "float32", "int8", ((2, 0, 5), (1, 7, 1)), window=3, soft_cap=True),
        KernelCase("kv_unpack", 8, 2, 64, 16, kv_dtype="bfloat16", layers=4, pages=9, block_dtype="int8"),
    ):
        assert KernelCase.of_values(json.loads(json.dumps(case.values()))) == case


def test_heads_of_a_device_divide_or_are_refused() -> None:
    from mcjax.cost.catalogue import model

    assert device_heads(model("llama3-70b"), 8) == (8, 1)
    assert device_heads(model("llama3-70b"), 32) == (2, 1)
    assert device_heads(model("smollm2"), 3) == (3, 1)
    with pytest.raises(ConfigError, match="query heads"):
        device_heads(model("smollm2"), 2)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0"),
        (1.5e-12, "0.00150 ns"),
        (5.4e-7, "540 ns"),
        (9.999e-7, "1.00 us"),
        (0.0123, "12.3 ms"),
        (7200, "7,200 s"),
    ],
)
def test_times_have_three_digits_and_a_unit(seconds: float, text: str) -> None:
    assert time_text(seconds) == text
