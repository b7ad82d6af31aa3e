"""The timed loops, compiled for an H200 that is not there: they fit, and copy nothing that a kernel alone would not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import pytest

pytestmark = pytest.mark.aot_gpu

pytest.importorskip("jax_cuda13_plugin", reason="needs the aot-gpu extra")


def compiled(module: Callable[[str], ModuleType], implementation: str, case: Any) -> Any:
    """The report of a loop of twenty turns."""
    from mcjax.kernels.proof.gpu import H200, compile_for_gpu

    contestants, clock = module("gpu_kernels_contestants"), module("gpu_kernels_clock")
    stage = contestants.Stage(H200, module("gpu_kernels_cases").full().rotate_bytes)
    bodies: list[Any] = []

    def make() -> Any:
        loop = contestants.loop_of(implementation, case, stage)
        bodies.append(loop.body)
        return loop.state, loop.constants

    state, constants = jax.eval_shape(make)  # nothing of the inputs is made here
    turns = functools.partial(clock._turns, bodies[0], 20)
    return compile_for_gpu(turns, state, constants, donate_argnums=0)


@pytest.mark.parametrize(
    ("implementation", "make", "sizes", "kernel"),
    [
        ("mcjax", "decode_case", (128, 65_536), "decode"),
        ("mcjax", "decode_case", (1, 4096), "decode"),
        ("mcjax", "prefill_case", (0, 16_384), "prefill"),
        ("mcjax", "packing_case", ("kv_pack", 128), "pack"),
        ("mcjax", "packing_case", ("kv_unpack", 128), "unpack"),
        ("jax paged_attention", "decode_case", (32, 16_384), "paged_attention"),
        ("jax attention_mgpu", "prefill_case", (0, 8192), "mosaic_gpu"),
    ],
)
def test_a_loop_of_calls_compiles_and_copies_no_inputs(module, implementation, make, sizes, kernel) -> None:
    case = getattr(module("gpu_kernels_cases"), make)(*sizes)
    report = compiled(module, implementation, case)
    assert any(kernel in one.name for one in report.kernels), [one.name for one in report.kernels]
    assert "known_trip_count" in report.hlo  # the host is not asked after every turn
    assert report.temp_bytes < max(case.cost().bytes // 4, 4 << 20)
    total = report.argument_bytes + report.output_bytes - report.alias_bytes + report.temp_bytes
    assert total < 139e9
