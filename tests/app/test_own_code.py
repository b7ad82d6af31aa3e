"""The user's own code: what is told of it, when its hash changes, and that it can be made again."""

from __future__ import annotations

import collections
import enum
import importlib
import json
import linecache
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest_app import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.app.inputs import hashed
from mcjax.app.own_code.again import Again
from mcjax.app.own_code.collect import Collector, Own
from mcjax.app.own_code.importing import found, kept_modules
from mcjax.app.own_code.source import Unknown
from mcjax.app.own_code.told import Teller


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Point:
    x: float
    tags: list[str] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class Slotted:
    x: int


def told(value: Any) -> Any:
    teller = Teller(lambda thing: None)
    teller.begin("here")
    return json.loads(json.dumps(teller.told(value)))


def collect(thing: Any, place: str = "prefill") -> Own:
    return Collector(hashed).collect(place, thing)


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
)
KEYS = st.integers() | st.text(max_size=3)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.tuples(inner, inner)
        | st.sets(KEYS, max_size=3)
        | st.builds(Point, st.floats(allow_nan=False), st.lists(st.text(max_size=3), max_size=2))
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(VALUES, VALUES)
def test_values_are_told_apart_and_made_again(one: Any, other: Any) -> None:
    equal = json.dumps(told(one)) == json.dumps(told(other))  # as text: to Python, False is 0
    assert equal or repr(one) != repr(other)
    assert not equal or one == other
    again = Again(found).made(told(one))
    assert (again, type(again)) == (one, type(one))


@pytest.mark.parametrize(("one", "other"), [(False, 0), (1, 1.0), (0.0, -0.0), ("1", 1), ([], ()), ("a", b"a")])
def test_values_that_python_takes_for_alike_are_told_apart(one: Any, other: Any) -> None:
    assert json.dumps(told(one)) != json.dumps(told(other))


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array([], np.int64),
        np.float64(0.1),
        np.int8(-3),
        np.random.default_rng(3),
        Colour.BLUE,
        Slotted(3),
        collections.deque([1, 2], maxlen=2),
        collections.Counter("abca"),
        collections.OrderedDict(b=1, a=2),
        collections.defaultdict(list, a=[1]),
        Path("somewhere"),
        float("inf"),
        frozenset({1, 2}),
        len,
        np.minimum,
        partial(divmod, 7),
        Point,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_people_use_is_made_again(value: Any) -> None:
    assert told(Again(found).made(told(value))) == told(value)


def test_arrays_differ_by_type_and_shape() -> None:
    arrays = [np.zeros(4), np.zeros(4, np.float32), np.zeros((2, 2)), np.zeros(4, np.int64), np.ones(4)]
    assert len({json.dumps(told(array)) for array in arrays}) == len(arrays)
    state = np.random.default_rng(1)
    before = told(state)
    state.random()
    assert told(state) != before


def test_sharing_is_told() -> None:
    shared = [1]
    assert told([shared, shared]) != told([[1], [1]])
    made = Again(found).made(told([shared, shared]))
    assert made[0] is made[1]
    loop: list[Any] = []
    loop.append(loop)
    made = Again(found).made(told(loop))
    assert made[0] is made


@pytest.mark.parametrize(
    "value",
    [
        threading.Lock(),
        iter([1]),
        [threading.Lock()],
        {"a": (i for i in "x")},
        type("Whole", (int,), {})(3),
        np.void(b"a"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_told_is_refused(value: Any) -> None:
    with pytest.raises(Unknown, match="cannot be told"):
        told(value)


def test_one_lock_makes_a_strategy_unknown() -> None:
    class Locked:
        def __init__(self) -> None:
            self.lock = threading.Lock()

    own = collect(Locked())
    assert "lock: what a _thread.lock holds cannot be told" in own.unknown


HELPER = "import math\nLEVEL = 1\ndef shift(x):\n    return math.floor(x) + LEVEL\n"
POLICY = """
from dataclasses import dataclass
from {package}helper import shift
@dataclass
class Mine:
    alpha: float = 1.0
    def choose(self, request, view, rng):
        return shift(self.alpha)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Writes modules and imports the last of them anew."""
    monkeypatch.syspath_prepend(str(tmp_path))
    written: set[str] = set()

    def write(**texts: str) -> Any:
        for name, text in texts.items():
            (tmp_path / f"{name}.py").write_text(text)
            written.add(name)
        for name in written:
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        linecache.clearcache()
        return importlib.import_module(list(texts)[-1])

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return write


def test_a_module_counts_with_all_that_it_imports(modules: Callable[..., Any]) -> None:
    policy = POLICY.format(package="")
    first = collect(modules(helper=HELPER, policy=policy).Mine())
    assert first.unknown == []
    assert set(first.sources) == {"policy.py", "helper.py"}
    assert first.sources["helper.py"] == HELPER
    assert collect(modules(helper=HELPER, policy=policy).Mine()).sha256 == first.sha256
    assert collect(modules(helper=HELPER.replace("= 1", "= 2"), policy=policy).Mine()).sha256 != first.sha256
    assert collect(modules(helper=HELPER, policy=policy + "\n").Mine()).sha256 != first.sha256
    assert collect(modules(helper=HELPER, policy=policy).Mine(alpha=2)).sha256 != first.sha256


def test_values_set_after_the_import_count(modules: Callable[..., Any]) -> None:
    module = modules(helper=HELPER, policy=POLICY.format(package=""))
    first = collect(module.Mine())
    vars(sys.modules["helper"])["LEVEL"] = 5
    changed = collect(module.Mine())
    assert changed.sha256 != first.sha256
    module.Mine.beta = 3
    assert collect(module.Mine()).sha256 not in (first.sha256, changed.sha256)


def test_code_that_was_edited_after_its_import_is_unknown(modules: Callable[..., Any], tmp_path: Path) -> None:
    module = modules(helper=HELPER, policy=POLICY.format(package=""))
    assert collect(module.Mine()).unknown == []
    (tmp_path / "helper.py").write_text(HELPER.replace("floor", "ceil"))
    (problem,) = collect(module.Mine()).unknown
    assert problem.endswith("helper, which defines shift, was edited after it was imported")
    (tmp_path / "helper.py").write_text("# a comment moves lines, and nothing else\n" + HELPER)
    assert collect(module.Mine()).unknown == []


def test_a_package_is_kept_as_one(modules: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "helper.py").write_text(HELPER)
    (tmp_path / "pack" / "policy.py").write_text(POLICY.format(package="."))
    module = importlib.import_module("pack.policy")
    try:
        own = collect(module.Mine())
        assert set(own.sources) == {"pack/__init__.py", "pack/helper.py", "pack/policy.py"}
    finally:
        for name in ("pack.policy", "pack.helper", "pack"):
            del sys.modules[name]


def test_a_file_that_a_parameter_names_counts(modules: Callable[..., Any], tmp_path: Path) -> None:
    weights = tmp_path / "weights.txt"
    weights.write_text("1")
    module = modules(helper=HELPER, policy=POLICY.format(package=""))
    one = collect(module.Mine(alpha=str(weights)))
    assert list(one.inputs) == [str(weights)]
    weights.write_text("22")
    assert collect(module.Mine(alpha=str(weights))).sha256 != one.sha256


def test_strategies_that_share_an_object_differ_from_those_that_do_not(modules: Callable[..., Any]) -> None:
    module = modules(helper=HELPER, policy=POLICY.format(package=""))

    def both(one: Any, other: Any) -> list[str]:
        collector = Collector(hashed)
        return [collector.collect("prefill", one).sha256, collector.collect("decode", other).sha256]

    shared = [1.0]
    together = both(module.Mine(shared), module.Mine(shared))
    apart = both(module.Mine([1.0]), module.Mine([1.0]))
    assert together[0] == apart[0]
    assert together[1] != apart[1]


NOTEBOOK = {
    "first": "import numpy as np\nfrom dataclasses import dataclass\nSCALE = 2.0\nTABLE = np.arange(3)\n",
    "second": "def helper(x):\n    return x * SCALE + TABLE[0]\n\nunrelated = object()\n",
    "third": "@dataclass\nclass Fields:\n    a: int = 1\n",
    "fourth": "@dataclass\nclass Mine:\n    alpha: float = 1.0\n    fields: Fields = None\n"
    "    def choose(self, request, view, rng):\n        return helper(self.alpha)\n",
    "fifth": "given = Mine(alpha=3.0, fields=Fields(7))\n",
}


def notebook(cells: list[str], *variants: list[str]) -> list[dict[str, Any]]:
    """Runs cells as IPython does, in a process of its own, and collects `given`; once more after each variant."""
    code = f"""
import json, sys
from IPython.core.interactiveshell import InteractiveShell
from mcjax.app.inputs import hashed
from mcjax.app.own_code.collect import Collector
shell = InteractiveShell.instance(user_module=sys.modules["__main__"])
found = []
for cells in {[cells, *variants]!r}:
    for cell in cells:
        shell.run_cell(cell).raise_error()
    own = Collector(hashed).collect("prefill", given)
    found.append({{"told": own.told, "sha256": own.sha256, "sources": own.sources, "unknown": own.unknown}})
print(json.dumps(found))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT / "src")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


CHANGES = [
    ("first", "2.0", "2.5"),
    ("first", "arange(3)", "arange(4)"),
    ("second", "x * SCALE", "x + SCALE"),
    ("fourth", "helper(self.alpha)", "helper(-self.alpha)"),
    ("fifth", "Fields(7)", "Fields(8)"),
]


@pytest.fixture(scope="module")
def own_notebooks() -> list[dict[str, Any]]:
    """The notebook; the same run once more; then with each change, its later cells run again as people do."""
    pytest.importorskip("IPython")
    names = [name for name in NOTEBOOK if name != "third"]
    variants = [[NOTEBOOK[name] for name in names]]
    for cell, old, new in CHANGES:
        assert old in NOTEBOOK[cell]
        variants.append([NOTEBOOK[name].replace(old, new) if name == cell else NOTEBOOK[name] for name in names])
    return notebook(list(NOTEBOOK.values()), *variants)


@pytest.fixture
def own_notebook(own_notebooks: list[dict[str, Any]]) -> dict[str, Any]:
    return own_notebooks[0]


def test_a_class_of_a_notebook_is_told_with_what_it_refers_to(own_notebook: dict[str, Any]) -> None:
    assert own_notebook["unknown"] == []
    (text,) = own_notebook["sources"].values()
    for part in ("class Mine:", "def helper(x):", "class Fields:", "SCALE = 2.0", "import dataclass\n"):
        assert part in text
    assert "unrelated" not in text


def test_a_class_of_a_notebook_is_made_again(own_notebook: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "main_prefill.py").write_text(own_notebook["sources"]["main_prefill.py"])
    with kept_modules(tmp_path, ["main_prefill"]):
        made = Again(lambda name: found(name.replace("__main__", "main_prefill"))).made(own_notebook["told"])
        assert made.choose(None, None, None) == 6.0
        assert (made.alpha, made.fields.a) == (3.0, 7)
    assert "main_prefill" not in sys.modules


def test_any_change_in_a_notebook_counts(own_notebooks: list[dict[str, Any]]) -> None:
    assert [own["unknown"] for own in own_notebooks] == [[]] * len(own_notebooks)
    first, again, *changed = [own["sha256"] for own in own_notebooks]
    assert first == again
    assert len({first, *changed}) == 1 + len(CHANGES)


def test_what_a_notebook_does_not_use_does_not_count(own_notebook: dict[str, Any]) -> None:
    cells = ["import random\nnoise = random.random()", *NOTEBOOK.values()]
    twice = NOTEBOOK["third"].replace("= 1", "= 2")
    other, edited = notebook(cells, [twice, NOTEBOOK["fifth"]])
    assert other["sha256"] == own_notebook["sha256"]
    # A class of fields alone has no code that says which of two cells made it.
    assert edited["unknown"] == ["Mine uses Fields: Fields is defined in 2 cells"]


def test_closures_and_lambdas(tmp_path: Path) -> None:
    script = tmp_path / "study.py"
    script.write_text(
        """
import json
from mcjax.app.own_code.collect import Collector
from mcjax.app.inputs import hashed
def make(level):
    def choose(request, view, rng):
        return level
    return choose
flat = lambda request, view, rng: 0
collected = [Collector(hashed).collect("prefill", thing) for thing in (make(1), make(1), make(2), flat)]
assert not any(own.unknown for own in collected), collected
print(json.dumps([[own.sha256 for own in collected], collected[0].sources, collected[3].sources]))
"""
    )
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    hashes, closure, flat = json.loads(done.stdout)
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3
    assert "level = 1" in closure["main_prefill.py"]
    assert "flat = lambda" in flat["main_prefill.py"]


def test_code_without_a_source_is_unknown() -> None:
    code = """
from mcjax.app.own_code.collect import Collector
class Mine:
    def choose(self, request, view, rng):
        return 0
exec("def made(request, view, rng): return 1")
for thing in (Mine(), made):
    print(Collector(lambda text: None).collect("prefill", thing).unknown)
"""
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    if sys.version_info < (3, 13):  # from then on Python keeps the text of -c
        assert "no source" in lines[0]
    assert "no source" in lines[1] or "does not stand in" in lines[1]
