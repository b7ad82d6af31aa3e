"""The rules of the house, checked on every file: determinism, layers, imports, lengths, and what must not be published.

Each ban has a planted violation that the checker must catch, and legal look-alikes that it must let pass.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from rules_determinism import ABOVE_MECHANISMS, DECISIONS, DETERMINISM, EVERYWHERE, violations
from rules_texts import private_words, published_files, text_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "mcjax"

MECHANISMS = (
    *("backends/", "track/", "models/", "kernels/", "transfer/transports/", "aio/", "app/", "cli.py"),
    "kvpool/stores/paging.py",  # touches memory, by several threads
)
VIRTUAL_WORLDS = ("backends/sim/", "backends/check/", "backends/replay/", "backends/virtual.py")
DECISION_PACKAGES = (
    *(f"sched/{group}/" for group in "prefill decode fetch admission tenancy batching roles".split()),
    "kvpool/eviction/",
    "kvpool/watermark/",
)
HEAVY = (
    "jax jaxlib flax optax orbax hydra omegaconf pyarrow matplotlib wandb rich pandas torch transformers tokenizers "
    "safetensors jinja2"
).split()


def rules_for(name: str) -> frozenset[str]:
    """The rules that hold for a file of the package, by its path inside the package."""
    if name.startswith(DECISION_PACKAGES):
        return DECISIONS | EVERYWHERE
    if name.startswith(VIRTUAL_WORLDS):
        return DETERMINISM | EVERYWHERE
    if name.startswith(MECHANISMS):
        return EVERYWHERE
    return ABOVE_MECHANISMS | EVERYWHERE


def modules() -> list[str]:
    return sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("name", modules())
def test_module_keeps_the_rules(name: str) -> None:
    found = violations((PACKAGE / name).read_text(encoding="utf-8"), rules_for(name))
    assert not found, "\n".join(f"src/mcjax/{name}:{v.line}: {v.rule}: {v.what}" for v in found)


def test_rules_by_place() -> None:
    assert "waits" in rules_for("sched/prefill/random.py")
    assert "waits" not in rules_for("sched/conductor.py")
    assert "time" in rules_for("engine/decode.py")
    assert "time" in rules_for("transfer/engine.py")
    assert "time" not in rules_for("transfer/transports/local.py")
    assert "time" not in rules_for("backends/sim/world.py")
    assert "random" in rules_for("backends/sim/world.py")
    assert "random" not in rules_for("backends/jax/world.py")
    assert all("mutable_global" in rules_for(name) for name in modules())


PLANTED = [
    ("time", "import time"),
    ("time", "from time import monotonic_ns"),
    ("time", "def f(clock):\n    return clock.perf_counter_ns()"),
    ("time", "start = perf_counter()"),
    ("datetime_now", "from datetime import datetime\nstamp = datetime.now()"),
    ("datetime_now", "import datetime\nstamp = datetime.datetime.utcnow()"),
    ("datetime_now", "import datetime\nday = datetime.date.today()"),
    ("random", "import random"),
    ("random", "from random import choice"),
    ("random", "import os\nsalt = os.urandom(8)"),
    ("random", "from os import urandom"),
    ("random", "import numpy as np\nx = np.random.random()"),
    ("random", "import numpy as np\nrng = np.random.default_rng()"),
    ("random", "from numpy.random import shuffle"),
    ("uuid", "import uuid"),
    ("uuid", "from uuid import uuid4"),
    ("secrets", "import secrets"),
    ("asyncio", "import asyncio\nasync def f(t):\n    await asyncio.wait({t})"),
    ("asyncio", "import asyncio\nasync def f(t):\n    await asyncio.wait_for(t, 1)"),
    ("asyncio", "import asyncio\nasync def f():\n    async with asyncio.TaskGroup():\n        pass"),
    ("asyncio", "import asyncio\nasync def f():\n    async with asyncio.timeout(1):\n        pass"),
    ("asyncio", "import asyncio\nasync def f(t):\n    await asyncio.gather(t)"),
    ("asyncio", "import asyncio\nasync def f():\n    await asyncio.sleep(0.1)"),
    ("asyncio", "async def f(loop):\n    await loop.run_in_executor(None, print)"),
    ("asyncio", "from asyncio import to_thread"),
    ("asyncio", "def f(loop):\n    loop.call_later(1, print)"),
    ("create_task", "import asyncio\ntask = asyncio.create_task(f())"),
    ("create_task", "def f(loop, g):\n    return loop.create_task(g())"),
    ("create_task", "from asyncio import ensure_future"),
    ("threads", "import threading"),
    ("threads", "from threading import Lock"),
    ("threads", "from concurrent.futures import ThreadPoolExecutor"),
    ("threads", "import concurrent.futures"),
    ("hash_id", "order = hash('x')"),
    ("hash_id", "def f(xs):\n    return sorted(xs, key=id)"),
    ("hash_id", "def f(xs):\n    return list(map(hash, xs))"),
    ("hash_id", "def f(x, y):\n    return id(x) < id(y)"),
    ("set_iteration", "for x in {1, 2}:\n    print(x)"),
    ("set_iteration", "def f(xs):\n    return [x for x in set(xs)]"),
    ("set_iteration", "def f(xs):\n    return list({x + 1 for x in xs})"),
    ("set_iteration", "def f(xs):\n    return tuple(frozenset(xs))"),
    ("set_iteration", "def f(xs):\n    seen = set(xs)\n    for x in seen:\n        print(x)"),
    ("set_iteration", "def f(xs):\n    seen: set[int] = set()\n    return {x: 0 for x in seen}"),
    ("set_iteration", "def f(xs: set[int]):\n    yield from xs"),
    ("set_iteration", "def f(xs: 'frozenset[int] | None'):\n    return [*xs]"),
    ("set_iteration", "def f(a, b):\n    return [x for x in a.keys() & b]"),
    ("set_iteration", "def f(a, b):\n    return list(set(a) - set(b))"),
    ("set_iteration", "def f(a, b):\n    for x in a.symmetric_difference(b):\n        print(x)"),
    ("set_iteration", "def f(a):\n    return sum(set(a))"),
    ("set_iteration", "def f(a, size):\n    return min(set(a), key=size)"),
    ("set_iteration", "def f(a):\n    left = set(a)\n    return left.pop()"),
    ("set_iteration", "def f(a):\n    for i, x in enumerate(set(a)):\n        print(i, x)"),
    ("set_iteration", "def f(a):\n    first, second = set(a)\n    return first"),
    ("set_iteration", "def f(a):\n    b = set(a)\n    c = b\n    return sum(x for x in c)"),
    ("set_iteration", "class A:\n    names: set[str]\n    def f(self):\n        return list(self.names)"),
    (
        "set_iteration",
        "class A:\n    def __init__(self):\n        self.n = set()\n    def f(self):\n        return [*self.n]",
    ),
    ("set_iteration", "def f(a):\n    b = set(a)\n    def g():\n        return [x for x in b]\n    return g"),
    ("waits", "import asyncio"),
    ("waits", "from mcjax.aio import now_ns"),
    ("waits", "from mcjax import aio"),
    ("waits", "async def choose():\n    return 0"),
    ("mutable_global", "cache = {}"),
    ("mutable_global", "cache: dict[str, int] = {}"),
    ("mutable_global", "seen = set()"),
    ("mutable_global", "from collections import defaultdict\nby_name = defaultdict(list)"),
    ("mutable_global", "import itertools\nnumbers = itertools.count()"),
    ("mutable_global", "if True:\n    queue = []"),
    ("mutable_global", "N = 0\ndef f():\n    global N\n    N += 1"),
]


@pytest.mark.parametrize(("rule", "source"), PLANTED)
def test_planted_violation_is_caught(rule: str, source: str) -> None:
    assert rule in [v.rule for v in violations(source, DECISIONS | EVERYWHERE)]


LEGAL = [
    "import asyncio\nasync def f(loop):\n    await asyncio.sleep(0)\n    return asyncio.Lock(), loop.create_future()",
    "from mcjax import aio\nasync def f():\n    task = aio.spawn(g(), 'g')\n    await aio.sleep_ns(5)\n    await task",
    "from mcjax.aio import within, first_of\nasync def wait(future):\n    return await within(10, future)",
    "from datetime import datetime\ndef f(text):\n    return datetime.fromisoformat(text).timestamp()",
    "import numpy as np\ndef f(seed):\n    return np.random.default_rng(np.random.SeedSequence([seed, 1]))",
    "import numpy as np\ndef choose(rng: np.random.Generator):\n    return rng.random()",
    "import hashlib\ndef key(data):\n    return hashlib.sha256(data).digest()",
    "class Key:\n    def __hash__(self):\n        return hash(self.name)",
    "def f(request_id, hash_ids):\n    return {'id': request_id, 'hash': hash_ids}",
    "def f(xs):\n    return sorted(set(xs))",
    "def f(xs):\n    seen = set()\n    for x in xs:\n        seen.add(x)\n    return len(seen), 3 in seen",
    "def f(xs):\n    free = set(xs)\n    return all(x > 0 for x in free), max(free), sorted(x + 1 for x in free)",
    "def f(xs):\n    free = set(xs)\n    def g(free):\n        return list(free)\n    return g(sorted(free))",
    "def f(a, b):\n    for x in sorted(set(a) & set(b), key=str):\n        print(x)",
    "def f(a):\n    return {x + 1 for x in set(a)}",
    "def f(d):\n    for k in d.keys():\n        print(k)\n    return list(d), [v for v in d.values()]",
    "def f(xs):\n    xs = list(xs)\n    return xs.pop(), sum(xs)",
    "def g(names: set[str]):\n    return len(names)\ndef f(names: list[str]):\n    return list(names)",
    "__all__ = ['f']\nLIMITS = {'a': 1}\nfrom typing import Final\ntable: Final = {}\nname = 'x'\npair = (1, 2)",
    "Rows = dict[str, list[int]]",
    "def f():\n    cache = {}\n    return cache",
]


@pytest.mark.parametrize("source", LEGAL)
def test_legal_code_passes(source: str) -> None:
    assert violations(source, ABOVE_MECHANISMS | EVERYWHERE) == []


def test_a_decision_may_compute_but_not_wait() -> None:
    source = "import numpy as np\ndef choose(request, view, rng):\n    return int(np.argmin(view.queue_s))"
    assert violations(source, DECISIONS | EVERYWHERE) == []


def test_no_private_words_in_published_files() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in published_files(ROOT)
        if (text := text_of(path)) is not None
        for line, word in private_words(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "path: /wo" + "rk/main",
        "`/tm" + "p/x`",
        "cd /ro" + "ot",
        "file:///wo" + "rk/a",
        "pip install --index-url https://py" + "pi.org/simple x",
        "registry.npm" + "js.org",
    ],
)
def test_planted_private_word_is_caught(text: str) -> None:
    assert list(private_words(f"first line\n{text}")) != []


def test_ordinary_paths_are_no_private_words() -> None:
    text = "src/wo" + "rk/x ../tm" + "p/y {root}/wo" + "rk/ /works http://www.apache.org/licenses/ and/or"
    assert list(private_words(text)) == []


def test_file_lengths(record_property: Callable[[str, object], None]) -> None:
    """Guide: median near 120 lines, nine in ten under 350. Law: no file over 600, no kernel over 800."""
    lengths = {name: len((PACKAGE / name).read_text(encoding="utf-8").splitlines()) for name in modules()}
    written = sorted(length for length in lengths.values() if length > 1)  # not a docstring alone
    ninth_decile = written[-(-9 * len(written) // 10) - 1]
    record_property("file_lengths", f"{len(written)} files, median {statistics.median(written)}, p90 {ninth_decile}")
    too_long = {n: k for n, k in lengths.items() if k > (800 if n.startswith("kernels/") else 600)}
    assert not too_long


def _run(*command: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    inherited = os.environ.get("PYTHONPATH")
    path = str(root / "src") + (os.pathsep + inherited if inherited else "")
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def _lint(root: Path) -> subprocess.CompletedProcess[str]:
    beside = Path(sys.executable).with_name("lint-imports")
    program = str(beside) if beside.exists() else shutil.which("lint-imports")
    assert program, "import-linter is not installed; `pip install -e '.[test]'` brings it"
    return _run(program, "--no-cache", root=root)


def test_layers() -> None:
    """import-linter's contracts in pyproject.toml: the order of the house, where jax may live, where hydra may."""
    done = _lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


CONTRACTS_BROKEN = [
    ("cost/planted.py", "import mcjax.engine.base", "A package imports only"),
    ("kvpool/planted.py", "from mcjax.sched import view", "A package imports only"),
    ("backends/planted.py", "import mcjax.track", "A package imports only"),
    ("novelty/__init__.py", "", "A package imports only"),
    ("engine/planted.py", "def f():\n    import jax.numpy", "jax lives in"),
    ("models/__init__.py", "import flax.nnx", "jax lives in"),
    ("backends/sim/planted.py", "import mcjax.backends.jax", "The virtual worlds"),
    ("backends/processes/world.py", "import mcjax.backends.jax", "The virtual worlds"),
    ("sched/planted.py", "from omegaconf import DictConfig", "Only app knows hydra"),
]


@pytest.mark.parametrize(("name", "source", "contract"), CONTRACTS_BROKEN)
def test_planted_import_breaks_its_contract(name: str, source: str, contract: str, tmp_path: Path) -> None:
    house = tmp_path / "src" / "mcjax"
    for package in PACKAGE.rglob("__init__.py"):
        copy = house / package.relative_to(PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.touch()
    modules = ("types.py", "errors.py", "aio/clock.py", "engine/base.py", "sched/view.py")
    for module in (*modules, "backends/processes/world.py"):
        (house / module).touch()
    planted = house / name
    planted.parent.mkdir(exist_ok=True)
    planted.write_text(source)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    done = _lint(tmp_path)
    verdicts = [line for line in done.stdout.splitlines() if line.endswith((" BROKEN", " KEPT"))]
    assert len(verdicts) == 4, done.stdout + done.stderr
    assert [line.startswith(contract) for line in verdicts if line.endswith(" BROKEN")] == [True]


LOADED = "import sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"


def _loaded_by(statement: str) -> list[str]:
    done = _run(sys.executable, "-c", f"{statement}; {LOADED}")
    assert done.returncode == 0, done.stderr
    return [name for name in HEAVY if name in done.stdout.split()]


def test_import_mcjax_is_light() -> None:
    assert _loaded_by("import mcjax") == []


def test_every_package_init_is_light() -> None:
    packages = sorted(
        ".".join(("mcjax", *path.parent.relative_to(PACKAGE).parts)) for path in PACKAGE.rglob("__init__.py")
    )
    assert _loaded_by(f"import {', '.join(packages)}") == []


def test_planted_heavy_import_is_seen() -> None:
    assert _loaded_by("import mcjax, rich") == ["rich"]


def test_pyright_is_strict_outside_the_jax_packages() -> None:
    """A package added to the house must be added to the strict list too."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    strict = config["tool"]["pyright"]["strict"]
    packages = [path.parent.relative_to(ROOT).as_posix() for path in PACKAGE.glob("*/__init__.py")]
    packages += [path.parent.relative_to(ROOT).as_posix() for path in PACKAGE.glob("backends/*/__init__.py")]
    lenient = {f"src/mcjax/{name}" for name in ("kernels", "models", "backends", "backends/jax", "conf")}
    assert sorted(set(packages) - lenient - set(strict)) == []
    assert "src/mcjax/*.py" in strict
    assert "src/mcjax/backends/*.py" in strict
