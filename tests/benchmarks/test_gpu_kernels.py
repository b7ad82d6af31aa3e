"""The GPU kernels' benchmark on a CPU: every path by the interpreter, what it says of wrong numbers, what it keeps."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mcjax.cost.kernel_cases import KernelCase
from mcjax.cost.kernel_timings import read
from mcjax.errors import ConfigError
from mcjax.kernels.decode.reference import decode
from mcjax.kernels.pages import KVPages
from mcjax.kernels.prefill.reference import prefill
from mcjax.kernels.target import Target

SMALL: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 8, "page_tokens": 4}
DECODE = KernelCase("decode", sequences=((2, 9, 1),), dtype="float32", kv_dtype="float32", **SMALL)
PREFILL = KernelCase("prefill", sequences=((1, 3, 6),), dtype="float32", kv_dtype="float32", **SMALL)


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())["gpu_kernels"]


@pytest.mark.check_long
@pytest.mark.timeout(400)  # it compiles a dozen interpreted kernels
def test_every_path_works_under_the_interpreter(module, tmp_path: Path, capsys) -> None:
    """Bodies that can be interpreted compute what the reference does; what cannot be had is a row that says so."""
    assert module("gpu_kernels").main(["--interpret", "--quick", "--out", str(tmp_path)]) == 0, capsys.readouterr().err
    found = results(tmp_path)
    plan = module("gpu_kernels_cases").quick()
    assert found["state"] == "done"
    assert found["interpreted"]
    rows = sum(len(row.implementations) for row in plan.timed)
    assert len(found["timings"]) + len(found["absent"]) == rows
    assert len(found["checks"]) == sum(len(row.implementations) for row in plan.checked)
    ran = [check for check in found["checks"] if not check["note"]]
    assert {check["kernel"] for check in ran} == {"prefill", "decode", "kv_pack", "kv_unpack"}
    assert all(check["fine"] for check in ran)
    assert {row["implementation"] for row in found["timings"]} >= {"mcjax", "jax paged_attention"}
    notes = {row["implementation"]: row["note"] for row in found["absent"]}
    assert notes["cudnn"].startswith("absent: ")
    assert notes["mcjax mosaic"].startswith("refused: ")
    out = capsys.readouterr().out
    assert "Interpreted: the times say nothing" in out
    assert " us" not in out.split("| call |")[1].split("\n", 2)[2]
    assert "target" not in out
    with pytest.raises(ConfigError, match="interpret mode"):
        read(str(tmp_path / "results.json"))


@pytest.fixture
def small(module, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script with a plan of two kernels, by their references alone."""
    cases = module("gpu_kernels_cases")
    by = (cases.REFERENCE,)
    plan = cases.Plan(
        (cases.Timed(DECODE, by), cases.Timed(PREFILL, by)),
        (cases.Checked(DECODE, by), cases.Checked(PREFILL, by)),
        1 << 12, 16, 1, 0.0, 2, "float32",
    )  # fmt: skip
    script = module("gpu_kernels")
    monkeypatch.setattr(script, "on_cpu", lambda: plan)
    return script


def test_what_was_measured_on_a_cpu_is_what_mcjax_kernels_reads(small, tmp_path: Path, capsys) -> None:
    assert small.main(["--cpu", "--out", str(tmp_path), "--no-events"]) == 0
    found = read(str(tmp_path / "results.json"))
    assert found.accelerator == "CPU"
    assert found.versions["jax"] == jax.__version__
    (timing,) = found.of(DECODE)
    assert timing.implementation == "mcjax reference"
    assert 0 < timing.spread_s[0] <= timing.seconds <= timing.spread_s[1]
    assert found.of(replace(DECODE, window=3)) == []
    out = capsys.readouterr().out
    assert "GB/s" in out
    assert all(value < 1e-6 for row in results(tmp_path)["checks"] for value in row["found"].values())


def error_of(module, monkeypatch: pytest.MonkeyPatch, case: KernelCase, body: Any) -> Any:
    """What the check says of a body."""
    cases, contestants, check = (module(f"gpu_kernels_{name}") for name in ("cases", "contestants", "check"))
    monkeypatch.setattr(check, "body_of", lambda implementation, kernel: body)
    stage = contestants.Stage(Target("gpu", interpret=True), 1)
    return check.checked(cases.REFERENCE, cases.Checked(case, (cases.REFERENCE,)), stage)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda out, logs: (out * 1.01, logs),
        lambda out, logs: (out, logs + 0.1),
        lambda out, logs: (out.at[1].set(jnp.nan), logs),
        lambda out, logs: (jnp.zeros_like(out), logs),
    ],
)
def test_wrong_results_are_found(module, monkeypatch, wrong) -> None:
    def body(*arguments: Any, target: Target, **options: Any) -> Any:
        return wrong(*decode(*arguments, **options))

    assert not error_of(module, monkeypatch, DECODE, body).fine


@pytest.mark.parametrize(
    "wrong",
    [
        lambda before, after: before,  # as if nothing had been written
        lambda before, after: KVPages(after.data.at[:, :, 0].set(before.data[:, :, 0])),  # the keys
        lambda before, after: KVPages(jnp.nan_to_num(after.data)),  # what nobody may touch
    ],
)
def test_pages_that_a_prefill_left_wrong_are_found(module, monkeypatch, wrong) -> None:
    def body(queries: Any, keys: Any, values: Any, pages: KVPages, *rest: Any, target: Target, **options: Any) -> Any:
        out, after = prefill(queries, keys, values, pages, *rest, **options)
        return out, wrong(pages, after)

    error = error_of(module, monkeypatch, PREFILL, body)
    assert error.found["pages"] > 0
    assert not error.fine


def test_wrong_numbers_fail_the_script(small, module, monkeypatch, tmp_path: Path) -> None:
    check = module("gpu_kernels_check")
    wrong = check.Error({"result": float("nan")}, {"result": 1e-2})
    monkeypatch.setattr(check, "checked", lambda *arguments: wrong)
    assert small.main(["--cpu", "--out", str(tmp_path), "--only", "checks"]) == 1
    assert [row["fine"] for row in results(tmp_path)["checks"]] == [False, False]


def test_a_kernel_that_fails_is_a_row_and_the_others_go_on(small, module, monkeypatch, tmp_path: Path, capsys) -> None:
    def no_body(implementation: str, kernel: str) -> Any:
        if kernel == "decode":
            raise RuntimeError("no such luck\nand more of it")
        raise module("gpu_kernels_contestants").Absent("not built")

    monkeypatch.setattr(module("gpu_kernels_contestants"), "body_of", no_body)
    assert small.main(["--cpu", "--out", str(tmp_path), "--only", "timings"]) == 1
    notes = [(row["kernel"], row["note"]) for row in results(tmp_path)["absent"]]
    assert notes == [("decode", "failed: RuntimeError: no such luck"), ("prefill", "absent: not built")]
    assert "no such luck" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("implementation", "note", "status"),
    [
        ("mcjax", "refused: kernel decode: no", 1),
        ("mcjax mosaic", "refused: kernel prefill: no", 0),
        ("mcjax mosaic", "failed: ValueError: no", 1),
        ("cudnn", "failed: ValueError: no", 0),
        ("mcjax", "absent: nowhere", 0),
    ],
)
def test_a_body_may_refuse_and_a_peer_may_fail_but_the_dispatch_may_not(module, implementation, note, status) -> None:
    row = {"implementation": implementation, "note": note}
    assert module("gpu_kernels")._failed(row) == module("gpu_kernels")._failed({**row, "fine": None}) == bool(status)
    assert module("gpu_kernels")._failed({**row, "fine": False})


def test_what_stops_it_costs_only_what_was_not_done_yet(small, monkeypatch, tmp_path: Path, capsys) -> None:
    def interrupted(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(small, "_check", interrupted)
    assert small.main(["--cpu", "--out", str(tmp_path), "--no-events"]) == 0
    found = results(tmp_path)
    assert found["state"] == "interrupted"
    assert signal.getsignal(signal.SIGTERM) is handler
    assert [row["case"]["kernel"] for row in found["timings"]] == ["decode", "prefill"]
    assert "cpu" in capsys.readouterr().out
    assert small.main(["--cpu", "--out", str(tmp_path), "--limit-s", "0"]) == 0
    found = results(tmp_path)
    assert found["state"] == "ended after 0 s"
    assert found["timings"] == []
    assert found["peaks"]["copy_bytes_per_s"] > 0


def test_without_a_gpu_it_says_what_can_be_done(module, tmp_path: Path, capsys) -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("there is a GPU")
    script = module("gpu_kernels")
    assert script.main(["--out", str(tmp_path)]) == 2
    assert "--interpret --quick" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        script.main(["--cpu", "--quick"])
    with pytest.raises(SystemExit, match="Radeon is not in the catalogue"):
        script._hardware_of(SimpleNamespace(device_kind="Radeon"))
    assert script._hardware_of(SimpleNamespace(device_kind="NVIDIA H200")) == "h200x8"
    assert script._hardware_of(SimpleNamespace(device_kind="cpu")) == "cpu"


def test_a_timed_program_goes_through_every_turn(module) -> None:
    clock = module("gpu_kernels_clock")
    loop = clock.Loop(lambda state, constants, index: state + constants * index, jnp.int32(0), jnp.int32(2), calls=2)
    timing = clock.timed(loop, expected_s=1e-3, program_s=0.0101, rounds=3)
    assert timing.calls == 10  # five turns of two calls
    assert int(loop.state) == 2 * (0 + 1 + 2 + 3 + 4) * (clock.WARM_UP + 3)
    assert 0 < timing.least_s <= timing.seconds <= timing.most_s
    assert timing.busy is None
    assert clock.timed(clock.empty_loop(), 1e-9, 1.0, 1).calls == clock.MOST_CALLS


def test_a_cpu_has_no_device_events(module) -> None:
    clock = module("gpu_kernels_clock")
    loop = clock.copy_loop(1 << 10)
    assert clock.timed(loop, 1.0, 0.0, 1, events=True).busy is None


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "float8_e4m3fn"])
def test_inputs_are_pages_in_disorder_with_nan_where_none_may_look(module, kv_dtype: str) -> None:
    made = module("gpu_kernels_inputs").attention_inputs(replace(PREFILL, kv_dtype=kv_dtype), rotate_bytes=2000)
    assert made.pages.layers > 1
    assert made.pages.layers * PREFILL.shape.token_bytes * 9 >= 2000 or kv_dtype != "float32"
    entries = np.asarray(made.pages.read(1, made.page_table))[0]  # [2, S, Hkv, D]
    assert np.isfinite(entries[:, :3]).all()
    assert np.isnan(entries[:, 3:]).all()
    assert 0.5 < entries[:, :3].std() < 2
    spare = set(range(made.pages.data.shape[0])) - set(np.asarray(made.page_table).ravel().tolist())
    assert len(spare) == 1
    assert np.asarray(made.page_table).ravel().tolist() != sorted(np.asarray(made.page_table).ravel().tolist()) or (
        made.page_table.size < 4
    )
    numbers = np.asarray(module("gpu_kernels_inputs").noise((64, 257), "float32", 3))
    assert abs(numbers.mean()) < 0.02
    assert abs(numbers.std() - 1) < 0.01
    assert len(np.unique(numbers)) > 0.99 * numbers.size


@pytest.mark.parametrize("kernel", ["prefill", "decode", "kv_pack", "kv_unpack"])
def test_a_loop_calls_anew_in_every_turn(module, kernel: Any) -> None:
    """The body's state has one form, and each turn sees what the turn before left."""
    contestants = module("gpu_kernels_contestants")
    calls: list[int] = []

    def counted(*arguments: Any) -> None:
        calls.append(1)

    case = {"prefill": PREFILL, "decode": DECODE}.get(kernel) or KernelCase(kernel, layers=2, pages=2, **SMALL)
    stage = contestants.Stage(Target("gpu", interpret=True), 1)
    loop = contestants.loop_of("mcjax reference", case, stage)

    def body(state: Any, constants: Any, index: Any) -> Any:
        jax.debug.callback(counted, jax.tree.leaves(state)[0].ravel()[0])
        return loop.body(state, constants, index)

    clock = module("gpu_kernels_clock")
    clock.timed(clock.Loop(body, loop.state, loop.constants), 1e-3, 3.5e-3, 1)
    jax.effects_barrier()
    assert len(calls) == 3 * (1 + clock.WARM_UP)


def part_of(seconds: dict[tuple[KernelCase, str], float], **more: Any) -> dict[str, Any]:
    timings = [
        {"case": case.values(), "implementation": name, "seconds": time_s, "spread_s": [time_s, time_s]}
        for (case, name), time_s in seconds.items()
    ]
    peaks = {"copy_bytes_per_s": 4e12, "matmul_flops_per_s": 8e14, "matmul_dtype": "bfloat16", "turn_s": 1e-6}
    about = {"device": "NVIDIA H200", "accelerator": "H200-SXM5-141GB", "date": "a day", "versions": {"jax": "0"}}
    rest = {"state": "done", "interpreted": False, "absent": [], "checks": []}
    return {**about, **rest, "peaks": peaks, "timings": timings, **more}


def test_targets_are_of_the_slowest_call_that_they_are_about(module) -> None:
    cases, tables = module("gpu_kernels_cases"), module("gpu_kernels_tables")
    large, larger, few = cases.decode_case(32, 4096), cases.decode_case(64, 16_384), cases.decode_case(8, 4096)
    prefill, pack = cases.prefill_case(0, 16_384), cases.packing_case("kv_pack", 128)
    part = part_of(
        {
            (large, "mcjax"): large.cost().bytes / 3.6e12,
            (larger, "mcjax"): larger.cost().bytes / 3.2e12,
            (few, "mcjax"): few.cost().bytes / 1e12,
            (large, "jax paged_attention"): large.cost().bytes / 1e12,
            (prefill, "mcjax"): prefill.cost().flops / 6e14,
            (prefill, "cudnn"): prefill.cost().flops / 7e14,
            (cases.prefill_case(0, 8192), "mcjax"): 1.0,
            (pack, "mcjax"): pack.cost().bytes / 3.8e12,
            (replace(pack, block_dtype="int8"), "mcjax"): 1.0,
        }
    )
    found = [worst for _, _, worst in tables.targets(part)]
    assert found == pytest.approx([3.2 / 4, 6 / 7, 6e14, 0.95])
    text = tables.tables(part)
    assert "| 0.85 | 0.8 | no |" in text
    assert "| 0.8 | 0.857 | yes |" in text
    assert "600 TFLOP/s | 75% |" in text
    assert [worst for _, _, worst in tables.targets(part_of({}))] == [None] * 4
    assert tables.tables(part_of({})).count("| open |") == 4


def test_numbers_out_of_bounds_are_shouted_in_the_table(module) -> None:
    check = {"kernel": "decode", "sizes": "s", "implementation": "mcjax", "found": {"result": 0.5}, "note": ""}
    text = module("gpu_kernels_tables").tables(part_of({}, checks=[{**check, "fine": False}, {**check, "fine": True}]))
    assert "| decode, s | mcjax | result 5.0e-01 | NO |" in text
    assert "| decode, s | mcjax | result 5.0e-01 | yes |" in text


def test_the_whole_plan_covers_what_is_promised(module) -> None:
    plan = module("gpu_kernels_cases").full()
    decodes = {row.case.sequences[0][:2] for row in plan.timed if row.case.kernel == "decode"}
    assert decodes == {(batch, context) for batch in (1, 8, 32, 64, 128) for context in (4096, 16_384, 65_536)}
    prefills = {row.case.sequences[0][1:] for row in plan.timed if row.case.kernel == "prefill"}
    assert prefills == {(0, 16_384), (0, 8192), (30_720, 2048)}
    assert {row.case.kernel for row in plan.timed[: module("gpu_kernels").NUMBERS_AFTER]} == {
        "prefill", "decode", "kv_pack", "kv_unpack",
    }  # fmt: skip
    checked = {(row.case.kernel, row.case.kv_dtype) for row in plan.checked}
    assert checked >= {(kernel, dtype) for kernel in ("prefill", "decode") for dtype in ("int8", "float8_e4m3fn")}
    most = max(module("gpu_kernels_inputs").device_bytes(row.case, plan.rotate_bytes) for row in plan.timed)
    assert most < 141e9
