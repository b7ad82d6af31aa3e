"""Equal content, equal key; any change, another one; and which runs have a key is found without looking at them."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.track import keys
from mcjax.track.identity import CHANGES_NOTHING, run_key

CODE = "c0de"
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
NAMES = st.text("abcdef_", min_size=1, max_size=6)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))
CONFIGS = st.dictionaries(NAMES, VALUES, min_size=1, max_size=5)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the single values of a config stand."""
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [place for key, item in items for place in places(item, (*path, key))]
    return [path]


@settings(max_examples=30)
@given(CONFIGS)
def test_equal_content_gives_equal_keys(config: dict[str, Any]) -> None:
    again = copy.deepcopy(config)
    assert run_key(config, code=CODE) == run_key(again, code=CODE)
    assert len(run_key(config, code=CODE)) == 64


@settings(max_examples=60)
@given(CONFIGS, VALUES, st.data())
def test_another_value_gives_another_key(config: dict[str, Any], value: Any, data: st.DataObject) -> None:
    *path, last = data.draw(st.sampled_from([place for place in places(config) if place]))
    other = copy.deepcopy(config)
    section = other
    for step in path:
        section = section[step]
    section[last] = value
    same = repr(other) == repr(config)  # 1 and True, 0.0 and -0.0 are not the same value
    assert (run_key(other, code=CODE) == run_key(config, code=CODE)) == same


@settings(max_examples=40)
@given(CONFIGS, st.sampled_from(["code", "inputs", "strategies"]), st.text(max_size=4))
def test_every_part_counts(config: dict[str, Any], part: str, value: str) -> None:
    parts: dict[str, Any] = {"code": CODE, "inputs": {}, "strategies": {}}
    other = {**parts, part: value if part == "code" else {"somewhere": value}}
    assert run_key(config, **parts) == run_key(config, **parts) != run_key(config, **other)


@settings(max_examples=40)
@given(CONFIGS, NAMES, NAMES, NAMES)
def test_a_file_may_be_renamed_and_not_edited(config: dict[str, Any], one: str, two: str, three: str) -> None:
    def key(name: str, held: str) -> str:
        named = {**config, "workload": {"path": name, "seed": 0}}
        return run_key(named, code=CODE, inputs={"workload.path": held})

    assert key(one, "held") == key(two, "held")
    assert (key(one, two) == key(one, three)) == (two == three)


def test_files_that_change_places_give_another_key() -> None:
    config = {"parts": {"a": {"path": "1"}, "b": {"path": "2"}}}
    one = run_key(config, code=CODE, inputs={"parts.a.path": "x", "parts.b.path": "y"})
    assert one != run_key(config, code=CODE, inputs={"parts.a.path": "y", "parts.b.path": "x"})


@settings(max_examples=30)
@given(CONFIGS, SCALARS)
def test_what_changes_no_row_does_not_count(config: dict[str, Any], value: Any) -> None:
    config = {**config, "backend": {"name": "sim"}}
    for name in CHANGES_NOTHING:
        section, _, last = name.rpartition(".")
        other = {**config, section: {**config[section], last: value}} if section else {**config, last: value}
        assert run_key(other, code=CODE) == run_key(config, code=CODE), name


def test_the_order_of_a_mapping_counts_and_keys_keep_their_types() -> None:
    def key(tenants: dict[Any, Any]) -> str:
        return run_key({"tenants": tenants}, code=CODE)

    assert key({"a": 1, "b": 2}) != key({"b": 2, "a": 1})
    assert key({1: "a"}) != key({"1": "a"})


def test_runs_of_a_key_the_newest_first(tmp_path: Path) -> None:
    assert keys.directories(tmp_path, "k") == []
    for name in ("first", "second", "gone", "first"):
        (tmp_path / name).mkdir(exist_ok=True)
        keys.add(tmp_path, "k", name)
    keys.add(tmp_path, "kk", "first")
    (tmp_path / "gone").rmdir()
    assert keys.directories(tmp_path, "k") == [tmp_path / "first", tmp_path / "second"]
    assert keys.starting(tmp_path, "k") == ["k", "kk"]
    assert keys.starting(tmp_path / "none", "k") == []


def test_a_damaged_index_names_nothing(tmp_path: Path) -> None:
    (tmp_path / keys.FOLDER).mkdir()
    (tmp_path / keys.FOLDER / "k").write_bytes(b"\xff\xfe\n../..\n\n/etc\nno such")
    assert keys.directories(tmp_path, "k") == []


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    names = [f"run-{writer}-{turn}" for writer in range(8) for turn in range(25)]
    for name in names:
        (tmp_path / name).mkdir()

    def write(writer: int) -> None:
        for name in names[writer * 25 : writer * 25 + 25]:
            keys.add(tmp_path, "k", name)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.name for path in keys.directories(tmp_path, "k")) == sorted(names)
