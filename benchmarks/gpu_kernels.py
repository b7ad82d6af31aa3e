"""How fast and how right the GPU kernels are: `python benchmarks/gpu_kernels.py --out FOLDER`, on an H200.

First what the card's memory and tensor cores give (a copy, a matmul), then each kernel timed against them, cuDNN and
jax's own kernels, then the numbers of every body against the reference at the same sizes. Times are of many calls
inside one program, over inputs that no cache holds. FOLDER/results.json is written after every row, so whatever stops
the script (--limit-s, Ctrl-C, a kernel that fails) costs only what was not done yet; progress goes to stderr, tables to
stdout. `mcjax kernels --measured FOLDER/results.json` shows the figures beside the limits.

`--interpret --quick` takes every path of the script at small sizes on a CPU: that shows that it works, and no speed.
`--cpu` times the references, compiled by XLA, on the CPU's own account.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from gpu_kernels_cases import MCJAX, Checked, Plan, Timed, full, on_cpu, quick
from gpu_kernels_tables import tables
from measure import machine, say
from simulator import store, stored

from mcjax.cost.catalogue import hardware, names
from mcjax.cost.hardware import Hardware
from mcjax.cost.kernel_cases import limit
from mcjax.cost.kernel_timings import VERSION, KernelTiming
from mcjax.errors import KernelRefused

LIMIT_S = 345.0
NUMBERS_AFTER = 10
"""So many rows are timed before numbers are checked."""
VERSIONED = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
PART = "gpu_kernels"


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_kernels.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="folder of results.json")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help=f"begin no row after so long; {LIMIT_S:.0f}")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
    parser.add_argument("--interpret", action="store_true", help="interpret the bodies on the CPU")
    parser.add_argument("--cpu", action="store_true", help="time the references on the CPU")
    parser.add_argument("--only", choices=("timings", "checks"), help="leave the others out")
    parser.add_argument("--hardware", choices=names("hardware"), help="whose limits; by default from the device's name")
    parser.add_argument("--no-events", action="store_true", help="do not ask the profiler how busy the device was")
    options = parser.parse_args(arguments)
    if options.cpu and (options.interpret or options.quick):
        parser.error("--cpu has sizes of its own, and interprets nothing")
    return options


class Run:
    """The rows so far, which are kept after each."""

    def __init__(self, options: argparse.Namespace, arguments: Sequence[str], device: Any, hardware: Hardware):
        self.out: Path = options.out.absolute()
        self.ends_s = time.monotonic() + options.limit_s
        self.values: dict[str, Any] = {
            "version": VERSION,
            "command": shlex.join(["python", "benchmarks/gpu_kernels.py", *arguments]),
            "machine": machine(),
            "accelerator": hardware.accelerator,
            "device": device.device_kind,
            "date": time.strftime("%Y-%m-%d"),
            "versions": _versions(),
            "interpreted": options.interpret,
            "quick": options.quick,
            "state": "interrupted",
            "peaks": {},
            "timings": [],
            "absent": [],
            "checks": [],
        }

    def keep(self) -> None:
        store(self.out, PART, self.values)

    def end(self, state: str) -> None:
        self.values["state"] = state
        self.keep()

    def late(self) -> bool:
        return time.monotonic() > self.ends_s


def main(arguments: Sequence[str]) -> int:
    """Exit status 0; 1 if a number is out of its bounds or a row of ours failed; 2 without a GPU."""
    options = parsed(arguments)
    options.out.absolute().mkdir(parents=True, exist_ok=True)
    import jax

    device = jax.devices("cpu" if options.cpu else None)[0]
    if device.platform not in ("gpu", "cuda") and not (options.interpret or options.cpu):
        say("no GPU here; --interpret --quick shows that the script works, --cpu times the references")
        return 2
    chosen = hardware(options.hardware or _hardware_of(device))
    run = Run(options, arguments, device, chosen)
    plan = on_cpu() if options.cpu else quick() if options.quick else full()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # what there is is kept, as after Ctrl-C
    try:
        with jax.default_device(device):
            run.end(_measure(run, plan, options, device, chosen))
    except KeyboardInterrupt:
        say("interrupted; what there is is kept")
        run.end("interrupted")
    finally:
        signal.signal(signal.SIGTERM, before)
    print(tables(stored(run.out)[PART]), end="")
    return 1 if any(map(_failed, [*run.values["checks"], *run.values["absent"]])) else 0


def _failed(row: Mapping[str, Any]) -> bool:
    """Wrong numbers, a kernel of ours that fails, or a call for which the dispatch has no body."""
    if row.get("fine") is False:
        return True
    own, note = row["implementation"].startswith("mcjax"), row["note"]
    return (own and note.startswith("failed")) or (row["implementation"] == MCJAX and note.startswith("refused"))


def _measure(run: Run, plan: Plan, options: argparse.Namespace, device: Any, chosen: Hardware) -> str:
    """Everything in turn. Returns how it ended."""
    from gpu_kernels_contestants import Stage

    from mcjax.kernels.target import Target

    target = Target("gpu", device.device_kind, interpret=True) if options.interpret else Target.of(device)
    stage = Stage(target, plan.rotate_bytes)
    _peaks(run, plan, chosen)
    works: list[Callable[[], None]] = []
    if options.only != "checks":
        works += [
            lambda row=row, name=name, first=not number and at < 4: _time(
                run, plan, row, name, stage, chosen, options, first
            )
            for at, row in enumerate(plan.timed)
            for number, name in enumerate(row.implementations)
        ]
    if options.only != "timings":
        # Numbers come after the first, most telling times.
        works[NUMBERS_AFTER:NUMBERS_AFTER] = [
            lambda row=row, name=name: _check(run, row, name, stage)
            for row in plan.checked
            for name in row.implementations
        ]
    for work in works:
        if run.late():
            return f"ended after {options.limit_s:.0f} s"
        work()
        run.keep()
    return "done"


def _peaks(run: Run, plan: Plan, chosen: Hardware) -> None:
    from gpu_kernels_clock import copy_loop, empty_loop, matmul_loop, timed

    copied, product = 2 * plan.copy_bytes, 2 * plan.matmul**3
    square = matmul_loop(plan.matmul, plan.matmul_dtype)
    copy = timed(copy_loop(plan.copy_bytes), copied / chosen.hbm_bytes_per_s, plan.program_s, plan.rounds)
    matmul = timed(square, product / chosen.peak_flops, plan.program_s, plan.rounds)
    turn = timed(empty_loop(), 1e-6, plan.program_s, plan.rounds)
    run.values["peaks"] = {
        "turn_s": turn.seconds,
        "copy_bytes_per_s": copied / copy.seconds,
        "matmul_flops_per_s": product / matmul.seconds,
        "matmul_dtype": plan.matmul_dtype,
        "copy_spread_s": [copy.least_s, copy.most_s],
        "matmul_spread_s": [matmul.least_s, matmul.most_s],
    }
    say(f"  copy {copied / copy.seconds / 1e9:,.1f} GB/s, matmul {product / matmul.seconds / 1e12:,.2f} TFLOP/s")
    run.keep()


def _time(
    run: Run,
    plan: Plan,
    row: Timed,
    name: str,
    stage: Any,
    chosen: Hardware,
    options: argparse.Namespace,
    first: bool,
) -> None:
    from gpu_kernels_clock import timed
    from gpu_kernels_contestants import Absent, loop_of

    expected_s = limit(row.case.cost(), chosen).seconds
    try:
        loop = loop_of(name, row.case, stage)
        found = timed(loop, expected_s, plan.program_s, plan.rounds, events=first and not options.no_events)
    except (Absent, KernelRefused) as problem:
        _absent(run, row, name, _without(problem))
        return
    except Exception as problem:  # one kernel's failure is a row, and the others are still to be measured
        _absent(run, row, name, _failure(problem))
        return
    spread = (found.least_s, found.most_s)
    values = KernelTiming(row.case, name, found.seconds, spread).values()
    run.values["timings"].append({**values, "calls": found.calls, "busy": found.busy})
    say(f"  {row.case.kernel}, {row.case.text()}, {name}: {found.seconds * 1e6:,.1f} us, limit {expected_s * 1e6:,.1f}")


def _absent(run: Run, row: Timed, name: str, note: str) -> None:
    sizes = {"kernel": row.case.kernel, "sizes": row.case.text()}
    run.values["absent"].append({**sizes, "implementation": name, "note": note})
    say(f"  {row.case.kernel}, {row.case.text()}, {name}: {note}")


def _check(run: Run, row: Checked, name: str, stage: Any) -> None:
    from gpu_kernels_check import checked
    from gpu_kernels_contestants import Absent

    values: dict[str, Any] = {
        "case": row.case.values(),
        "kernel": row.case.kernel,
        "sizes": _told(row),
        "implementation": name,
        "found": {},
        "bounds": {},
        "fine": None,
        "note": "",
    }
    try:
        error = checked(name, row, stage)
        values |= {"found": error.found, "bounds": error.bounds, "fine": error.fine}
    except (Absent, KernelRefused) as problem:
        values["note"] = _without(problem)
    except Exception as problem:
        values["note"] = _failure(problem)
    run.values["checks"].append(values)
    say(f"  {row.case.kernel}, {_told(row)}, {name}: {values['note'] or values['found']}")


def _told(row: Checked) -> str:
    case = row.case
    parts = [case.text(), "" if case.kv_dtype == "bfloat16" else case.kv_dtype]
    parts += [f"D {case.head_dim}", f"window {case.window:,}" if case.window else ""]
    parts += [f"{name} {value}" for name, value in row.options.items()]
    return ", ".join(part for part in parts if part)


def _without(problem: Exception) -> str:
    return f"{'refused' if isinstance(problem, KernelRefused) else 'absent'}: {problem}"


def _failure(problem: Exception) -> str:
    """In a line: compilers have a lot to say."""
    return f"failed: {type(problem).__name__}: {str(problem).splitlines()[0][:200] if str(problem) else ''}"


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _hardware_of(device: Any) -> str:
    """The catalogue's name of the accelerator that a device says it is."""
    for name in names("hardware"):
        product = hardware(name).accelerator.split("-")[0]
        if product.lower() in device.device_kind.lower():
            return name
    raise SystemExit(f"gpu_kernels.py: {device.device_kind} is not in the catalogue; --hardware says whose limits")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
