"""The shipped constants against the published points they come from, and the docs page against the report command."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.resources import files
from inspect import Parameter, signature
from pathlib import Path

import numpy as np
import pytest
import yaml

from mcjax.cost import published, report
from mcjax.cost.catalogue import fitted
from mcjax.cost.fit import fit_decode, fit_prefill
from mcjax.cost.roofline import Roofline
from mcjax.errors import ConfigError


def test_the_shipped_constants_are_the_stated_computation() -> None:
    own = fitted()
    linear, square = fit_prefill(published.CONTEXT_TOKENS, published.A800_PREFILL_S)
    assert own.prefill_ps_per_token == pytest.approx(linear, rel=1e-4)  # the notes rounded to 5 digits
    assert own.prefill_fs_per_token_squared == pytest.approx(square, rel=1e-4)
    constants = (own.decode_base_ns, own.decode_ns_per_sequence, own.decode_ps_per_context_token)
    assert constants == published.a800_decode_constants()


def test_fitted_reproduces_the_published_points() -> None:
    own = fitted()
    rows = report.a800_errors(own)
    assert max(abs(predicted / seconds - 1) for _, seconds, predicted in rows[:5]) < 0.015
    assert max(abs(predicted / seconds - 1) for _, seconds, predicted in rows[5:]) < 0.004
    milliseconds_a_token = [own.step_ns(1, tokens, 128).mean() / 1e6 for tokens in (8192, 131072)]
    assert milliseconds_a_token == pytest.approx([26.5, 30.8], abs=0.1)
    shape = report.batch_shape_errors(own)
    assert shape[-1][2] == pytest.approx(1.24, abs=0.001)
    assert max(abs(predicted / value - 1) for _, value, predicted in shape) < 0.035


def test_roofline_is_within_seven_percent_of_aiconfigurator() -> None:
    for timing, prefill_ms, decode_ms, *plain in report.aiconfigurator_rows(Roofline):
        assert prefill_ms == pytest.approx(timing.prefill_ms, rel=0.07), timing
        assert decode_ms == pytest.approx(timing.decode_ms, rel=0.04), timing
        assert prefill_ms > plain[0]
        assert decode_ms > plain[1]


def test_fits_find_known_constants() -> None:
    truth = fitted()
    tokens = [300, 4000, 90_000]
    seconds = [truth.prefill_ns(0, count) / 1e9 for count in tokens]
    found = fit_prefill(tokens, seconds)
    assert found == pytest.approx((truth.prefill_ps_per_token, truth.prefill_fs_per_token_squared), rel=1e-5)
    batches, contexts = [1, 1, 4, 16, 16], [100, 9000, 50_000, 20_000, 900_000]
    steps = [truth.step_ns(batch, context, 1)[0] / 1e9 for batch, context in zip(batches, contexts, strict=True)]
    expected = (truth.decode_base_ns, truth.decode_ns_per_sequence, truth.decode_ps_per_context_token)
    assert fit_decode(batches, contexts, steps) == pytest.approx(expected, rel=1e-5)


def test_a_fit_never_goes_negative() -> None:
    # Faster than linear growth would allow: the square term is dropped, not made negative.
    linear, square = fit_prefill([1000, 2000, 4000], [1.0, 1.9, 3.6])
    assert square == 0
    assert linear == pytest.approx(0.94e9, rel=0.03)
    with pytest.raises(ConfigError, match="two prompt lengths"):
        fit_prefill([1000, 1000], [1.0, 1.1])
    assert np.all(np.array(fit_decode([1, 1], [10, 1000], [2.0, 1.0])) >= 0)


def test_docs_hold_the_report() -> None:
    docs = Path(__file__).parents[2] / "docs" / "cost-models.md"
    assert report.render() in docs.read_text(encoding="utf-8"), "run `python -m mcjax.cost.report` and paste its output"


def test_the_package_imports_neither_jax_nor_hydra() -> None:
    code = (
        "import sys, mcjax.cost, mcjax.cost.catalogue, mcjax.cost.roofline, mcjax.cost.memory, mcjax.cost.fit;"
        "sys.exit(any(name in sys.modules for name in ('jax', 'hydra', 'omegaconf')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("option", ["aiconfigurator", "auto", "fitted", "roofline", "table"])
def test_every_key_of_an_option_is_taken(option: str) -> None:
    text = files("mcjax").joinpath("conf", "cost", f"{option}.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    module, name = values.pop("_target_").rsplit(".", 1)
    taken = signature(getattr(import_module(module), name)).parameters
    assert set(values) == set(taken), "and every parameter can be set"
    for key, value in values.items():
        default = taken[key].default
        assert option == "fitted" or default in (value, Parameter.empty), key  # fitted holds one pair's constants
