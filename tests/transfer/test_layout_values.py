"""Layouts as plain values: what a peer writes is read back, or refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcjax.errors import LayoutMismatch
from mcjax.transfer.layout.describe import GroupLayout, Layout, Shard, ranks_of, tensor_shards, whole

HYBRID = Layout(
    "weights",
    (
        GroupLayout("full", "full", ("0", "2"), 4, 8, 16, "bfloat16", tensor_shards(2, 4, 8)),
        GroupLayout("window", "window", ("1",), 2, 8, 32, "float16", tensor_shards(1, 2, 8), 0, 128),
        GroupLayout("latent", "latent", ("3",), 1, 24, 16, "float32", tensor_shards(1, 1, 8, kind="latent"), 8),
    ),
    "int8",
)


def test_there_and_back_by_json() -> None:
    assert Layout.from_values(json.loads(json.dumps(HYBRID.to_values()))) == HYBRID
    assert HYBRID.ranks == 8
    assert HYBRID.boundary_tokens == 32
    assert "window (window, 1 layers" in HYBRID.describe()


def paths(values: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    entries = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    return [before, *(path for name, entry in entries for path in paths(entry, (*before, name)))]


PATHS = paths(HYBRID.to_values())[1:]
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.just([]), st.just({}), st.just([[]])
)


@given(path=st.sampled_from(PATHS), junk=JUNK)
def test_whatever_stands_there_it_is_a_layout_or_refused(path: tuple[Any, ...], junk: Any) -> None:
    values = copy.deepcopy(HYBRID.to_values())
    holder = values
    for name in path[:-1]:
        holder = holder[name]
    holder[path[-1]] = junk
    try:
        found = Layout.from_values(values)
    except LayoutMismatch:
        return
    assert Layout.from_values(found.to_values()) == found


@pytest.mark.parametrize("path", [path for path in PATHS if isinstance(path[-1], str)])
def test_nothing_may_be_missing_or_too_much(path: tuple[Any, ...]) -> None:
    values = copy.deepcopy(HYBRID.to_values())
    holder = values
    for name in path[:-1]:
        holder = holder[name]
    holder["more"] = 1
    with pytest.raises(LayoutMismatch):
        Layout.from_values(values)
    del holder["more"], holder[path[-1]]
    with pytest.raises(LayoutMismatch):
        Layout.from_values(values)


def test_another_version_is_named() -> None:
    with pytest.raises(LayoutMismatch, match="layout version 2, not 1"):
        Layout.from_values({**HYBRID.to_values(), "version": 2})


def test_what_keeps_two_apart_is_said_in_words() -> None:
    mine, other = whole("a", 2, 4, 8, 16, "bfloat16"), whole("b", 2, 4, 8, 32, "bfloat16", "int8")
    assert mine.differences(mine) == []
    assert mine.differences(other) == [
        "model is a, not b",
        "encoding is none, not int8",
        "block_tokens of group full is 16, not 32",
    ]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dtype": "float64"}, "dtype"),
        ({"kind": "other"}, "kind"),
        ({"order": ("layer", "kv", "token", "token")}, "no permutation"),
        ({"layers": ("0", "0")}, "not distinct"),
        ({"kv_heads": 0}, "kv_heads=0"),
        ({"block_tokens": 1 << 40}, "block_tokens"),
        ({"rope_width": 4}, "only a latent"),
        ({"window_tokens": 4}, "window_tokens=4"),
        ({"shards": ()}, "0 shards"),
        ({"kv_heads": 1 << 24, "shards": (Shard(0, 2, 0, 1),) * 1000}, "1000 shards of 2 layers and 16777216 heads"),
        ({"shards": (Shard(0, 2, 0, 3),)}, "no rank holds head 3 of layer 0"),
        ({"shards": (Shard(0, 2, 0, 5),)}, "holds heads 0..5 of 4"),
        ({"shards": (Shard(0, 3, 0, 4),)}, "holds layers 0..3 of 2"),
    ],
)
def test_what_is_no_layout_is_refused(changes: dict[str, Any], problem: str) -> None:
    values = {
        "name": "g",
        "kind": "full",
        "layers": ("0", "1"),
        "kv_heads": 4,
        "width": 8,
        "block_tokens": 16,
        "dtype": "float32",
        "shards": tensor_shards(2, 4, 1),
    }
    GroupLayout(**values)
    with pytest.raises(LayoutMismatch, match=problem):
        GroupLayout(**{**values, **changes})


def test_who_owns_a_head_that_several_hold() -> None:
    group = HYBRID.groups[0]
    assert [shard.first_head for shard in group.shards] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert group.holders(0, 2) == [4, 5]
    assert group.owner(0, 2) == 4
    assert ranks_of(group).tolist() == [[0, 2, 4, 6], [0, 2, 4, 6]]
    everywhere = tensor_shards(2, 4, 8, whole=True)
    assert all(shard.heads == 4 for shard in everywhere)
