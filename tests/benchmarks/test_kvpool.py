"""The pool's benchmark at small sizes: what it measures is what it says, whatever the figures are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mcjax.errors import BlockCorrupt
from mcjax.kvpool.stores.host import HostStore
from mcjax.transfer.transports.local import Local

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

SMALL = ["--rounds", "2", "--batch", "4", "--block-bytes", "4096"]
SIZES = ["--pool-blocks", "1024", "--directory-blocks", "3000", "--nodes", "6", "--calls", "40"]


def test_host_pool_directory_and_eviction(tmp_path: Path) -> None:
    parts = ["host", "pool", "directory", "eviction"]
    command = [sys.executable, str(BENCHMARKS / "kvpool.py"), *parts, *SMALL, *SIZES, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    (row,) = results["host"]["rows"]
    assert row["block_bytes"] == 4096
    assert set(row["sides"]) == {
        "memcpy in",
        "memcpy out",
        *(f"{way} {kind}" for way in ("put", "get") for kind in ("verified", "unverified")),
    }
    assert results["pool"]["books"]["blocks"] == 1024
    assert results["directory"]["nodes"] == 6
    assert 2900 < results["directory"]["blocks"] <= 3000
    assert {one["name"] for one in results["eviction"]["rows"]} >= {"lru"}
    assert all(results[part]["command"].startswith("python benchmarks/kvpool.py host") for part in parts)
    for line in ("| 4 KiB | put verified |", "bytes a block", "| `lru` |", "match, pin and release 256 blocks"):
        assert line in done.stdout
    assert (tmp_path / "kvpool.png").stat().st_size > 0


@pytest.mark.check_long
def test_ssd_beside_fio_if_it_is_there(tmp_path: Path, module) -> None:
    ssd = module("kvpool_ssd")
    part = ssd.run(tmp_path, module("kvpool").parsed(["ssd", *SMALL]))
    (row,) = part["rows"]
    assert row["slot_bytes"] == 2 * 4096
    ours = {"put", "get unverified", "get verified"}
    theirs = set() if part["why"] else {f"fio {way}, {engine}" for way in ("write", "read") for engine in ssd.ENGINES}
    assert set(row["sides"]) == ours | theirs
    assert all((row["sides"][name]["ratio"] is None) == bool(part["why"]) for name in ours)
    assert not list(tmp_path.glob("kvpool-*")), "what was written is gone"


def test_without_fio_ssd_is_measured_alone_and_says_why(tmp_path: Path, module, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    part = module("kvpool_ssd").run(tmp_path, module("kvpool").parsed(["ssd", *SMALL]))
    assert "not installed" in part["why"]
    results = {"ssd": {"command": "c", "load": 1.0, **part}}
    assert "fio was not measured: it is not installed" in module("kvpool_tables").tables(results)


@pytest.mark.check_long
def test_encodings_on_the_built_in_model(tmp_path: Path, module, capsys) -> None:
    encodings = module("kvpool_encodings")
    assert encodings.main(["--model", "tiny", "--prompts", "2", "--steps", "2", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "encodings.json").read_text())["encodings"]
    assert set(found) == {"int8", "fp8"}
    for one in found.values():
        assert one["positions"] == 4
        assert 0 < one["relative_rms_error"] < 1
        assert 0 <= one["greedy_agreement"] <= 1
    assert found["int8"]["relative_rms_error"] < found["fp8"]["relative_rms_error"]
    assert "| `fp8` |" in capsys.readouterr().out


@pytest.mark.check_long
def test_no_encoding_is_no_error(module) -> None:
    encodings = module("kvpool_encodings")
    prompts = encodings.prompts_for("tiny", 1)
    found = encodings.measured("tiny", prompts, 2, ["none"])["encodings"]["none"]
    assert (found["largest_error"], found["greedy_agreement"], found["same_answers"]) == (0.0, 1.0, 1)


def test_put_and_get_move_the_bytes_and_verify_them(module) -> None:
    way_module = module("kvpool_way")
    outside, store = HostStore("node", 3, 64, "outside"), HostStore("node", 3, 64)
    way_module.random_bytes(outside, 1)
    before = outside.buffer().copy()
    local = Local()
    way = way_module.Way(store, outside, [local], [7, 8, 9])
    way.put(True)
    outside.buffer()[:] = 0
    way.get(True)
    np.testing.assert_array_equal(outside.buffer(), before)
    store.buffer()[way.slots()[1]][0] ^= 1
    way.get(False)
    with pytest.raises(BlockCorrupt):
        way.get(True)
    way.forget()
    assert store.taken_slots == 0
    local.close()
    way.close()


def test_memcpy_copies_the_rows_it_is_given(module) -> None:
    source, target = HostStore("node", 3, 100, "a").buffer(), HostStore("node", 3, 100, "b").buffer()
    source[:] = np.arange(300).reshape(3, 100) % 251
    module("kvpool_way").copied(source, [0, 2], target, [1, 0])
    np.testing.assert_array_equal(target, [source[2], source[0], np.zeros(100)])


def test_a_missing_mooncake_is_named_with_its_extra(module, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(module("measure").BenchmarkError, match=r"mcjax\[peers\].*libibverbs1"):
        module("kvpool_peers").run(tmp_path, module("kvpool").parsed(["peers"]))


def test_unknown_parts_are_refused(module, capsys) -> None:
    with pytest.raises(SystemExit):
        module("kvpool").parsed(["disk"])
    assert "no part disk; there are host," in capsys.readouterr().err
