"""The AST checker behind test_rules.py: finds what a reproducible policy layer must not contain.

`violations(source, rules)` parses one file and returns what it found; nothing is imported or run. It follows names
inside a function and attributes inside a file, not values across calls: enough to catch a slip, not a conspiracy.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rules_sets import set_iterations

MODULES = {
    "time": ("time",),
    "random": ("random",),
    "uuid": ("uuid",),
    "secrets": ("secrets",),
    "threads": ("threading", "_thread", "concurrent", "multiprocessing"),
}
"""Rule -> modules whose import breaks it."""

ASYNCIO = (
    "wait wait_for timeout timeout_at TaskGroup gather as_completed to_thread run run_coroutine_threadsafe Runner"
).split()
ON_A_LOOP = "run_in_executor run_until_complete run_forever call_later call_at call_soon_threadsafe".split()
SEEDED = "Generator BitGenerator SeedSequence default_rng PCG64 PCG64DXSM Philox SFC64 MT19937".split()
UNSEEDED_MAKERS = "default_rng SeedSequence PCG64 PCG64DXSM Philox SFC64 MT19937".split()

DETERMINISM = frozenset({"random", "datetime_now", "uuid", "secrets", "hash_id", "set_iteration"})
"""What a run that is a function of its config and seed must not use, wherever the code lives."""

ABOVE_MECHANISMS = DETERMINISM | {"time", "asyncio", "create_task", "threads"}
"""Decisions and procedures: also no time or concurrency but what `aio` offers."""

DECISIONS = ABOVE_MECHANISMS | {"waits"}
"""Pure synchronous functions: they cannot wait for anything."""

EVERYWHERE = frozenset({"mutable_global"})


@dataclass(frozen=True)
class Violation:
    """One finding. `rule` is one of the names above."""

    rule: str
    line: int
    what: str


def violations(source: str, rules: Iterable[str]) -> list[Violation]:
    """What `source` does against `rules`, in order of line. Raises `SyntaxError` for what is not Python."""
    tree = ast.parse(source)
    wanted = set(rules)
    found = [*_imports(tree), *_uses(tree), *_hashes(tree), *_mutable_globals(tree)]
    found += [Violation("set_iteration", line, what) for line, what in set_iterations(tree)]
    return sorted((v for v in found if v.rule in wanted), key=lambda v: (v.line, v.rule, v.what))


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a name or attribute chain; a call or subscript in between becomes `?`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return "?"


def _imports(tree: ast.Module) -> Iterator[Violation]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for module, name in names:
            root = module.split(".")[0]
            for rule, banned in MODULES.items():
                if root in banned:
                    yield Violation(rule, node.lineno, f"import of {module}")
            if root == "asyncio":
                yield Violation("waits", node.lineno, "import of asyncio")
                if name in ASYNCIO or name == "sleep":
                    yield Violation("asyncio", node.lineno, f"import of asyncio.{name}")
                if name in ("create_task", "ensure_future"):
                    yield Violation("create_task", node.lineno, f"import of asyncio.{name}")
            if module == "mcjax.aio" or (module == "mcjax" and name == "aio"):
                yield Violation("waits", node.lineno, "import of mcjax.aio")
            if (module, name) in (("os", "urandom"), ("os", "getrandom")):
                yield Violation("random", node.lineno, f"import of os.{name}")
            if module == "numpy.random" and name and name not in SEEDED:
                yield Violation("random", node.lineno, f"import of numpy.random.{name}")


def _uses(tree: ast.Module) -> Iterator[Violation]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield from _attribute(node)
        elif isinstance(node, ast.Name) and node.id.startswith("perf_counter"):
            yield Violation("time", node.lineno, node.id)
        elif isinstance(node, ast.Call):
            called = dotted(node.func)
            last = called.rpartition(".")[2]
            if last in UNSEEDED_MAKERS and not node.args and not node.keywords:
                yield Violation("random", node.lineno, f"{called}() without a seed")
            # `sleep(0)` yields and takes no time; any other sleep is on the wall clock.
            yields_only = len(node.args) == 1 and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
            if called == "asyncio.sleep" and not yields_only:
                yield Violation("asyncio", node.lineno, called)
        elif isinstance(node, (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)):
            yield Violation("waits", node.lineno, type(node).__name__)


def _attribute(node: ast.Attribute) -> Iterator[Violation]:
    name = dotted(node)
    owner, _, last = name.rpartition(".")
    if last.startswith("perf_counter") or owner == "time":
        yield Violation("time", node.lineno, name)
    if last in ("now", "utcnow", "today") and owner.rpartition(".")[2] in ("datetime", "date"):
        yield Violation("datetime_now", node.lineno, name)
    if name in ("os.urandom", "os.getrandom"):
        yield Violation("random", node.lineno, name)
    if owner in ("np.random", "numpy.random") and last not in SEEDED:
        yield Violation("random", node.lineno, name)
    if (owner == "asyncio" and last in ASYNCIO) or last in ON_A_LOOP:
        yield Violation("asyncio", node.lineno, name)
    if last == "create_task" or name == "asyncio.ensure_future":
        yield Violation("create_task", node.lineno, name)


def _hashes(tree: ast.Module) -> Iterator[Violation]:
    """`hash` and `id` called, or passed as a function; `__hash__` may call `hash`, since dicts keep insertion order."""
    allowed = {
        inner
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef) and outer.name == "__hash__"
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or node in allowed:
            continue
        if isinstance(node.func, ast.Name) and node.func.id in ("hash", "id"):
            yield Violation("hash_id", node.lineno, f"{node.func.id}()")
        functions = [keyword.value for keyword in node.keywords if keyword.arg == "key"]
        functions += node.args[:1] if dotted(node.func) in ("map", "filter") else []
        for value in functions:
            if isinstance(value, ast.Name) and value.id in ("hash", "id"):
                yield Violation("hash_id", node.lineno, f"{value.id} as a function")


MUTABLE_MAKERS = "list dict set bytearray defaultdict deque OrderedDict Counter count cycle".split()


def _mutable_globals(tree: ast.Module) -> Iterator[Violation]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield Violation("mutable_global", node.lineno, f"global {', '.join(node.names)}")
    for statement in _module_level(tree.body):
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            if "Final" in ast.unparse(statement.annotation):
                continue
            targets, value = [statement.target], statement.value
        else:
            continue
        if not _mutable(value):
            continue
        for target in targets:
            for name in ast.walk(target):
                if isinstance(name, ast.Name) and name.id != "__all__" and not _constant_name(name.id):
                    yield Violation("mutable_global", statement.lineno, name.id)


def _module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With, ast.For)):
            yield from _module_level(statement.body)
            yield from _module_level(getattr(statement, "orelse", []))


def _mutable(value: ast.expr) -> bool:
    if isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)):
        return True
    if isinstance(value, ast.Call):
        func = value.func.value if isinstance(value.func, ast.Subscript) else value.func
        owner, _, name = dotted(func).rpartition(".")
        return name in MUTABLE_MAKERS and owner in ("", "collections", "itertools")
    return isinstance(value, ast.Tuple) and any(_mutable(element) for element in value.elts)


def _constant_name(name: str) -> bool:
    return name == name.upper() and any(letter.isalpha() for letter in name)
