from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.errors import ConfigError
from mcjax.kvpool.keys import (
    SALTS_FILE_VARIABLE,
    BlockNamer,
    KeyTable,
    Salts,
    key_from_trace_id,
    keys_from_tokens,
    namespace,
)
from mcjax.types import KVFormat, KVGroup

FORMAT = KVFormat("model-a", 4, (KVGroup("full", "full", 64, 1),))
SPACE = namespace(FORMAT, "salt")
BLOCK = 4

token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=22)


def keys(tokens: list[int], space: bytes = SPACE, parent: bytes = b"") -> list[bytes]:
    return keys_from_tokens(space, np.array(tokens, np.int32), BLOCK, parent)


def namer(salts: Salts | None = None) -> BlockNamer:
    return BlockNamer(FORMAT, salts or Salts(), KeyTable())


@given(token_lists)
def test_one_key_a_full_block_and_none_for_a_partial_one(tokens):
    found = keys(tokens)
    assert len(found) == len(tokens) // BLOCK
    assert found == keys(tokens[: len(found) * BLOCK])
    assert len(set(found)) == len(found)  # chained: equal blocks at different places differ


@given(token_lists, token_lists)
def test_chains_agree_exactly_as_far_as_the_full_blocks_of_tokens_do(first, second):
    same = 0
    while same < min(len(first), len(second)) // BLOCK and first[: (same + 1) * BLOCK] == second[: (same + 1) * BLOCK]:
        same += 1
    a, b = keys(first), keys(second)
    assert a[:same] == b[:same]
    assert not set(a[same:]) & set(b[same:])


@given(st.lists(st.integers(0, 100), min_size=8, max_size=20), st.data())
def test_one_changed_token_changes_its_block_and_all_that_follow(tokens, data):
    place = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[place] += data.draw(st.sampled_from([1, 256, 65536]))
    before, after = keys(tokens), keys(changed)
    assert before[: place // BLOCK] == after[: place // BLOCK]
    assert all(a != b for a, b in zip(before[place // BLOCK :], after[place // BLOCK :], strict=True))


@given(token_lists, st.integers(0, 5))
def test_a_chain_can_be_continued_from_any_of_its_keys(tokens, blocks):
    whole = keys(tokens)
    blocks = min(blocks, len(whole))
    parent = whole[blocks - 1] if blocks else b""
    assert keys(tokens[blocks * BLOCK :], parent=parent) == whole[blocks:]


def test_everything_but_tokens_that_decides_about_bytes_changes_the_namespace():
    group = FORMAT.groups[0]
    formats = [
        FORMAT,
        dataclasses.replace(FORMAT, fingerprint="model-b"),
        dataclasses.replace(FORMAT, block_tokens=8),
        dataclasses.replace(FORMAT, groups=(dataclasses.replace(group, name="other"),)),
        dataclasses.replace(FORMAT, groups=(dataclasses.replace(group, kind="window"),)),
        dataclasses.replace(FORMAT, groups=(dataclasses.replace(group, bytes_per_token=32),)),
        dataclasses.replace(FORMAT, groups=(dataclasses.replace(group, block_multiple=2),)),
        dataclasses.replace(FORMAT, groups=(group, group)),
    ]
    spaces = [namespace(one, "salt") for one in formats]
    spaces += [namespace(FORMAT, "salt2"), namespace(FORMAT, "salt", "adapter"), namespace(FORMAT, "", "salt")]
    # Lengths are part of what is hashed: text can not move from one field into the next.
    spaces += [
        namespace(dataclasses.replace(FORMAT, fingerprint="model-asa"), "lt"),
        namespace(FORMAT, "lt", "sa"),
    ]
    assert len(set(spaces)) == len(spaces)
    assert len({keys([1, 2, 3, 4], space)[0] for space in spaces}) == len(spaces)


def test_keys_are_equal_across_processes_and_hash_seeds():
    code = (
        "import numpy as np\n"
        "from mcjax.kvpool.keys import *\n"
        "from mcjax.types import *\n"
        "space = namespace(KVFormat('model-a', 4, (KVGroup('full', 'full', 64, 1),)), 'salt')\n"
        "print(*(key.hex() for key in keys_from_tokens(space, np.arange(9, dtype=np.int32), 4)))\n"
        "print(key_from_trace_id(space, 12345678901).hex())\n"
    )
    expected = " ".join(key.hex() for key in keys(list(range(9)))) + "\n" + key_from_trace_id(SPACE, 12345678901).hex()
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == expected
    # And across machines and versions: this value may only change together with the namespace's version.
    assert keys([0, 1, 2, 3])[0].hex() == "4a18629ca4519255a4ca38211fca1814c83aee83231f8056e6cc5d7791904dcb"


@pytest.mark.parametrize("dtype", ["<i4", ">i4", "<i8"])
def test_keys_do_not_depend_on_how_an_array_is_stored(dtype):
    tokens = np.arange(24, dtype=dtype)[::2]
    assert keys_from_tokens(SPACE, tokens, BLOCK) == keys([*range(0, 24, 2)])  # pyright: ignore[reportArgumentType]


@given(st.lists(st.tuples(st.sampled_from("ab"), token_lists), max_size=8))
@settings(max_examples=50)
def test_ids_are_equal_exactly_when_keys_are(requests):
    names = namer()
    by_key: dict[bytes, int] = {}
    for tenant, tokens in requests:
        for block in names.from_tokens(tenant, np.array(tokens, np.int32)):
            assert by_key.setdefault(names.table.key(block), block) == block
    assert len(set(by_key.values())) == len(by_key)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 9) | st.integers(2**40 - 2, 2**63), max_size=5)),
        max_size=8,
    ),
    token_lists,
)
@settings(max_examples=80)
def test_trace_ids_of_any_size_never_stand_for_two_blocks(
    requests: list[tuple[str, list[int]]], tokens: list[int]
) -> None:
    names = namer()
    keys: dict[int, bytes] = {}
    for tenant, trace_ids in requests:
        blocks = names.from_trace_ids(tenant, trace_ids, len(trace_ids))
        assert [names.table.key(block) for block in blocks] == [
            key_from_trace_id(names.space(tenant), trace_id) for trace_id in trace_ids
        ]
        keys.update((block, names.table.key(block)) for block in blocks)
    for block in names.from_tokens("a", np.array(tokens, np.int32)):
        assert keys.setdefault(block, names.table.key(block)) == names.table.key(block)
    assert len(set(keys.values())) == len(keys)
    assert all(0 <= block < 2**63 for block in keys)


def test_the_first_namespace_of_a_trace_keeps_its_ids() -> None:
    names = namer()
    assert names.from_trace_ids("a", (7, 8, 9), 2) == (7, 8)
    assert not set(names.from_trace_ids("b", (7, 8), 2)) & {7, 8}


def test_trace_blocks_follow_their_ids_and_the_partial_one_stays_private():
    names = namer()
    first = names.from_trace_ids("a", (7, 8, 9), 2)
    assert len(first) == 2
    assert names.from_trace_ids("a", (7, 8, 10), 3)[:2] == first
    assert names.table.key(first[0]) == key_from_trace_id(names.space("a"), 7)
    assert not set(names.from_trace_ids("b", (7, 8), 2)) & set(first)


@pytest.mark.parametrize("salts", [Salts(), Salts({"a": "one", "b": "two"}), Salts({"a": "tenant:b"})])
def test_a_tenant_hits_its_own_blocks_and_never_another_ones(salts):
    names = namer(salts)
    tokens = np.arange(8, dtype=np.int32)
    first = names.from_tokens("a", tokens)
    assert names.from_tokens("a", tokens.copy()) == first
    assert not set(names.from_tokens("b", tokens)) & set(first)
    assert not set(names.from_trace_ids("a", (1, 2), 2)) & set(names.from_trace_ids("b", (1, 2), 2))


def test_salts_come_from_a_file_and_change_the_keys(tmp_path, monkeypatch):
    path = tmp_path / "salts.json"
    path.write_text(json.dumps({"a": "s3cret"}))
    monkeypatch.setenv(SALTS_FILE_VARIABLE, str(path))
    salts = Salts.from_environment()
    tokens = np.arange(4, dtype=np.int32)
    plain, salted = namer(), namer(salts)
    assert plain.space("a") != salted.space("a")
    assert plain.space("b") == salted.space("b")
    assert plain.table.key(plain.from_tokens("a", tokens)[0]) != salted.table.key(salted.from_tokens("a", tokens)[0])
    assert "s3cret" not in repr(salts) + str(salts) + repr([salts])
    monkeypatch.delenv(SALTS_FILE_VARIABLE)
    assert Salts.from_environment().of("a") == "tenant:a"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file"),
        (b'{"a": "s3cret",\n', "line 2"),
        (b"\xff\xfe", "UTF-8"),
        (b'["s3cret"]', "no object"),
        (b'{"a": "s3cret", "b": 12345}', "'b'"),
        (b'{"a": "s3cret", "b": ""}', "'b'"),
    ],
)
def test_a_bad_salts_file_is_named_with_its_fix_and_without_its_secrets(tmp_path, monkeypatch, content, problem):
    path = tmp_path / "salts.json"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv(SALTS_FILE_VARIABLE, str(path))
    with pytest.raises(ConfigError) as caught:
        Salts.from_environment()
    message = str(caught.value)
    assert all(part in message for part in (SALTS_FILE_VARIABLE, str(path), problem, '{"tenant": "salt"}'))
    assert "s3cret" not in message
    assert "12345" not in message
    assert caught.value.__suppress_context__ or caught.value.__context__ is None  # a traceback shows it neither


def test_a_table_knows_the_namespace_of_what_was_named_under_one():
    blocks, table = namer(), KeyTable()
    by_tokens = blocks.from_tokens("a", np.arange(2 * FORMAT.block_tokens, dtype=np.int32))
    assert [blocks.table.space(block) for block in by_tokens] == [blocks.space("a")] * 2
    by_trace = blocks.from_trace_ids("b", [3, 1 << 41], 2)
    assert [blocks.table.space(block) for block in by_trace] == [blocks.space("b")] * 2
    # A key that was found on disk is known without one, until somebody names it.
    [found] = table.intern([b"k" * 32])
    assert table.space(found) == b""
    assert table.intern([b"k" * 32], b"space") == (found,)
    assert table.intern([b"k" * 32]) == (found,)
    assert table.space(found) == b"space"
