"""A kernel of the user's own, named in the config: in one process, in workers, and kept with the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest_app import Answer, runs

import mcjax as package
from mcjax.app.schema.check import check
from mcjax.errors import ConfigError

Command = Callable[..., Answer]

KERNEL = """
from mcjax.kernels.attention.pages import places_of, write
from mcjax.kernels.attention.reference import paged_attention

def attention(queries, keys, values, pages, layer, page_table, positions, sharpness=1.0):
    import jax.numpy as jnp
    places = places_of(pages, page_table, positions, "tokens_first")
    pages = write(pages, layer, places, jnp.stack([keys, values], axis=2))
    return paged_attention(queries * sharpness, pages, layer, page_table, positions), pages
"""
RUN = (
    *("workload.sessions=2", "workload.turns=2", "workload.rate_per_s=50"),
    *("track.sinks.0.overview=false", "cluster=1m"),
    *("backend.chunk_tokens=64", "backend.max_context_tokens=2048", "backend.pages=128", "backend.pool_blocks=128"),
)


@pytest.mark.check_long
@pytest.mark.parametrize("launcher", ["embedded", "processes"])
def test_a_function_in_the_working_directory(fresh: Command, place: Path, launcher: str) -> None:
    (place / "my_kernels.py").write_text(KERNEL)
    answer = fresh(*RUN, f"launcher={launcher}", "kernels.decode={_target_: my_kernels.attention}")
    assert answer.status == 0, answer.err
    run = package.load(runs(place)[0])
    assert run.summary["verified"]["requests"] == run.summary["requests"]["completed"] > 0
    assert (run.directory / "strategies").is_dir(), "its source is kept with the run"


def test_an_argument_that_it_does_not_take_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "my_kernels.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(place)
    from mcjax.app.compose import compose, plain_of

    plain = plain_of(compose([*RUN, "kernels.decode={_target_: my_kernels.attention, sharpness: 2.0}"]))
    check(plain)
    plain["kernels"]["decode"] = {"_target_": "my_kernels.attention", "sharpnes": 2.0}
    with pytest.raises(ConfigError, match=r"kernels\.decode\.sharpnes.*did you mean sharpness"):
        check(plain)
