"""Runs in DynoSim's interpreter: `python dynosim_replay.py TRACE TARGET`. Imports nothing of mcjax."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version


def main(trace: str, target: str) -> None:
    from dynamo.replay import run_trace_replay  # pyright: ignore[reportMissingImports]

    report = run_trace_replay(
        trace,
        prefill_engine_args=json.dumps({"engine": {"block_size": 512, "worker_type": "prefill"}}),
        decode_engine_args=json.dumps({"engine": {"block_size": 512, "worker_type": "decode"}}),
        num_prefill_workers=8,
        num_decode_workers=8,
        router_mode="kv_router",
    )
    with open(target, "w") as file:
        json.dump({"version": version("ai-dynamo-runtime"), "summary": dict(report.summary)}, file, default=str)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
