"""One worker process: replays what it is told, one task after the other, until its standard input ends."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

from mcjax.app.hit_rates.belady import Belady
from mcjax.app.hit_rates.replay import replay
from mcjax.app.hit_rates.workers import Stock, Task

BELADY = "belady"
"""The policy that knows the trace."""


def play(stock: Stock, task: Task) -> list[int]:
    """One replay, with strategies of its own: how many blocks of each prompt were there."""
    chains = stock.traces[task.trace]
    if task.policy == BELADY:
        eviction: Any = Belady([blocks[: task.capacity] for blocks in chains.blocks])
    else:
        eviction = copy.deepcopy(stock.policies[task.policy])
    return replay(chains, task.capacity, eviction, copy.deepcopy(stock.watermark))


def main() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what a strategy prints must not get between the answers

    def read() -> Any:
        size = source.read(8)
        return pickle.loads(source.read(int.from_bytes(size, "little"))) if len(size) == 8 else None

    stock = read()
    while (task := read()) is not None:
        try:
            answer: Any = play(stock, task)
        except Exception as problem:
            answer = problem
        sink.write(pickle.dumps(answer))
        sink.flush()


if __name__ == "__main__":
    main()
