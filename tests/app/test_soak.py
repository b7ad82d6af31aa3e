"""Thousands of requests whose clients go away at any time, and steps that raise: nothing is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from conftest_app import ROOT

REQUESTS = 5000
MAY_GROW_MIB = 4
"""Of some 400: what allocators and the interpreter's own tables are given. A block (16 KiB) kept by every second
request would be ten times that."""


@pytest.mark.check_long
@pytest.mark.timeout(900)
def test_memory_and_threads_are_the_same_after_thousands_of_requests() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/app/soak.py"), str(REQUESTS), "7"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stderr  # the run ends with `check_idle`: no page, pin or slot is held
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["problems"] == []
    assert sum(told["ends"].values()) == REQUESTS
    assert told["ends"]["completed"] > REQUESTS / 2
    assert told["ends"]["cancelled"] > REQUESTS / 10
    assert told["raised"] > REQUESTS / 200
    assert told["rss_last_quarter_mib"] - told["rss_first_quarter_mib"] < MAY_GROW_MIB
    assert len(told["threads"]) == 1
    assert told["threads_left"] == 0
