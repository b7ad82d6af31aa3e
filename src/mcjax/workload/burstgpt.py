"""BurstGPT traces: months of ChatGPT and GPT-4 requests on campus, by arrival and lengths."""

from __future__ import annotations

from collections.abc import Iterable

from mcjax.errors import ConfigError, TraceError
from mcjax.types import NS_PER_S
from mcjax.workload.files import MAX_SECONDS, csv_lines, opened
from mcjax.workload.replay import Lengths, PrivateReplay, Replaying

COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
SOURCE = "The traces are in data/ of HPMLL/BurstGPT (CC-BY-4.0; large files, see its releases)"


def parse_rows(
    lines: Iterable[bytes],
    path: str,
    limit: int | None = None,
    keep_failed: bool = False,
    model: str | None = None,
    log_type: str | None = None,
) -> Lengths:
    """The rows that are asked for, in the order of the file; `limit` counts those. Raises `TraceError`."""
    rows = Lengths()
    for line in csv_lines(lines, path, COLUMNS):
        if limit is not None and len(rows) >= limit:
            break
        arrival_s = line.number_of("Timestamp", MAX_SECONDS)
        input_tokens, output_tokens = line.whole("Request tokens", 0), line.whole("Response tokens", 0)
        failed = output_tokens == 0 or input_tokens == 0
        wanted = model in (None, line.text("Model")) and log_type in (None, line.text("Log Type"))
        if wanted and (keep_failed or not failed):
            rows.append(round(arrival_s * NS_PER_S), max(1, input_tokens), output_tokens)
    if len(rows) == 0:
        raise TraceError(path, 1, "Timestamp", "the file holds no rows, or none of the model and log type asked for")
    return rows


class BurstGPT(PrivateReplay):
    """Replays a BurstGPT CSV, open loop. Times are as in the file: `slice` cuts a part out of its months.

    Extra columns (newer files have a session) are passed over. Nothing is known of content: no block is shared.

    Args:
        path: the file: as given, else under `$MCJAX_TRACES`, else under `./traces`.
        seed: unused: nothing here is drawn.
        block_tokens, max_tokens, rate_scale, limit: see `replay.Replaying`.
        keep_failed: also send the requests that failed then (0 response tokens).
        model: only rows of this `Model`, such as `ChatGPT` or `GPT-4`; None for all.
        log_type: only rows of this `Log Type`, such as `Conversation log` or `API log`; None for all.

    Source: Y. Wang et al., BurstGPT, arXiv 2401.17644.
    """

    def __init__(
        self,
        path: str,
        seed: int = 0,
        block_tokens: int = 512,
        max_tokens: int = 2048,
        rate_scale: float = 1.0,
        limit: int | None = None,
        keep_failed: bool = False,
        model: str | None = None,
        log_type: str | None = None,
    ):
        for key, value in (("model", model), ("log_type", log_type)):
            if value is not None and not value.strip():
                raise ConfigError(f"workload.{key}", value, "give a name as the file has it, or null for all")
        replaying = Replaying(block_tokens, max_tokens, rate_scale, limit)
        lines, file, inputs = opened(path, SOURCE)
        rows = parse_rows(lines, file, limit, keep_failed, model, log_type)
        super().__init__("burstgpt", rows, replaying, inputs)
