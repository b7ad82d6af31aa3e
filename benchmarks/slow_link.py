"""Does streaming hide the transfer behind the prompt, over a slow link? docs/slow-link.md.

`python benchmarks/slow_link.py [--mbits 100 400] [--delay-ms 5] --out FOLDER`, as root on Linux. Prefill and decode run
in processes of their own, in network namespaces of their own; each bandwidth with streaming and without. Figures go to
FOLDER/slow_link.json, a plot beside it, the table to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measure import BenchmarkError, machine, say
from simulator import positive
from slow_link_network import Link, LinkUnavailable, slow_link
from tables import table

from mcjax.types import Request, Script, Tokens
from mcjax.workload.base import Turn

OUTPUT_TOKENS = 8
WARM_UP = 1
"""Lone prompts at the beginning of each run that are not counted: connections open, pages are touched."""


@dataclass(frozen=True)
class Prompts:
    """The workload of each run: `count` prompts of `tokens` random tokens, so far apart that none waits for another;
    then `burst` more at once, of which all but one wait for pages."""

    tokens: int = 3072
    count: int = 6
    every_s: float = 4.0
    burst: int = 3

    name = "prompts"
    block_tokens = None

    def sessions(self) -> Iterator[Only]:
        draw = np.random.default_rng(self.tokens)
        for number in range(self.count + self.burst):
            start_ns = round(min(number + 1, self.count + 1) * self.every_s * 1e9)
            tokens = draw.integers(0, 256, self.tokens, np.int32)
            request = Request(number, start_ns, self.tokens, OUTPUT_TOKENS, tokens=tokens)
            yield Only(start_ns, Turn(request, Script(OUTPUT_TOKENS)))

    def inputs(self) -> dict[str, str]:
        return {}


@dataclass
class Only:
    """A session of one turn."""

    start_ns: int
    turn: Turn | None

    def next_turn(self, answer: Tokens | None) -> Turn | None:
        turn, self.turn = self.turn, None
        return turn


@dataclass(frozen=True)
class Played:
    """One run: seconds of each lone prompt that counts; `tokens`: what came out, by request."""

    streaming: bool
    prompt_s: list[float]
    """From the first chunk's start to the first token, which prefill gives."""
    ttft_s: list[float]
    handed_over_s: list[float]
    """From the first token to the second, the first that decode gives: what is left of the transfer, and one step."""
    burst_ttft_s: list[float]
    """Of those that came at once: a prompt's pages are free for the next when its blocks are with decode."""
    sent_bytes: int
    """Over the link from prefill's side, as its interface counted, in the whole run."""
    early_share: float
    """Of a prompt's bytes, those that were with decode before the prompt's first token."""
    tokens: list[list[int]]


def engine(prompts: Prompts) -> list[str]:
    """What all runs have in common: a small model with a large KV cache, so that both sides take about as long."""
    longest = prompts.tokens + 64
    return [
        "backend=jax",
        "cluster=1p1d",
        "model.kv_heads=4",
        "model.checkpoint=''",  # random weights: the built-in ones have two key heads
        f"model.max_context_tokens={longest}",
        f"backend.max_context_tokens={longest}",
        f"backend.pages={longest // 16}",
        "backend.max_batch=1",
        f"backend.pool_blocks={(prompts.count + prompts.burst) * (longest // 16)}",
        "kvpool.block_tokens=16",
        "transfer.deadline_s=300",
        "verify=false",
    ]


def prompt_bytes(prompts: Prompts) -> int:
    """Of a prompt's KV: keys and values of 4 layers and 4 heads, 32 wide, float32."""
    return prompts.tokens * 2 * 4 * 4 * 32 * 4


def over(link: Link) -> list[str]:
    """Prefill on one side of the link, decode on the other."""
    return [
        "launcher=processes",
        "launcher.transport=tcp",
        *(f"+launcher.command.{name}={shlex.join(link.command(side))}" for name, side in (("p0", "a"), ("d0", "b"))),
        *(f"+launcher.host.{name}={link.address(side)}" for name, side in (("p0", "a"), ("d0", "b"))),
    ]


def play(prompts: Prompts, streaming: bool, link: Link | None, folder: Path) -> Played:
    """One run, and what its requests' rows say. Raises `BenchmarkError` if one has not completed."""
    import mcjax

    before = 0 if link is None else link.sent_bytes("a")
    where = [] if link is None else over(link)
    told = [*engine(prompts), *where, f"engine.streaming={str(streaming).lower()}", f"track.sinks.0.directory={folder}"]
    run = mcjax.run([*told, "track.sinks.0.overview=false"], progress=False, workload=prompts)
    rows = sorted(run.requests.to_pylist(), key=lambda row: row["request_id"])
    states = [row["state"] for row in rows]
    if any(state != "completed" for state in states):
        raise BenchmarkError(f"{shlex.join(['mcjax', *told])}: {states}, {[row['reason'] for row in rows]}")
    counted = rows[WARM_UP : prompts.count]
    return Played(
        streaming,
        [(row["first_token_ns"] - row["prefill_start_ns"]) / 1e9 for row in counted],
        [row["ttft_ns"] / 1e9 for row in counted],
        [row["intervals_ns"][0] / 1e9 for row in counted],
        [row["ttft_ns"] / 1e9 for row in rows[prompts.count :]],
        0 if link is None else link.sent_bytes("a") - before,
        early_share(run.events.to_pylist(), {row["request_id"]: row["first_token_ns"] for row in counted}),
        [row["output"] for row in rows],
    )


def early_share(events: Sequence[dict[str, Any]], first_token_ns: dict[int, int]) -> float:
    """Of the bytes that went from host to host, the share that had arrived when its request's first token was there."""
    arrived, early = 0, 0
    for event in events:
        if event["kind"] == "transfer" and event["tier"] == "dram>dram" and event["request_id"] in first_token_ns:
            arrived += event["bytes"]
            early += event["bytes"] * (event["time_ns"] <= first_token_ns[event["request_id"]])
    return early / arrived if arrived else 0.0


def compare(bits_per_s: float, delay_s: float, prompts: Prompts, folder: Path) -> list[Played]:
    """With streaming and without over one link. Raises `LinkUnavailable` or `BenchmarkError`."""
    played: list[Played] = []
    with slow_link(bits_per_s, delay_s) as link:
        for streaming in (True, False):
            played.append(play(prompts, streaming, link, folder))
            shown = played[-1]
            say(
                f"{bits_per_s / 1e6:g} Mbit/s, streaming {streaming}: prompt {_told(shown.prompt_s)} s, "
                f"first token {_told(shown.ttft_s)} s, second {_told(shown.handed_over_s)} s later, "
                f"first tokens of {prompts.burst} at once {_each(shown.burst_ttft_s)} s, "
                f"{shown.sent_bytes / 1e6:.1f} MB sent"
            )
    return played


def _told(values_s: Sequence[float]) -> str:
    """Median and best."""
    return f"{statistics.median(values_s):.2f} ({min(values_s):.2f})"


def _each(values_s: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in sorted(values_s))


def rows_of(results: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a bandwidth."""
    rows: list[dict[str, Any]] = []
    for entry in results["links"]:
        with_it, without = sorted(entry["played"], key=lambda played: not played["streaming"])
        rows.append(
            {
                "mbits": entry["bits_per_s"] / 1e6,
                "transfer_s": results["prompt_bytes"] * 8 / entry["bits_per_s"],
                "prompt_s": with_it["prompt_s"],
                "ttft_s": (with_it["ttft_s"], without["ttft_s"]),
                "handed_over_s": (with_it["handed_over_s"], without["handed_over_s"]),
                "burst_ttft_s": (with_it["burst_ttft_s"], without["burst_ttft_s"]),
                "early_share": with_it["early_share"],
            }
        )
    return sorted(rows, key=lambda row: row["mbits"])


def shown(results: dict[str, Any]) -> str:
    head = (
        "link, Mbit/s",
        "a prompt's KV alone on it, s",
        "computing the prompt, s",
        "TTFT, s: streaming",
        "not",
        "first to second token, s: streaming",
        "not",
        "streaming: bytes there before the first token",
        "first tokens of prompts that come at once, s: streaming",
        "not",
    )
    return table(
        head,
        (
            (
                f"{row['mbits']:g}",
                f"{row['transfer_s']:.2f}",
                _told(row["prompt_s"]),
                *map(_told, row["ttft_s"]),
                *map(_told, row["handed_over_s"]),
                f"{row['early_share']:.0%}",
                *map(_each, row["burst_ttft_s"]),
            )
            for row in rows_of(results)
        ),
    )


def draw(results: dict[str, Any], path: Path) -> None:
    """Seconds until the first and the second token, by bandwidth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = rows_of(results)
    mbits = [row["mbits"] for row in rows]
    figure, (rest, burst) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for index, (label, style) in enumerate((("streaming", "o-"), ("all at the end", "s--"))):
        gap = [statistics.median(row["handed_over_s"][index]) for row in rows]
        rest.plot(mbits, gap, style, color=f"C{index}", label=f"{label}, median and best")
        rest.fill_between(mbits, [min(row["handed_over_s"][index]) for row in rows], gap, color=f"C{index}", alpha=0.2)
        ttft = [statistics.mean(row["burst_ttft_s"][index]) for row in rows]
        burst.plot(mbits, ttft, style, color=f"C{index}", label=label)
    rest.plot(mbits, [row["transfer_s"] for row in rows], "k:", label="a prompt's bytes over the bandwidth")
    for axes, title in (
        (rest, "lone prompts: first to second token, s"),
        (burst, f"{results['prompts']['burst']} prompts at once: mean TTFT, s"),
    ):
        axes.set_xscale("log")
        axes.set_xticks(mbits, [f"{value:g}" for value in mbits])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("link, Mbit/s")
        axes.set_ylabel(title)
        axes.legend()
    figure.suptitle(f"prompts of {results['prompts']['tokens']} tokens, {results['prompt_bytes'] / 1e6:.0f} MB of KV")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slow_link.py", description="Streaming over a slow link.")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="folder of results and the plot")
    parser.add_argument("--mbits", type=positive, nargs="+", default=[50, 100, 200, 400, 800], help="bandwidths")
    parser.add_argument("--delay-ms", type=float, default=5.0, help="of the link, in each direction; 0: none")
    parser.add_argument("--tokens", type=positive, default=Prompts.tokens, help="of a prompt")
    parser.add_argument("--prompts", type=positive, default=Prompts.count, help="in each run")
    parser.add_argument("--burst", type=positive, default=Prompts.burst, help="prompts at once at the end of a run")
    parser.add_argument("--every-s", type=float, default=Prompts.every_s, help="seconds from prompt to prompt")
    parser.add_argument("--draw", action="store_true", help="only draw what is in the folder")
    return parser.parse_args(arguments)


def measured(options: argparse.Namespace, command: str) -> dict[str, Any]:
    prompts = Prompts(options.tokens, options.prompts, options.every_s, options.burst)
    links: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mcjax-slow-link-") as folder:
        reference = play(prompts, True, None, Path(folder))
        for mbits in options.mbits:
            played = compare(mbits * 1e6, options.delay_ms / 1000, prompts, Path(folder))
            for one in played:
                if one.tokens != reference.tokens:
                    raise BenchmarkError(f"{mbits} Mbit/s, streaming {one.streaming}: other tokens than in one process")
            links.append({"bits_per_s": mbits * 1e6, "played": [asdict(one) for one in played]})
    return {
        "command": command,
        "machine": machine(),
        "load": os.getloadavg()[0],
        "delay_s": options.delay_ms / 1000,
        "prompts": asdict(prompts),
        "prompt_bytes": prompt_bytes(prompts),
        "links": links,
    }


def main(arguments: Sequence[str]) -> int:
    options = parsed(arguments)
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    file = out / "slow_link.json"
    if not options.draw:
        try:
            results = measured(options, shlex.join(["python", "benchmarks/slow_link.py", *arguments]))
        except (LinkUnavailable, BenchmarkError) as problem:
            say(f"slow_link: {problem}")
            return 1
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    results = json.loads(file.read_text(encoding="utf-8"))
    print(shown(results), end="")
    draw(results, out / "slow_link.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
