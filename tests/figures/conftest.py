"""The public traces' columns, and the runs that several figures share."""

from __future__ import annotations

import os

import pytest

from mcjax.app.figures import page, published
from mcjax.app.figures.simulated import Runs
from mcjax.errors import ConfigError
from mcjax.workload.mooncake import Mooncake
from mcjax.workload.mooncake_file import Rows


@pytest.fixture(scope="session")
def trace_paths():
    """Paths by name. Skips where the traces are not, unless MCJAX_TRACES says that they are."""
    try:
        return {name: page.trace_path(name) for name in published.TRACES}
    except ConfigError as problem:
        if os.environ.get("MCJAX_TRACES"):
            pytest.fail(str(problem))
        pytest.skip(str(problem))


@pytest.fixture(scope="session")
def trace_rows(trace_paths) -> dict[str, Rows]:
    return {name: Mooncake(str(path)).rows for name, path in trace_paths.items()}


@pytest.fixture(scope="session")
def runs(trace_paths) -> Runs:
    """Each run is made once a session."""
    return Runs(trace_paths)
