"""When is it worth packing scattered pieces before they are moved? docs/transfer-layouts.md.

`python benchmarks/packing.py [--kinds shm tcp] [--rounds 7] --out FOLDER`. A peer in a process of its own shows a
region; pieces scattered over it are read into places scattered over one here: as a batch of spans, and packed (the peer
gathers them, one span, scattered here). In rounds that take turns; the best of each counts, since others may be at work
on the machine. Figures go to FOLDER/packing.json, the table to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measure import machine, say
from simulator import positive
from tables import table

from mcjax.transfer.packing import Packed, gather, scatter
from mcjax.transfer.transports.endpoint import Endpoint, RegionDescriptor, Spans
from mcjax.transfer.transports.secret import VARIABLE, Secret

SIZES = (256, 1024, 4096, 8192, 16384, 65536)
REGION_BYTES = 256 << 20
MOVED_BYTES = 32 << 20
MOST_PIECES = 16384


def endpoint_of(kind: str, secret: Secret) -> Endpoint:
    if kind == "tcp":
        from mcjax.transfer.transports.tcp.endpoint import TcpEndpoint

        return TcpEndpoint(secret)
    from mcjax.transfer.transports.shm.endpoint import ShmEndpoint

    return ShmEndpoint(secret)


def scattered(nbytes: int, count: int, seed: int) -> np.ndarray:
    """`[count]` offsets of pieces that no two share."""
    places = np.random.default_rng(seed).choice(REGION_BYTES // nbytes, count, replace=False)
    return places.astype(np.int64) * nbytes


def spans_of(nbytes: int, count: int) -> Spans:
    lengths = np.full(count, nbytes, np.int64)
    return Spans(scattered(nbytes, count, 1), scattered(nbytes, count, 2), lengths)


def serve(kind: str) -> None:
    """The peer: shows its region and a staging region, and gathers on demand."""
    endpoint = endpoint_of(kind, Secret(bytes.fromhex(os.environ[VARIABLE])))
    region = endpoint.expose(np.random.default_rng(0).integers(0, 256, REGION_BYTES, np.uint8))
    staging = endpoint.expose(np.zeros(MOVED_BYTES, np.uint8))
    print(json.dumps([region.descriptor().to_json(), staging.descriptor().to_json()]), flush=True)
    for line in sys.stdin:
        nbytes, count = map(int, line.split())
        spans = spans_of(nbytes, count)
        gather(region.buffer, spans.remote, spans.nbytes, staging.buffer)
        print("gathered", flush=True)
    endpoint.close()


def timed(action: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


def measure(kind: str, rounds: int) -> list[dict[str, Any]]:
    secret = Secret.random()
    variables = {**os.environ, VARIABLE: secret.hand_over().hex()}
    command = [sys.executable, __file__, "--serve", kind]
    endpoint = endpoint_of(kind, secret)
    rows: list[dict[str, Any]] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables, text=True) as peer:
        orders, answers = peer.stdin, peer.stdout
        assert orders is not None
        assert answers is not None
        remote, remote_staging = map(RegionDescriptor.from_json, json.loads(answers.readline()))
        local = endpoint.expose(np.zeros(REGION_BYTES, np.uint8))
        staging = endpoint.expose(np.zeros(MOVED_BYTES, np.uint8))
        there = np.random.default_rng(0).integers(0, 256, REGION_BYTES, np.uint8)

        def read(spans: Spans) -> None:
            results = endpoint.read(local, remote, spans).result(60)
            assert not results.errors

        for nbytes in SIZES:
            count = min(MOVED_BYTES // nbytes, MOST_PIECES)
            spans = spans_of(nbytes, count)
            packed = Packed.of(spans)

            def ask(told: str) -> None:
                orders.write(told)
                orders.flush()
                answers.readline()

            def move_packed(told: str, packed: Packed) -> None:
                ask(told)
                results = endpoint.read(staging, remote_staging, packed.span()).result(60)
                assert not results.errors
                packed.finish(staging.buffer, local.buffer)

            told = f"{nbytes} {count}\n"
            actions: dict[str, Callable[[], object]] = {
                "scattered": lambda spans=spans: read(spans),
                "packed": lambda told=told, packed=packed: move_packed(told, packed),
                "gather": lambda spans=spans: gather(there, spans.remote, spans.nbytes, staging.buffer),
                "scatter": lambda spans=spans: scatter(staging.buffer, local.buffer, spans.local, spans.nbytes),
            }
            times: dict[str, list[float]] = {name: [] for name in actions}
            for _ in range(rounds):
                for name, action in actions.items():
                    times[name].append(timed(action))
            local.buffer[:] = 0
            move_packed(told, packed)
            for first, second in zip(spans.local[:50].tolist(), spans.remote[:50].tolist(), strict=True):
                assert (local.buffer[first : first + nbytes] == there[second : second + nbytes]).all()
            best = {name: min(found) for name, found in times.items()}
            rows.append({"kind": kind, "nbytes": nbytes, "count": count, **{f"{name}_s": best[name] for name in best}})
            say(f"{kind} {nbytes}: " + ", ".join(f"{name} {value * 1e6 / count:.2f}" for name, value in best.items()))
        orders.close()
    endpoint.close()
    return rows


def shown(results: dict[str, Any]) -> str:
    def each_us(row: dict[str, Any], name: str) -> str:
        return f"{row[f'{name}_s'] * 1e6 / row['count']:.2f}"

    def rate(row: dict[str, Any], name: str) -> str:
        return f"{row['nbytes'] * row['count'] / row[f'{name}_s'] / 1e9:.2f}"

    return table(
        (
            "way",
            "a piece",
            "pieces",
            "scattered, us each (GB/s)",
            "packed, us each (GB/s)",
            "gather, us",
            "scatter, us",
        ),
        (
            (
                row["kind"],
                f"{row['nbytes']} B",
                row["count"],
                f"{each_us(row, 'scattered')} ({rate(row, 'scattered')})",
                f"{each_us(row, 'packed')} ({rate(row, 'packed')})",
                each_us(row, "gather"),
                each_us(row, "scatter"),
            )
            for row in results["rows"]
        ),
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="packing.py", description="Scattered pieces, packed and not.")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="folder of results")
    parser.add_argument("--kinds", nargs="+", choices=("shm", "tcp"), default=["shm", "tcp"], help="ways to move bytes")
    parser.add_argument("--rounds", type=positive, default=7, help="of which the best counts")
    parser.add_argument("--serve", choices=("shm", "tcp"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options.serve)
        return 0
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    rows = [row for kind in options.kinds for row in measure(kind, options.rounds)]
    command = shlex.join(["python", "benchmarks/packing.py", *arguments])
    results = {"command": command, "machine": machine(), "load": load, "rows": rows}
    (out / "packing.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(shown(results), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
