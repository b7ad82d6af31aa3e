"""What a run shows on the terminal: live progress, and one table at its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from mcjax.types import NS_PER_S

REFRESH_S = 0.2
PLAIN_LINE_S = 10.0


@dataclass(slots=True)
class Figures:
    """Where a run stands: counts since it began, at `now_ns` of run time."""

    now_ns: int = 0
    submitted: int = 0
    completed: int = 0
    running: int = 0
    """Requests submitted and not yet ended."""
    not_served: int = 0
    """Requests rejected, cancelled or failed."""
    output_tokens: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    """Prompt tokens that came from the cache."""


class ProgressDisplay(Protocol):
    """What the run tells of its way. Cheap to call often: it draws only now and then."""

    def stage(self, what: str, share_done: float = 0.0) -> None:
        """Getting ready: loading weights, compiling, measuring."""
        ...

    def update(self, figures: Figures) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is known of a run as it starts: the kind of its time, how many requests will come (0: unknown), and where it
    is kept (None: nowhere)."""

    virtual: bool
    total_requests: int = 0
    directory: Path | None = None


OpenProgress = Callable[[Outlook], ProgressDisplay]
"""Makes the display of one run."""


class NullProgress:
    """Shows nothing."""

    def stage(self, what: str, share_done: float = 0.0) -> None:
        pass

    def update(self, figures: Figures) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


class Progress:
    """A live line with rich on a terminal, an occasional plain line elsewhere (files, pipes, notebooks).

    `total_requests` (0: unknown) gives a bar and the time left. `virtual` names the kind of time that passes.
    """

    def __init__(
        self,
        *,
        virtual: bool,
        total_requests: int = 0,
        output: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        from rich.console import Console

        self._virtual = virtual
        self._total = total_requests
        self._console = Console(file=output or sys.stdout)
        self._rich = self._console.is_terminal and not self._console.is_jupyter
        self._period_s = REFRESH_S if self._rich else PLAIN_LINE_S
        self._clock = clock
        self._started = self._drawn = clock()
        self._stage = ""
        self._live: Any = None

    def __enter__(self) -> Self:
        self._started = self._drawn = self._clock()
        if self._rich:
            from rich.live import Live

            # Drawn from here only: a thread of rich's own would take the interpreter from a busy run.
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def stage(self, what: str, share_done: float = 0.0) -> None:
        new = what != self._stage
        self._stage = what
        if new or self._due():
            self._draw(f"{what} {share_done:.0%}" if share_done else what, share_done)

    def update(self, figures: Figures) -> None:
        if self._due():
            ended = figures.completed + figures.not_served
            self._draw(
                progress_line(figures, self._clock() - self._started, self._virtual, self._total),
                ended / self._total if self._total else 0.0,
            )

    def _due(self) -> bool:
        return self._clock() - self._drawn >= self._period_s

    def _draw(self, line: str, share_done: float) -> None:
        self._drawn = self._clock()
        if self._live is None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        bar = ProgressBar(total=1.0, completed=min(share_done, 1.0), width=min(self._console.width, 60))
        text = Text(line, no_wrap=False)
        self._live.update(Group(bar, text) if share_done else text, refresh=True)


def shown(outlook: Outlook) -> ProgressDisplay:
    """The display of a run that somebody watches."""
    return Progress(virtual=outlook.virtual, total_requests=outlook.total_requests)


def hidden(outlook: Outlook) -> ProgressDisplay:
    """None for a run that nobody does."""
    return NullProgress()


def progress_line(figures: Figures, real_s: float, virtual: bool, total_requests: int) -> str:
    """One line of progress; rates are per second of run time, the time left is real."""
    now_s = figures.now_ns / NS_PER_S
    ended = figures.completed + figures.not_served
    of_total = f"/{total_requests:,}" if total_requests else ""
    parts = [
        f"{figures.submitted:,}{of_total} submitted",
        f"{figures.completed:,} completed",
        f"{figures.running:,} running",
    ]
    if figures.not_served:
        parts.append(f"{figures.not_served:,} not served")
    if now_s > 0:
        parts.append(f"{figures.output_tokens / now_s:,.0f} tokens/s")
    if figures.prompt_tokens:
        parts.append(f"{figures.hit_tokens / figures.prompt_tokens:.1%} of prompt tokens hit")
    parts.append(f"{duration(now_s)} virtual in {duration(real_s)} real" if virtual else duration(real_s))
    if total_requests and 0 < ended < total_requests:
        parts.append(f"{duration(real_s * (total_requests - ended) / ended)} left")
    return ", ".join(parts)


def print_summary(summary: Mapping[str, Any], directory: object = None, output: TextIO | None = None) -> None:
    """The run's figures as one table, then the run directory."""
    from rich.console import Console

    console = Console(file=output or sys.stdout)
    console.print(summary_table(summary))
    if directory is not None:
        console.print(f"run directory: {directory}", markup=False, highlight=False, soft_wrap=True)


def summary_table(summary: Mapping[str, Any]) -> Any:
    """A `rich.table.Table`."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_header=False, title=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary_rows(summary):
        table.add_row(Text(name), Text(value))
    return table


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures that a person wants to see, as (name, text)."""
    if "check" in summary:
        return _check_rows(summary)
    if "hits" in summary:
        return _hits_rows(summary)
    counts = summary["requests"]
    ended = ", ".join(f"{counts[state]:,} {state}" for state in ("completed", "rejected", "cancelled", "failed"))
    tiers: Mapping[str, int] = summary["tokens_by_tier"]
    prompt = sum(tiers.values())
    by_tier = ", ".join(
        f"{name.replace('_', ' ')} {_percent(tokens / prompt if prompt else None)}"
        for name, tokens in tiers.items()
        if tokens or name not in ("hbm", "ssd")
    )
    missed: Mapping[str, int | None] = summary["missed_tokens"]
    causes = ", ".join(f"{cause} {_percent(tokens / prompt)}" for cause, tokens in missed.items() if tokens)
    moved: Mapping[str, int] = summary["bytes_by_transport"]
    rate = summary["output_tokens_per_s"]
    goodput = summary["goodput_rps"]
    met = _percent(summary["slo_attainment"])
    verified = summary.get("verified")
    proof: list[tuple[str, str]] = []
    if verified and "kv_blocks" in verified:
        found = "{requests:,} requests, {tokens:,} tokens, {kv_blocks:,} KV blocks".format(**verified)
        proof = [("equal to colocated", found)]
    elif verified:
        found = "{requests:,} requests, {tokens:,} tokens, {differing:,} of them other choices, by {largest_gap:.2g}"
        proof = [("equal within margin", found.format(**verified))]
    return [
        ("requests", f"{counts['submitted']:,} submitted: {ended}"),
        (
            "time",
            f"{duration(summary['duration_s'])} of run time in {duration(summary['wall_s'])} "
            f"({summary['backend']}, seed {summary['seed']})",
        ),
        ("time to first token", _spread(summary["ttft_s"])),
        ("time between tokens", _spread(summary["tbt_s"])),
        ("longest 10 % of intervals", _spread(summary["tbt_tail_s"])),
        ("goodput", "no data" if goodput is None else f"{goodput:,.3g} requests/s within SLO ({met} of submitted)"),
        ("output", "no data" if rate is None else f"{rate:,.0f} tokens/s"),
        ("prompt tokens by source", f"{by_tier}; hit rate {_percent(summary['prefix_hit_rate']['token'])}"),
        *([("computed because", causes)] if causes else []),
        ("bytes by transport", ", ".join(f"{name} {size(count)}" for name, count in moved.items()) or "none"),
        ("decode ran during", f"{_percent(summary['decode_during_prefill_share'])} of prefill time"),
        *_engine_rows(summary),
        *_process_rows(summary),
        *proof,
    ]


def _engine_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a real engine says of its programs and its memory."""
    if "padding" not in summary:
        return []
    prefill, decode = summary["padding"]["prefill"], summary["padding"]["decode"]
    expected = "" if prefill["expected"] is None else f"{_percent(prefill['expected'])} expected, "
    widths, batches = (" ".join(str(size) for size in sizes) for sizes in (prefill["widths"], decode["batches"]))
    padding = (
        f"{_percent(prefill['actual'])} of prefill tokens ({expected}widths {widths}), "
        f"{_percent(decode['actual'])} of decode rows (batches {batches})"
    )
    rows = [("padding", padding)]
    for name, memory in summary["device_memory"].items():
        sizes = ", ".join(f"{part} {size(memory[f'{part}_bytes'])}" for part in ("weights", "pages", "workspace"))
        rows.append((f"memory of {name}", f"{' '.join(memory['devices'])}: {sizes}"))
    late = summary["compilations_after_warm_up"]
    return [*rows, ("compiled after warm-up", f"{late} programs: see the events of kind compile")] if late else rows


def _process_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What there is to say of worker processes."""
    if "processes" not in summary:
        return []
    processes = summary["processes"]
    workers: Mapping[str, Any] = processes["workers"]
    costs = [worker["order_overhead_s"] for worker in workers.values() if worker["order_overhead_s"] is not None]
    read = sum(worker["bytes_read"] or 0 for worker in workers.values())
    rows = [
        (
            "processes",
            f"{len(workers)}, ready after {duration(processes['start_s'])}; {size(read)} read from each other by "
            f"{processes['transport']}; a plan costs {duration(max(costs, default=None))} beyond its steps",
        )
    ]
    return rows + [(f"death of {name}", worker["death"]) for name, worker in workers.items() if worker["death"]]


def _check_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A campaign of checked schedules: what was done to the requests, and what became of them."""
    check = summary["check"]
    faults = ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in check["faults"].items())
    states = ", ".join(f"{count:,} {state}" for state, count in check["states"].items())
    return [
        ("schedules", f"{check['schedules']:,} in {duration(summary['wall_s'])}, {check['failed_schedules']:,} failed"),
        ("requests", f"{check['requests']:,}: {states}"),
        ("faults injected", faults or "none"),
        ("found", "wrong tokens, leaks, lost or hanging requests" if check["failed_schedules"] else "nothing wrong"),
        ("tables", f"of the schedule of seed {check['kept_seed']}"),
    ]


def _hits_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Replays of traces through one pool: a line a policy, a column a capacity."""
    hits = summary["hits"]
    shown: dict[str, dict[str, dict[int, float]]] = {}
    for row in hits["rows"]:
        shown.setdefault(row["trace"], {}).setdefault(row["policy"], {})[row["capacity_tokens"]] = row["hit_rate"]
    lines = [("replays", f"{hits['replays']} in {duration(summary['wall_s'])} on {hits['processes']} processes")]
    for trace, policies in shown.items():
        capacities = sorted({capacity for rates in policies.values() for capacity in rates})
        labels = [_short(capacity) for capacity in capacities]
        width = 1 + max(4, *map(len, labels))
        lines.append((f"{trace}, %", "".join(f"{label:>{width}}" for label in labels)))
        for policy, rates in policies.items():
            cells = (f"{100 * rates[capacity]:.1f}" if capacity in rates else "" for capacity in capacities)
            lines.append((f"  {policy}", "".join(f"{cell:>{width}}" for cell in cells)))
    return lines


def _short(tokens: int) -> str:
    """A number of tokens in a few characters: 100k, 20M."""
    for factor, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if tokens >= factor:
            return f"{tokens / factor:.3g}{unit}"
    return str(tokens)


def duration(seconds: float | None) -> str:
    """Three significant digits in the unit that fits."""
    if seconds is None:
        return "no data"
    if seconds == 0:
        return "0 s"
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (120.0, 1.0, "s")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def size(count: int) -> str:
    """Bytes with a binary prefix."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.4g} {unit}"


def _spread(values: Mapping[str, float | None]) -> str:
    if values["mean"] is None:
        return "no data"
    return ", ".join(f"{name} {duration(values[name])}" for name in ("p50", "p90", "p99"))


def _percent(share: float | None) -> str:
    return "no data" if share is None else f"{share:.1%}"
