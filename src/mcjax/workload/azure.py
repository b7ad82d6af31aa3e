"""Azure LLM inference traces of 2023: arrival and lengths of single requests, nothing about what prompts share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime

from mcjax.errors import TraceError
from mcjax.types import NS_PER_S
from mcjax.workload.files import CsvLine, csv_lines, opened
from mcjax.workload.replay import Lengths, PrivateReplay, Replaying

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
SOURCE = (
    "The traces are in data/ of Azure/AzurePublicDataset (CC-BY-4.0): AzureLLMInferenceTrace_conv.csv and _code.csv"
)
STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|\+00:00)?", re.ASCII)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def stamp_ns(line: CsvLine, name: str) -> int:
    """Nanoseconds since 1970 of a UTC time such as `2023-11-16 18:17:03.9799600`; every digit counts."""
    matched = STAMP.fullmatch(line.text(name))
    try:
        if matched is None:
            raise ValueError
        whole_s = int((datetime.fromisoformat(matched[1]).replace(tzinfo=UTC) - EPOCH).total_seconds())
    except ValueError:
        problem = f"must be a UTC time such as 2023-11-16 18:17:03.9799600, not {line.text(name)[:40]!r}"
        raise line.error(name, problem) from None
    return whole_s * NS_PER_S + int((matched[2] or "0").ljust(9, "0"))


def parse_rows(lines: Iterable[bytes], path: str, limit: int | None = None) -> Lengths:
    """Rows in the order of the file, times counted from the earliest. Raises `TraceError`."""
    rows = Lengths()
    for line in csv_lines(lines, path, COLUMNS):
        if limit is not None and len(rows) >= limit:
            break
        rows.append(stamp_ns(line, COLUMNS[0]), line.whole(COLUMNS[1], 1), line.whole(COLUMNS[2], 0))
    if len(rows) == 0:
        raise TraceError(path, 1, COLUMNS[0], "the file holds no rows")
    first_ns = min(rows.arrival_ns)
    for index, time_ns in enumerate(rows.arrival_ns):
        rows.arrival_ns[index] = time_ns - first_ns
    return rows


class Azure(PrivateReplay):
    """Replays an Azure 2023 CSV (also the 2024 ones, which have the same columns), open loop.

    The file says nothing about content, so no block is shared: use it for load, not for cache hits.

    Args:
        path: the file: as given, else under `$MCJAX_TRACES`, else under `./traces`.
        seed: unused: nothing here is drawn.
        block_tokens, max_tokens, rate_scale, limit: see `replay.Replaying`.

    Source: P. Patel et al., Splitwise, ISCA 2024.
    """

    def __init__(
        self,
        path: str,
        seed: int = 0,
        block_tokens: int = 512,
        max_tokens: int = 2048,
        rate_scale: float = 1.0,
        limit: int | None = None,
    ):
        replaying = Replaying(block_tokens, max_tokens, rate_scale, limit)
        lines, file, inputs = opened(path, SOURCE)
        super().__init__("azure", parse_rows(lines, file, limit), replaying, inputs)
