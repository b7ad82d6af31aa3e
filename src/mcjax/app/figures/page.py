"""`mcjax figures`: compute every figure and write `docs/figures.md`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from mcjax.app.figures import analytic, hit_rate, published, simulated
from mcjax.app.figures.row import Row
from mcjax.errors import ConfigError, McjaxError
from mcjax.workload.mooncake import Mooncake
from mcjax.workload.mooncake_file import Rows, find_trace

COMMAND = "mcjax figures"

HEAD = f"""\
# Published figures

What Mooncake's FAST'25 paper prints, as far as public data can reproduce it, beside what mcjax computes. This page is
written by

```
{COMMAND}
```

with `MCJAX_TRACES` naming the folder of the two public traces (FAST25-release of kvcache-ai/Mooncake). It takes
about three minutes: seven runs of 12,031 requests, two of 3,993. Published values of plots were read off their vector
graphics, to about 1 % of the axis. `tests/figures` holds each row to the bound that is promised for it.

How it is computed:

- A1, A4 to A7 and A13 follow from the traces' columns, the formulas of `docs/cost-models.md` and the fit named there.
  Only A6 and the bars of Fig 14 were used in that fit; A7, A8, A9 and A10 are predictions of it.
- A2 and A3 replay the traces' blocks, one request at a time, through the real pool (`mcjax.kvpool.pool`) with LRU, ids
  cut into the paper's blocks of 256 tokens. With whole ids a partial last block takes a slot of 512, and two
  points of the synthetic trace (8 M and 10 M tokens) end up 1.1 and 1.3 points low.
  `mcjax experiment=fig9_hit_rate` draws the same curves for every eviction strategy and an offline bound, of whole
  ids and full blocks only ([eviction.md](eviction.md), "Hit rates").
- A8 to A12 are runs of `experiment=fast25_prefill_only`: outputs of one token, the real conductor and pools, 3 M tokens
  of LRU a node, FAST'25's A800 nodes, transfers that contend. There are 16 nodes; those that do not compute prompts
  only receive the KV. `mcjax experiment=fast25_figure5` is A12 with full tables (add `-m` and the policies).

"""

PARTS = (
    ("Traces and sizes", ("A1", "A4", "A5")),
    ("Prefix hits", ("A2", "A3", "A11")),
    ("Prefill", ("A6", "A7", "A8", "A9", "A10")),
    ("Time to the first token", ("A12",)),
    ("Transfer", ("A13",)),
    ("One request (Fig 14)", ("Fig 14",)),
)

NAMES = {"conversation": "mooncake_fast25_conversation.jsonl", "synthetic": "mooncake_fast25_synthetic.jsonl"}
"""What the traces are called where they were renamed; their own names are tried first."""


def trace_path(name: str) -> Path:
    """The file of one of `published.TRACES`. Raises `ConfigError` that lists the places tried."""
    try:
        return find_trace(f"{name}_trace.jsonl")
    except ConfigError as problem:
        try:
            return find_trace(NAMES[name])
        except ConfigError:
            raise problem from None


def fast_rows(traces: dict[str, Rows]) -> list[Row]:
    """Every row that takes no time."""
    rows = [*analytic.kv_rows(), *analytic.break_even_rows(), *analytic.prefill_rows()]
    for name, trace in traces.items():
        rows += [*analytic.trace_rows(name, trace), analytic.no_cache_row(name, trace)]
    return [*rows, *analytic.transfer_rows(), *analytic.bar_rows()]


def pool_rows(traces: dict[str, Rows]) -> list[Row]:
    """A2 and A3, some 15 s of CPU."""
    rows: list[Row] = []
    for name, trace in traces.items():
        rows += [hit_rate.endless_row(name, trace), *hit_rate.capacity_rows(name, trace)]
    return rows


def run_rows(runs: simulated.Runs, traces: dict[str, Rows]) -> list[Row]:
    """A8 to A12, some three minutes of CPU."""
    savings = [
        simulated.saving_row(runs, name, analytic.no_cache_row(name, trace).ours) for name, trace in traces.items()
    ]
    return [
        *simulated.global_pool_rows(runs),
        *savings,
        simulated.local_cache_row(runs),
        *simulated.ttft_rows(runs),
    ]


def line(row: Row) -> str:
    """A row as the page has it. Percentages differ by points, everything else by a share."""
    if row.unit == "%":
        difference = f"{round(row.difference, 1) + 0.0:+.1f} points"  # adding 0.0 makes -0.0 a plain zero
    else:
        difference = f"{round(100 * row.error, 1) + 0.0:+.1f} %"
    values = f"{_value(row, row.ours)} | {_value(row, row.published)}"
    return f"| {row.anchor} | {row.what} | {values} | {difference} | {row.why} |"


def _value(row: Row, value: float) -> str:
    if row.unit == "%":
        return f"{value:.1f} %"
    digits = f"{value:,.0f}" if float(value).is_integer() and value >= 10 else f"{value:.4g}"
    return f"{digits} {row.unit}".rstrip()


def render(rows: Iterable[Row]) -> str:
    """The whole page, in Markdown."""
    kept = list(rows)
    lines: list[str] = []
    for title, anchors in PARTS:
        lines += [f"## {title}", "", "| | | ours | published | difference | why |", "|---|---|---|---|---|---|"]
        lines += [line(row) for anchor in anchors for row in kept if row.anchor == anchor]
        lines.append("")
    return HEAD + "\n".join(lines)


def compute(say: Callable[[str], None]) -> list[Row]:
    """Every row."""
    paths = {name: trace_path(name) for name in published.TRACES}
    traces = {name: Mooncake(str(path)).rows for name, path in paths.items()}
    say("formulas")
    rows = fast_rows(traces)
    say("pools")
    rows += pool_rows(traces)
    say("runs")
    return [*rows, *run_rows(simulated.Runs(paths), traces)]


def command(arguments: Sequence[str]) -> int:
    """`mcjax figures [--output FILE]`. Returns the exit status."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Compute the published figures, and write the page.")
    parser.add_argument("--output", default="docs/figures.md", help="the page (default: %(default)s)")
    options = parser.parse_args(list(arguments))
    try:
        page = render(compute(lambda stage: print(f"mcjax: {stage}", file=sys.stderr)))
        Path(options.output).write_text(page, encoding="utf-8")
    except McjaxError as problem:
        print(f"mcjax: {problem}", file=sys.stderr)
        return 2
    except OSError as problem:
        print(f"mcjax: {options.output} cannot be written: {problem.strerror}", file=sys.stderr)
        return 2
    print(options.output)
    return 0
