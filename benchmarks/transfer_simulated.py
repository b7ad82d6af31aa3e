"""Simulated links beside two figures of Mooncake's paper: latency by size, and time to first token by bandwidth.

`python benchmarks/transfer_simulated.py curve` takes seconds, `sweep` minutes (it plays the synthetic trace eight
times; the trace is looked for in `$MCJAX_TRACES`). Tables go to stdout, `transfer-simulated.json` and a plot to the
folder of `--out`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from tables import table

import mcjax
from mcjax import aio
from mcjax.app.figures import published
from mcjax.backends.sim.links import LinkModel
from mcjax.backends.sim.network import SimNetwork, add_nics
from mcjax.backends.virtual import VirtualLoop
from mcjax.cost.catalogue import hardware
from mcjax.kvpool.stores.null import NullStore
from mcjax.transfer.base import Copy
from mcjax.transfer.engine import TransferEngine
from mcjax.transfer.paths.base import PathChoice
from mcjax.transfer.paths.least_queued import LeastQueued
from mcjax.transfer.paths.nearest import Nearest
from mcjax.transfer.paths.path import PathSettings
from mcjax.transfer.topology import read_topology
from mcjax.types import NS_PER_S, NullRecorder, Tier

GB = 10**9
BLOCK_BYTES = 10**6

NETWORKS = {"a800x8": "4 x 200 Gbps", "h800x8": "8 x 400 Gbps"}

SWEEP_GBPS = (24, 40, 80, 100, 160, 320, 400)
SWEEP_TTFT_S = (5.11, 2.42, 1.75, 1.61, 1.42, 1.26, 1.27)
"""FAST'25, Fig 13, read off the plot: mean time to first token on the synthetic trace, by each node's bandwidth."""
RECOMPUTED_TTFT_S = 2.6
"""The same figure's line for computing everything again."""

TRACE = "mooncake_fast25_synthetic.jsonl"


def transfer_s(name: str, nbytes: int, choice: PathChoice) -> float:
    """Seconds of one copy from node to node by the transfer engine, over the NICs that `name` has."""
    machine = hardware(name)
    topology = read_topology("nics", machine)
    assert topology is not None
    links = LinkModel()
    latency_s = machine.nic_latency_ns / NS_PER_S
    engine = TransferEngine(
        [SimNetwork(links, topology, has_spine=False)],
        NullRecorder(),
        choice=choice,
        settings=PathSettings(link=(machine.nic_bytes_per_s, latency_s)),
    )
    blocks = nbytes // BLOCK_BYTES
    stores = [NullStore(node, Tier.DRAM, blocks, BLOCK_BYTES) for node in ("a", "b")]
    for store in stores:
        engine.register(store)
        add_nics(links, store.node, topology, machine)

    async def main() -> float:
        here, there = (store.regions(store.reserve(blocks)) for store in stores)
        await engine.perform(Copy(here, there))
        return aio.now_ns() / NS_PER_S

    return VirtualLoop().run(main)


def curve() -> list[dict[str, Any]]:
    """A13's figure: a row a network and size."""
    return [
        {
            "network": NETWORKS[name],
            "gb": gigabytes,
            "published_s": seconds,
            "striped_s": transfer_s(name, gigabytes * GB, LeastQueued()),
            "one_nic_s": transfer_s(name, gigabytes * GB, Nearest()),
        }
        for name, latencies in published.TRANSFER_S.items()
        for gigabytes, seconds in zip(published.TRANSFER_GB, latencies, strict=True)
    ]


def sweep(cluster: str) -> list[dict[str, Any]]:
    """Fig 13's: a row a bandwidth, the last one with each node's own cache only."""
    trace = Path(os.environ.get("MCJAX_TRACES", "traces")) / TRACE
    if not trace.is_file():
        sys.exit(f"{trace} is not there: set MCJAX_TRACES to the folder of the public traces")
    common = ["experiment=fast25_prefill_only", f"workload.path={trace}", f"cluster={cluster}", "track=none"]

    def row(gbps: int, *more: str) -> dict[str, Any]:
        print(f"sweep: {gbps} Gbps {' '.join(more)}", file=sys.stderr)
        rate = gbps * 1e9 / 8
        summary = mcjax.run([*common, f"hardware.nic_bytes_per_s={rate:.0f}", *more], progress=False).summary
        return {
            "gbps": gbps,
            "ttft_s": summary["ttft_s"]["mean"],
            "hit_rate": summary["prefix_hit_rate"]["token"],
            "remote_share": summary["tokens_by_tier"]["dram_remote"] / sum(summary["tokens_by_tier"].values()),
        }

    rows = [row(gbps) | {"published_s": seconds} for gbps, seconds in zip(SWEEP_GBPS, SWEEP_TTFT_S, strict=True)]
    alone = row(SWEEP_GBPS[-1], "sched/prefill=cache_aware")
    return [*rows, alone | {"published_s": RECOMPUTED_TTFT_S, "alone": True}]


def curve_table(rows: list[dict[str, Any]]) -> str:
    head = ("network", "GB", "published s", "simulated s", "error", "one NIC s")
    return table(
        head,
        (
            (
                row["network"],
                row["gb"],
                f"{row['published_s']:.3f}",
                f"{row['striped_s']:.3f}",
                f"{100 * (row['striped_s'] / row['published_s'] - 1):+.1f} %",
                f"{row['one_nic_s']:.3f}",
            )
            for row in rows
        ),
    )


def sweep_table(rows: list[dict[str, Any]]) -> str:
    head = ("Gbps a node", "published s", "to 400 Gbps", "simulated s", "to 400 Gbps", "hit rate", "of it remote")
    last = next(row for row in rows if row["gbps"] == SWEEP_GBPS[-1])
    return table(
        head,
        (
            (
                "nothing pulled" if row.get("alone") else row["gbps"],
                f"{row['published_s']:.2f}",
                f"{row['published_s'] / last['published_s']:.2f}",
                f"{row['ttft_s']:.2f}",
                f"{row['ttft_s'] / last['ttft_s']:.2f}",
                f"{row['hit_rate']:.3f}",
                f"{row['remote_share'] / row['hit_rate']:.3f}",
            )
            for row in rows
        ),
    )


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for network in NETWORKS.values():
        rows = [row for row in results.get("curve", []) if row["network"] == network]
        sizes = [row["gb"] for row in rows]
        (line,) = left.plot(sizes, [row["striped_s"] for row in rows], label=f"{network}, simulated")
        left.plot(sizes, [row["published_s"] for row in rows], "o", color=line.get_color(), label=f"{network}, paper")
    left.set(xlabel="GB in one copy", ylabel="seconds", title="Latency of a transfer")
    rows = [row for row in results.get("sweep", []) if not row.get("alone")]
    rates = [row["gbps"] for row in rows]
    right.plot(rates, [row["ttft_s"] for row in rows], "-", label="simulated")
    right.plot(rates, [row["published_s"] for row in rows], "o", label="paper")
    right.set(xlabel="Gbps a node", ylabel="mean time to first token, s", title="Synthetic trace", yscale="log")
    for panel in (left, right):
        if panel.get_legend_handles_labels()[0]:
            panel.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["curve", "sweep", "all"], default="all")
    parser.add_argument("--cluster", default="8p8d", help="of the sweep: the paper has 16 nodes and no split")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "transfer-simulated.json"
    results: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() else {}
    for part in ("curve", "sweep") if options.part == "all" else (options.part,):
        results[part] = curve() if part == "curve" else sweep(options.cluster)
        print((curve_table if part == "curve" else sweep_table)(results[part]))
        kept.write_text(json.dumps(results, indent=1) + "\n")
    plot(results, options.out / "transfer-simulated.png")


if __name__ == "__main__":
    main()
