"""How fast the engine's kernels and model steps are on this machine: `python benchmarks/engine.py PART --out FOLDER`.

`limits`: what memory and cores give. `decode`, `prefill`: a model step against transformers on torch (the `parity`
extra). `attention`: one layer's attention against torch's. `overhead`: what the serving engine adds to its steps.
`throughput`: a chat workload against a loop of `generate`. Figures go to FOLDER/results.json with their commands, a
plot beside it, progress to stderr, tables to stdout. A part that is run again replaces its figures.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import engine_attention
import engine_limits
import engine_overhead
import engine_steps
import engine_throughput
from engine_tables import tables
from measure import BenchmarkError, machine, say
from simulator import positive, store, stored

PARTS = {
    "limits": engine_limits.run,
    "decode": engine_steps.decode,
    "prefill": engine_steps.prefill,
    "attention": engine_attention.run,
    "overhead": engine_overhead.run,
    "throughput": engine_throughput.run,
}


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="engine.py", description="How fast kernels and model steps are here.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all of them if none is named")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="folder of results and plots")
    parser.add_argument("--model", choices=("smollm2", "tiny"), default="smollm2", help="shape of the random model")
    parser.add_argument("--threads", type=positive, default=os.cpu_count(), help="torch's threads")
    parser.add_argument("--rounds", type=positive, help="timed rounds of each contestant")
    parser.add_argument("--batches", type=positive, nargs="+", help="decode: sequences")
    parser.add_argument("--context", type=positive, default=128, help="decode: tokens that each sequence has")
    parser.add_argument("--requests", type=positive, help="throughput: chats")
    parser.add_argument("--serving-batch", type=positive, default=16, help="throughput: rows of the decode step")
    parser.add_argument("--prompts", type=positive, nargs="+", help="prefill: tokens of the prompt")
    options = parser.parse_args(arguments)
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return options


def main(arguments: Sequence[str]) -> int:
    # Torch's threads must not spin when it is not their turn.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    options = parsed(arguments)
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in options.parts or list(PARTS):
        try:
            figures = PARTS[name](out, options)
        except BenchmarkError as problem:
            say(f"{name}: {problem}")
            failed = True
            continue
        command = shlex.join(["python", "benchmarks/engine.py", *arguments])
        waits = os.environ["OMP_WAIT_POLICY"]
        load = os.getloadavg()[0]
        store(out, name, {"command": command, "machine": machine(), "openmp_waits": waits, "load": load, **figures})
    results = stored(out)
    print(tables(results), end="")
    if results:
        from engine_tables import draw

        draw(results, out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
