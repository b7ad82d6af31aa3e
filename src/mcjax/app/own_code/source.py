"""The source of functions and classes, wherever they were defined, and whether it still is what was loaded."""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Unknown(Exception):
    """Something about the user's own code that cannot be told; the text says what."""


def text_of_file(file: str) -> str:
    """The text that a code object's file name stands for: a file, or a notebook's cell. Raises `Unknown`."""
    linecache.checkcache(file)
    text = "".join(linecache.getlines(file))
    if not text and not Path(file).is_file():
        raise Unknown(f"there is no source ({file})")
    return text


def source_of_function(function: FunctionType) -> str:
    """The definition, dedented; of a lambda, the statement that it stands in. Raises `Unknown`."""
    code = function.__code__
    text = text_of_file(code.co_filename)
    tree = _parsed(text, function.__qualname__)
    line = code.co_firstlineno
    found = [node for name, node in _definitions(tree) if name == code.co_qualname and _spans(node, line)]
    nodes = found or [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and _spans(node, line)]
    if not nodes:
        raise Unknown(f"{function.__qualname__} does not stand in {code.co_filename}")
    return _segment(text, min(nodes, key=_lines))


def source_of_class(owner: type) -> str:
    """The definition, dedented. Raises `Unknown`."""
    for text, line in _texts_with(owner):
        tree = _parsed(text, owner.__qualname__)
        found = [node for name, node in _definitions(tree) if name == owner.__qualname__]
        found = [node for node in found if isinstance(node, ast.ClassDef) and (line is None or _spans(node, line))]
        if found:
            return _segment(text, found[-1])
    raise Unknown(f"there is no source of the class {owner.__qualname__}")


def functions_of(owner: type) -> list[FunctionType]:
    """The functions that a class defines itself: methods, static and class methods, properties."""
    return [function for value in vars(owner).values() for function in unwrapped(value)]


def unwrapped(value: Any) -> list[FunctionType]:
    """The Python functions behind a method, property or the like; none for anything else."""
    if isinstance(value, FunctionType):
        return [value]
    if isinstance(value, property):
        return [function for part in (value.fget, value.fset, value.fdel) for function in unwrapped(part)]
    inner = getattr(value, "__func__", None) or getattr(value, "func", None) or getattr(value, "__wrapped__", None)
    return unwrapped(inner) if inner is not None and not isinstance(value, type) else []


def globals_named(source: str) -> list[str]:
    """Names that a definition takes from outside: those of its body, decorators, bases and defaults, in order."""
    return list(dict.fromkeys(_loaded(compile(source, "<definition>", "exec", dont_inherit=True))))


def globals_used(code: CodeType) -> Iterator[str]:
    """Names that a function takes from its module."""
    return _loaded(code)


def is_current(function: FunctionType, text: str) -> bool:
    """Whether the function that was loaded is one that `text` defines: a file may have been edited since."""
    code = function.__code__
    return any(_same(one, code) for one in _compiled(text, code.co_filename) if one.co_qualname == code.co_qualname)


@functools.lru_cache(maxsize=64)
def _compiled(text: str, file: str) -> list[CodeType]:
    try:
        return list(_all_codes(compile(text, file, "exec", dont_inherit=True)))
    except SyntaxError:  # it is being edited
        return []


def strings_of(text: str) -> Iterator[str]:
    """The text constants of a piece of code."""
    for node in ast.walk(_tree(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def imports_of(text: str, name: str) -> list[str]:
    """Modules that a module's text imports anywhere, as full names; `name` is its own, for relative ones."""
    found: list[str] = []
    for node in ast.walk(_parsed(text, name)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = _absolute(node, name)
            found += [start, *(f"{start}.{alias.name}" for alias in node.names)]  # a name may be a module
    return list(dict.fromkeys(found))


def _absolute(node: ast.ImportFrom, name: str) -> str:
    if not node.level:
        return node.module or ""
    module = sys.modules.get(name)
    is_package = hasattr(module, "__path__")
    parts = name.split(".")
    above = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*above, node.module] if node.module else above)


def _texts_with(owner: type) -> Iterator[tuple[str, int | None]]:
    """Texts that may define a class, and a line of it in there where that is known."""
    for function in functions_of(owner):
        code = function.__code__
        here = function.__globals__.get("__name__") == owner.__module__
        inside = here and code.co_qualname.startswith(f"{owner.__qualname__}.")
        if inside and linecache.getlines(code.co_filename):
            yield text_of_file(code.co_filename), code.co_firstlineno
            return
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    if file and Path(file).is_file():
        yield text_of_file(file), None
        return
    # A class of fields alone, in a notebook: whichever cell defines it, as long as it is one.
    cells = [name for name in linecache.cache if name.startswith("<ipython-input") or "ipykernel" in name]
    texts = {text_of_file(name) for name in cells}
    defining = [text for text in texts if any(name == owner.__qualname__ for name, _ in _definitions(_tree(text)))]
    if len(defining) > 1:
        raise Unknown(f"{owner.__qualname__} is defined in {len(defining)} cells")
    yield from ((text, None) for text in defining)


def _tree(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError:  # a cell that never ran
        return ast.Module([], [])


def _parsed(text: str, name: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as problem:
        raise Unknown(f"the source of {name} does not parse ({problem})") from None


def _definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Every class and function with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node
            inside = "." if isinstance(node, ast.ClassDef) else ".<locals>."
            yield from _definitions(node, f"{prefix}{node.name}{inside}")
        else:
            yield from _definitions(node, prefix)


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _spans(node: ast.stmt, line: int) -> bool:
    return _first_line(node) <= line <= (node.end_lineno or node.lineno)


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - _first_line(node)


def _segment(text: str, node: ast.stmt) -> str:
    lines = text.splitlines(keepends=True)[_first_line(node) - 1 : node.end_lineno]
    return textwrap.dedent("".join(lines)).rstrip() + "\n"


def _all_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _all_codes(constant)


def _loaded(code: CodeType) -> Iterator[str]:
    for each in _all_codes(code):
        for step in dis.get_instructions(each):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_GLOBALS"):
                yield str(step.argval)


def _same(one: CodeType, other: CodeType) -> bool:
    """Equal in what they do; lines may have moved."""
    if (one.co_code, one.co_names, one.co_varnames, one.co_freevars, one.co_flags) != (
        other.co_code,
        other.co_names,
        other.co_varnames,
        other.co_freevars,
        other.co_flags,
    ):
        return False
    if len(one.co_consts) != len(other.co_consts):
        return False
    return all(_same_constant(a, b) for a, b in zip(one.co_consts, other.co_consts, strict=True))


def _same_constant(one: Any, other: Any) -> bool:
    if isinstance(one, CodeType) and isinstance(other, CodeType):
        return _same(one, other)
    if isinstance(one, frozenset):
        return one == other
    return type(one) is type(other) and repr(one) == repr(other)
