"""The benchmark of transfers at tiny sizes: what it measures is what it says, whatever the figures are."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

TINY = ["--rounds", "2", "--block-bytes", "4096", "65536", "--batch", "4", "--spans", "40", "--reads", "5"]
TINY += ["--sample-bytes", "262144", "--buffer-bytes", "1048576"]
LIMITS = ["memcpy", "process_vm_readv", "raw socket"]
OURS = ["local", "shm", "tcp"]


def run(out: Path, *arguments: str) -> tuple[dict, subprocess.CompletedProcess[str]]:
    command = [sys.executable, str(BENCHMARKS / "transfer.py"), *arguments, *TINY, "--out", str(out)]
    done = subprocess.run(command, cwd=out, capture_output=True, text=True, check=False)
    path = out / "results.json"
    return (json.loads(path.read_text()) if path.exists() else {}), done


@pytest.fixture
def memory(module):
    made = module("transfer_pairs").Memory(1 << 20)
    yield made
    made.close()


def test_every_part_at_tiny_sizes(tmp_path: Path) -> None:
    results, done = run(tmp_path, "--systems", *LIMITS, *OURS)
    assert done.returncode == 0, done.stderr
    assert set(results) == {"throughput", "spans", "latency"}
    part = results["throughput"]
    assert not part["missing"]
    assert not part["left_out"]
    systems = [*LIMITS, *(name for ours in OURS for name in (ours, f"{ours}, verified"))]
    cases = [f"{way} {nbytes}" for way in ("single", "batch") for nbytes in (4096, 65536)]
    assert {(row["system"], row["case"]) for row in part["rows"]} == {(name, at) for name in systems for at in cases}
    for row in part["rows"]:
        assert row["rounds"] == 2
        assert row["best_bytes_per_s"] >= row["median_bytes_per_s"] > 0
        assert set(row["ratios"]) == set(LIMITS) - {row["system"]}
        assert row["reader_cpu_s_per_gb"] > 0
        assert (row["peer_cpu_s_per_gb"] > 0) <= (row["system"].split(",")[0] not in ("memcpy", "local"))
    assert next(row for row in part["rows"] if row["system"] == "raw socket")["peer_cpu_s_per_gb"] > 0
    assert {(row["system"], "of_large" in row) for row in results["spans"]["rows"] if row["case"] == "spans"} == {
        (name, True) for name in [*LIMITS, *OURS]
    }
    assert all(row["p99_us"] >= row["median_us"] > 0 for row in results["latency"]["rows"])
    for line in ("| shm, verified |", "| single / memcpy | 4 KiB | 64 KiB |", "spans / large"):
        assert line in done.stdout
    assert "| tcp / raw socket" not in done.stdout, "aims begin at larger blocks"
    assert (tmp_path / "transfer.png").stat().st_size > 0
    assert results["latency"]["command"].startswith("python benchmarks/transfer.py --systems memcpy")


def test_what_is_not_here_is_left_out_and_says_why(tmp_path: Path, module, monkeypatch) -> None:
    """A folder in which the libraries are empty modules comes first on the path of the workers."""
    for name in ("nixl_cu12", "mooncake"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    results, done = run(tmp_path, "latency", "--systems", "memcpy", "NIXL", "Mooncake")
    assert done.returncode == 0, done.stderr
    missing = results["latency"]["missing"]
    assert "pip install --no-deps nixl-cu12" in missing["NIXL"]
    assert "libibverbs1" in missing["Mooncake"]
    assert "`NIXL` is left out: " in done.stdout


def test_blocks_land_where_they_should_or_the_system_is_left_out(module, memory, tmp_path: Path) -> None:
    rounds, systems = module("transfer_rounds"), module("transfer_systems")
    plans = {"batch 4096": systems.Plan(4096, 7, 3)}
    with module("transfer_pairs").pairs(["memcpy", "raw socket"], memory, tmp_path) as (found, missing):
        assert not missing
        assert not rounds.checked(found, plans)

        class Liar:
            """A reader that says it does not land."""

            def ask(self, what: str, **_: object) -> bool:
                assert what == "check"
                return False

        found["raw socket"].turn = lambda: _entered(Liar())
        assert rounds.checked(found, plans) == {"raw socket": "batch 4096: bytes did not land where they should"}


class _entered:
    def __init__(self, value: object):
        self._value = value

    def __enter__(self) -> object:
        return self._value

    def __exit__(self, *_: object) -> None:
        return


def test_a_check_sees_a_byte_that_did_not_arrive(module) -> None:
    systems, worker = module("transfer_systems"), module("transfer_worker")
    source = np.random.default_rng(0).integers(0, 256, 1 << 16, np.uint8)
    buffers = systems.Buffers(source, np.zeros(1 << 16, np.uint8))
    plan = systems.Plan(4096, 3, 2)

    class Short(systems.Memcpy):
        def prepared(self, plan, verified):
            steps = super().prepared(plan, verified)
            last = int(plan.spans(1 << 16)[-1].local[-1]) + 4095

            def flip() -> None:
                buffers.target[last] ^= 1

            return [*steps, flip]

    assert worker.Worker(systems.Memcpy("reader", buffers), buffers).check(asdict(plan))
    assert not worker.Worker(Short("reader", buffers), buffers).check(asdict(plan))


def test_a_plan_has_no_neighbours_and_never_leaves_the_buffer(module) -> None:
    plan = module("transfer_systems").Plan(64, 100, 3)
    spans = plan.spans(64 * 1000)
    assert [len(batch) for batch in spans] == [100] * 3
    remote = np.concatenate([batch.remote for batch in spans])
    local = np.concatenate([batch.local for batch in spans])
    assert len(set(remote.tolist())) == len(set(local.tolist())) == 300
    assert max(remote.max(), local.max()) <= 64 * 999
    assert (np.diff(remote) == 64).mean() < 0.05
    assert plan.nbytes == 64 * 300


def test_who_is_not_on_stands_still(module, memory, tmp_path: Path) -> None:
    with module("transfer_pairs").pairs(["raw socket"], memory, tmp_path) as (found, _):
        pair = found["raw socket"]

        def states() -> set[str]:
            pids = [pair.reader.pid, pair.peer.pid]
            return {Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] for pid in pids}

        def stand_still() -> bool:
            return any(time.sleep(0.01) or states() == {"T"} for _ in range(1000))  # signals take a moment

        assert stand_still()
        with pair.turn() as reader:
            assert reader.ask("latencies", nbytes=64, count=3)
            assert "T" not in states()
        assert stand_still()


def test_ratios_are_of_the_same_round(module) -> None:
    def sample(rate: float) -> dict[str, float]:
        return {"wall_s": 1 / rate, "own_s": 1.0, "peer_s": 0.5, "nbytes": 1.0}

    # The machine becomes ten times slower after the first round; ours is always twice as fast.
    ours, theirs = [2.0, 0.2, 0.22], [1.0, 0.1, 0.11]
    samples = {("shm", "single 1"): [*map(sample, ours)], ("memcpy", "single 1"): [*map(sample, theirs)]}
    rows = module("transfer_rounds").summary(samples, ("memcpy",))
    assert [row["system"] for row in rows] == ["memcpy", "shm"]
    assert rows[1]["ratios"]["memcpy"] == pytest.approx(2)
    assert rows[1]["median_bytes_per_s"] == pytest.approx(0.22)


def test_unknown_systems_and_blocks_too_large_are_refused(module, capsys) -> None:
    transfer = module("transfer")
    for arguments, said in ((["--systems", "pigeon"], "no system pigeon"), (["--buffer-bytes", "9"], "go into")):
        with pytest.raises(SystemExit):
            transfer.parsed(arguments)
        assert said in capsys.readouterr().err


@pytest.mark.peers
def test_rivals_are_measured_by_their_own_interfaces(tmp_path: Path) -> None:
    systems = ["NIXL", "Mooncake", "nixl endpoint", "mooncake endpoint"]
    results, done = run(tmp_path, "throughput", "spans", "--systems", "memcpy", *systems)
    assert done.returncode == 0, done.stderr
    for part in ("throughput", "spans"):
        assert not results[part]["missing"]
        assert not results[part]["left_out"]
        assert {row["system"] for row in results[part]["rows"]} >= {"memcpy", *systems}


@pytest.mark.check_long
def test_a_profile_names_functions_and_calls_where_the_tools_are(tmp_path: Path) -> None:
    results, done = run(tmp_path, "profile", "--systems", "memcpy", "raw socket", "--seconds", "1")
    assert done.returncode == 0, done.stderr
    part = results["profile"]
    assert {(row["system"], row["case"]) for row in part["rows"]} == {
        (system, case) for system in ("memcpy", "raw socket") for case in ("single 4096", "batch 65536")
    }
    socket = next(row for row in part["rows"] if row["system"] == "raw socket")
    if part["tools"]["strace"]:
        assert "recvfrom" in socket["calls_per_block"]["reader"]
        assert "sendto" in socket["calls_per_block"]["peer"]
    assert "| raw socket | single 4096 | peer |" in done.stdout
