"""Encodings in simulation: more blocks in the same memory, fewer bytes on links, and the rules about lossy blocks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import mcjax
from mcjax.backends.sim.transport import carried_bytes
from mcjax.backends.sim.world import SimWorld
from mcjax.cost import catalogue
from mcjax.errors import ConfigError
from mcjax.transfer.base import Copy
from mcjax.types import Role
from mcjax.workload.driver import ScriptBook
from mcjax.workload.synthetic import Synthetic

GB = 10**9
HARDWARE = dataclasses.replace(catalogue.hardware("a800x8"), ssd_bytes_per_s=6e9)


def world(dram: str = "none", ssd: str = "none", **changes: Any) -> SimWorld:
    return SimWorld(
        catalogue.model("llama3-8b"),
        HARDWARE,
        catalogue.fitted(),
        ScriptBook(),
        512,
        pool_bytes=10 * GB,
        ssd_bytes=20 * GB,
        encodings=(dram, ssd),
        **changes,
    )


def test_as_many_blocks_fit_as_their_bytes_at_rest_allow():
    plain, rounded = world(), world("fp8", "int8")
    whole = plain.kv_format().block_bytes
    packed = whole // 2 + whole // 2 // 128 * 4  # a byte a number, and four for each vector of 128 numbers
    for made, dram_bytes, ssd_bytes in ((plain, whole, whole), (rounded, packed, packed)):
        dram, ssd = made.pool_store("n"), made.ssd_store("n")
        assert ssd is not None
        assert (dram.block_bytes, dram.capacity) == (dram_bytes, 10 * GB // dram_bytes)
        assert (ssd.block_bytes, ssd.capacity) == (ssd_bytes, 20 * GB // ssd_bytes)
    for names in (("none", "none"), ("int8", "none"), ("none", "fp8")):
        store = world(*names).ssd_store("n")
        assert store is not None
        assert store.lossy == (names != ("none", "none")), "what was rounded above is rounded here"
    with pytest.raises(ConfigError, match=r"kvpool\.dram_encoding=int4"):
        world("int4")


def test_links_carry_what_lies_at_the_end_that_is_no_host_memory():
    made = world("int8", "fp8")
    here, there, ssd = made.pool_store("a"), made.pool_store("b"), made.ssd_store("a")
    pages = made.instance("p0", "a", Role.PREFILL).pages
    assert ssd is not None
    whole, packed = made.kv_format().block_bytes, here.block_bytes

    def carried(source: Any, target: Any) -> int:
        return carried_bytes(Copy(source.regions(source.reserve(2)), target.regions(target.reserve(2))))

    assert carried(pages, here) == carried(here, pages) == 2 * whole
    assert carried(here, there) == 2 * packed
    assert carried(here, ssd) == carried(ssd, here) == 2 * ssd.block_bytes


def test_a_link_is_busy_for_so_many_bytes_fewer():
    def seconds(made: SimWorld) -> int:
        source, target = made.pool_store("a"), made.pool_store("b")
        transport = made.transports()[1]
        transport.register(source)
        transport.register(target)

        async def main() -> int:
            from mcjax import aio

            copy = Copy(source.regions(source.reserve(8)), target.regions(target.reserve(8)))
            done = aio.new_future()
            transport.submit([copy]).when_answered(lambda results: done.set_result(results))
            [result] = await done
            assert result.error is None
            return aio.now_ns()

        return made.run(main)

    latency_ns = HARDWARE.nic_latency_ns
    plain, rounded = seconds(world()) - latency_ns, seconds(world("int8", "int8")) - latency_ns
    assert rounded / plain == pytest.approx(132 / 256, rel=1e-3)


SYNTHETIC = ["backend=sim", "workload=synthetic", "workload.sessions=25", "workload.rate_per_s=20"]


def run(runs: Path, *overrides: str) -> mcjax.Run:
    return mcjax.run([*SYNTHETIC, f"track.sinks.0.directory={runs}", *overrides], progress=False)


def test_requests_hit_rounded_blocks_exactly_if_they_accept_them(tmp_path: Path) -> None:
    plain = run(tmp_path, "cluster=2m").summary
    accepted = run(tmp_path, "cluster=2m", "kvpool.dram_encoding=int8", "workload.accepts_lossy=true").summary
    refused = run(tmp_path, "cluster=2m", "kvpool.dram_encoding=int8").summary
    assert accepted["hit_tokens"]["delivered"] == plain["hit_tokens"]["delivered"] > 0
    assert accepted["missed_tokens"]["lossy"] == 0
    assert refused["hit_tokens"]["delivered"] == 0
    assert refused["missed_tokens"]["lossy"] > 0, "and that is counted under its own cause"
    assert refused["requests"]["completed"] == plain["requests"]["completed"]


def test_a_rounding_ssd_serves_only_who_accepts_it(tmp_path: Path) -> None:
    tiers = ["cluster=2m", "kvpool.ssd_bytes=2e9", "kvpool.dram_bytes=2e6", "kvpool.ssd_encoding=fp8"]
    tiers.append("hardware.ssd_bytes_per_s=6e12")
    accepted = run(tmp_path, *tiers, "workload.accepts_lossy=true").summary
    refused = run(tmp_path, *tiers).summary
    assert accepted["tokens_by_tier"]["ssd"] > 0
    assert refused["tokens_by_tier"]["ssd"] == 0
    assert refused["missed_tokens"]["lossy"] > 0


def test_who_does_not_accept_rounded_blocks_is_told_where_they_would_have_to_be_decoded_from(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kvpool\.dram_encoding=int8: prefill instances hand blocks on"):
        run(tmp_path, "cluster=1p1d", "kvpool.dram_encoding=int8")
    done = run(tmp_path, "cluster=1p1d", "kvpool.dram_encoding=int8", "workload.accepts_lossy=true")
    assert done.summary["requests"]["failed"] == 0


def test_a_request_that_no_config_could_be_asked_about_fails_by_name(tmp_path: Path) -> None:
    """Its workload is a caller's own object."""
    overrides = ["backend=sim", "cluster=1p1d", "kvpool.dram_encoding=int8", f"track.sinks.0.directory={tmp_path}"]
    done = mcjax.run(overrides, progress=False, workload=Synthetic(seed=1, sessions=3, turns=1))
    assert done.summary["requests"]["failed"] == 3
    assert all("does not accept lossy blocks" in reason for reason in done.requests.column("reason").to_pylist())
    accepting = Synthetic(seed=1, sessions=3, turns=1, accepts_lossy=True)
    assert mcjax.run(overrides, progress=False, workload=accepting).summary["requests"]["completed"] == 3
