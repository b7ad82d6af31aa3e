"""ServeGen: production traffic as a superposition of clients, each with rates, burstiness and lengths of its own."""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import Iterator, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import ConfigError
from mcjax.workload.arrivals import unit_gaps
from mcjax.workload.files import find
from mcjax.workload.replay import Lengths, OneTurn, PrivateReplay, Replaying
from mcjax.workload.servegen_file import Client, Window, read_clients
from mcjax.workload.streams import ARRIVALS, NS_PER_US, SESSION, number, rate, stream, whole

SOURCE = "The client files are in data/ of alibaba/ServeGen (Apache-2.0), a folder a model"


class ServeGen:
    """Requests of `hours` from `start_s` on, as the chosen clients would send them.

    In each window of a client's file, gaps are Gamma or Weibull with the file's shape, and scaled so that the mean
    rate is the file's (the fitted scales miss it, by a factor of two and more in bursty windows). The process is
    stationary where it begins, and a gap that reaches into the next window goes on there at that window's pace. Lengths
    are drawn independently from the client's distributions. Each client has streams of its own: taking one away leaves
    the others as they were. Content is unknown, so every prompt is private. Requests bear `client-N` as tenant.

    Args:
        path: a model's folder: as given, else under `$MCJAX_TRACES`, else under `./traces`.
        seed: of the `workload` stream; 0 or more.
        clients: numbers N of the `chunk-N` files; None for all in the folder.
        start_s: where in the files' time the workload begins.
        hours: how long it lasts.
        rate_scale: every client sends so many times more; the duration stays.
        block_tokens: block size of the (private) block ids.
        max_tokens: the limit that requests carry; answers are clipped to it.
    """

    def __init__(
        self,
        path: str,
        seed: int,
        clients: Sequence[int] | None = None,
        start_s: float = 0.0,
        hours: float = 1.0,
        rate_scale: float = 1.0,
        block_tokens: int = 512,
        max_tokens: int = 32_768,
    ):
        whole("seed", seed, 0)
        rate("rate_scale", rate_scale)
        self._start_s = number("start_s", start_s, 0)
        self._end_s = start_s + rate("hours", hours) * 3600
        self._replaying = Replaying(block_tokens, max_tokens)
        for client in clients or []:
            whole("clients", client, 0)
        if clients is not None and (not clients or len(set(clients)) < len(clients)):
            raise ConfigError("workload.clients", list(clients), "give each client once, or null for all")
        self.name = "servegen"
        self.block_tokens: int | None = block_tokens
        self._seed = seed
        self._rate_scale = rate_scale
        folder = find(path, SOURCE, folder=True)
        self._clients, self._inputs = read_clients(folder, None if clients is None else list(clients))
        self._drawn: PrivateReplay | None = None
        last_s = max(client.windows[-1].end_s for client in self._clients)
        if not any(window.rate_per_s > 0 for client in self._clients for window in self._within(client)):
            problem = f"no client sends anything from there for {hours:g} hours; the files go up to {last_s:g} s"
            raise ConfigError("workload.start_s", start_s, problem)

    def reseeded(self, seed: int) -> Self:
        """The same clients under another seed."""
        other = copy.copy(self)
        other._seed, other._drawn = seed, None
        return other

    @property
    def total_requests(self) -> int:
        return self._replay().total_requests

    def sessions(self) -> Iterator[OneTurn]:
        """One session a request, in order of arrival; ties in order of the clients."""
        return self._replay().sessions()

    def inputs(self) -> dict[str, str]:
        return dict(self._inputs)

    def _within(self, client: Client) -> list[Window]:
        """The client's windows inside the chosen time, cut to it."""
        cut: list[Window] = []
        for window in client.windows:
            start_s, end_s = max(window.start_s, self._start_s), min(window.end_s, self._end_s)
            if start_s < end_s:
                traffic = window.rate_per_s * self._rate_scale if window.family else 0.0
                cut.append(Window(start_s, end_s, traffic, window.family, window.shape))
        return cut

    def _replay(self) -> PrivateReplay:
        if self._drawn is None:
            columns = [self._draw(client) for client in self._clients]
            tenant = np.repeat(np.arange(len(columns)), [len(times) for times, _, _ in columns])
            times, inputs, outputs = (np.concatenate(column) for column in zip(*columns, strict=True))
            order = np.argsort(times, kind="stable")
            rows = Lengths(
                _column(times[order]),
                _column(inputs[order]),
                _column(outputs[order]),
                _column(tenant[order]),
                tuple(f"client-{client.number}" for client in self._clients),
            )
            self._drawn = PrivateReplay(self.name, rows, self._replaying, self._inputs)
        return self._drawn

    def _draw(self, client: Client) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Arrivals (ns from the workload's begin), input and output tokens of one client."""
        rng = stream(self._seed, ARRIVALS, client.number)
        times: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
        inputs: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
        outputs: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
        left: float | None = None  # what remains of the gap under way, in mean gaps
        for window in self._within(client):
            if window.rate_per_s <= 0:
                continue
            if left is None:
                left = _first_gap(rng, window)
            budget = window.rate_per_s * (window.end_s - window.start_s)
            points, left = _renewals(rng, window, left, budget)
            since_us = np.rint((window.start_s - self._start_s + points / window.rate_per_s) * 1e6).astype(np.int64)
            times.append(since_us * NS_PER_US)
            draws = stream(self._seed, SESSION, client.number, round(window.start_s))
            inputs.append(np.maximum(client.lengths(window.start_s, "input_tokens").draw(draws, len(points)), 1))
            outputs.append(client.lengths(window.start_s, "output_tokens").draw(draws, len(points)))
        return np.concatenate(times), np.concatenate(inputs), np.concatenate(outputs)


def _column(values: NDArray[np.int64]) -> array[int]:
    column: array[int] = array("q")
    column.frombytes(values.astype(np.int64).tobytes())
    return column


def _first_gap(rng: np.random.Generator, window: Window) -> float:
    """Time to the first arrival of a process that has gone on for ever: a gap that is met in proportion to its length,
    entered at a uniform point."""
    entered = rng.random()
    if window.family == "weibull":
        return float(entered * rng.gamma(1 + 1 / window.shape) ** (1 / window.shape) / math.gamma(1 + 1 / window.shape))
    return float(entered * rng.gamma(window.shape + 1) / window.shape)


def _renewals(
    rng: np.random.Generator, window: Window, first: float, budget: float
) -> tuple[NDArray[np.float64], float]:
    """Points in `[0, budget)` of a process of unit rate whose first is at `first`; and how far beyond the next is."""
    points = np.array([first])
    while points[-1] < budget:
        gaps = unit_gaps(rng, int((budget - points[-1]) * 1.1) + 16, window.family, window.shape)
        points = np.concatenate([points, points[-1] + np.cumsum(gaps)])
    inside = int(np.searchsorted(points, budget, side="left"))
    return points[:inside], float(points[inside] - budget)
