"""`mcjax fit`: finds known constants in noisy steps, writes a config that makes them, and says what is wrong."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import yaml

from mcjax.app.fit import command, fit
from mcjax.cost.fit import fit_chunks
from mcjax.cost.fitted import Fitted
from mcjax.cost.measurements import Measurement, write_csv
from mcjax.cost.regimes import predicted_s
from mcjax.errors import ConfigError

TRUTH = Fitted("truth", 100_000_000, 700_000, 20_000_000, 150_000, 30_000, "h100x8", "llama3-8b")


def steps(noise: float = 0.0) -> list[Measurement]:
    rng = np.random.default_rng(1)
    shapes = [Measurement("prefill", s, n, 0, 0, 1) for s, n in product((0, 4096, 30_000), (256, 2048, 16_384))]
    shapes += [Measurement("decode", 0, 0, b, b * c, 1) for b, c in product((1, 4, 32, 128), (128, 2048, 20_000))]
    shapes += [Measurement("mixed", 0, 1024, b, b * 1000, 1) for b in (1, 32)]
    factors = np.exp(noise * rng.standard_normal(len(shapes)))
    return [
        Measurement(row.kind, row.start_tokens, row.length_tokens, row.batch, row.context_tokens,
                    predicted_s(TRUTH, row) * float(factor))
        for row, factor in zip(shapes, factors, strict=True)
    ]  # fmt: skip


CONSTANTS = ("prefill_ps_per_token", "prefill_fs_per_token_squared", "decode_base_ns", "decode_ns_per_sequence",
             "decode_ps_per_context_token")  # fmt: skip


def test_known_constants_are_found() -> None:
    found = fit(steps())
    for key in CONSTANTS:
        assert getattr(found, key) == pytest.approx(getattr(TRUTH, key), rel=1e-4), key
    noisy = fit(steps(0.02))
    for key in CONSTANTS:
        assert getattr(noisy, key) == pytest.approx(getattr(TRUTH, key), rel=0.1), key


def test_chunks_after_a_prefix_fit_the_square() -> None:
    """All chunks are equally long: only their starts tell the two constants apart."""
    starts = [0, 5000, 20_000]
    seconds = [TRUTH.prefill_ns(start, 1000) / 1e9 for start in starts]
    assert fit_chunks(starts, [1000] * 3, seconds) == pytest.approx((100_000_000, 700_000), rel=1e-5)
    with pytest.raises(ConfigError, match="two different prefill chunks"):
        fit_chunks([0, 0], [1000, 1000], [0.1, 0.1])


def test_it_writes_a_config_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "steps.csv", tmp_path / "cost" / "mine.yaml"
    write_csv(str(source), steps(0.02), "test")
    arguments = [str(source), str(out), "--name", "mine: one", "--hardware", "h100x8", "--model", "llama3-8b"]
    assert command(arguments) == 0
    printed = capsys.readouterr().out
    text = out.read_text()
    for line in printed.splitlines()[:9]:
        assert line in text, "the file says the same errors"
    for regime in ("prefill, up to 2048", "prefill, over 2048", "cached prefix", "batch up to 8", "batch over 8",
                   "up to 4096 tokens a sequence", "over 4096 tokens a sequence", "mixed"):  # fmt: skip
        assert regime in printed
    assert "steps.csv (9 prefill, 12 decode, 2 mixed rows; SHA-256" in text
    assert str(tmp_path) not in text
    values = yaml.safe_load(text)
    assert values.pop("_target_") == "mcjax.cost.fitted.Fitted"
    assert Fitted(**values) == fit(steps(0.02), "mine: one", "h100x8", "llama3-8b")
    assert (tmp_path / "cost" / "mine.png").read_bytes()[:4] == b"\x89PNG"
    assert f"--config-dir {tmp_path} cost=mine" in printed
    # A second time it asks before it overwrites.
    assert command(arguments) == 2
    assert "--force" in capsys.readouterr().err
    assert command([*arguments, "--force"]) == 0


def test_by_default_it_writes_beside_the_measurements(tmp_path: Path) -> None:
    source = tmp_path / "steps.csv"
    write_csv(str(source), steps(), "test")
    assert command([str(source)]) == 0
    assert yaml.safe_load((tmp_path / "steps.yaml").read_text())["name"] == "fitted"


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([row for row in steps() if row.kind == "decode"], "measurements=prefill: two rows"),
        ([row for row in steps() if row.kind == "prefill"], "measurements=decode: two rows"),
        ([row for row in steps() if row.kind != "decode" or row.context_tokens == 128 * row.batch], "contexts a seq"),
    ],
)
def test_too_few_rows_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[Measurement], problem: str
) -> None:
    source = tmp_path / "steps.csv"
    write_csv(str(source), rows, "")
    assert command([str(source)]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "steps.yaml").exists()


def test_a_bad_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "steps.csv"
    write_csv(str(source), steps(), "")
    source.write_text(source.read_text().replace("prefill,0,2048,0,0", "prefill,0,many,0,0"))
    assert command([str(source)]) == 2
    assert "line 3, field 'length_tokens'" in capsys.readouterr().err
    assert command([str(tmp_path / "nowhere.csv")]) == 2
    assert command([str(source), str(tmp_path / "out.json")]) == 2


HEADER = "kind,start_tokens,length_tokens,batch,context_tokens,seconds\n"
MISTAKES = [
    (b"", "measurements={path}: holds no rows; it needs a header, kind,start_tokens,"),
    (HEADER.encode(), "measurements={path}: holds no rows; it needs a header, kind,start_tokens,"),
    (
        b"kind,start_tokens,length_tokens,batch,context_tokens,secs\n",
        "{path}, line 1, field 'seconds': the column is missing in the header 'kind,start_tokens,length_tokens,batch,",
    ),
    (
        b"# mine\n" + HEADER.encode().replace(b"seconds", b"seconds,note"),
        "{path}, line 2, field 'note': is no column of",
    ),
    (
        HEADER.encode() + b"prefill,0,9,,,1\n!!garbage\n",
        "{path}, line 3, field 'start_tokens': the line has 1 values, the",
    ),
    (
        HEADER.encode() + b"prefill,0,9,,,1\n\xff\xfe\n",
        "{path}, line 3, field 'line': is not text in UTF-8 (byte 0xff)",
    ),
    (HEADER.encode() + b"prefill,0,9,,,fast\n", "{path}, line 2, field 'seconds': 'fast' must be a number above 0"),
    (HEADER.encode() + b"prefil,0,9,,,1\n", "{path}, line 2, field 'kind': 'prefil' is none of prefill, decode, mixed"),
]


@pytest.mark.parametrize(("data", "told"), MISTAKES)
def test_a_mistake_in_the_file_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes, told: str
) -> None:
    source = tmp_path / "steps.csv"
    source.write_bytes(data)
    assert command([str(source)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mcjax: " + told.format(path=source))
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nowhere.csv", "no such file; docs/cost-models.md says what it must hold"),
        ("folder.csv", "cannot be read (Is a directory)"),
        ("text.parquet", "is no Parquet file ("),
        ("steps.txt", "must be a .csv or a .parquet file"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, told: str
) -> None:
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "text.parquet").write_text("hello")
    assert command([str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"mcjax: measurements={tmp_path / name}: {told}")
    assert error.count("\n") == 1
