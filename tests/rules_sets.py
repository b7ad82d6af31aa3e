"""Finds iteration over sets: their order follows hashes, so it differs between processes and Python versions.

A consumer that cannot see the order (`sorted`, `len`, `any`, `all`, `set`, `min` and `max` without a key, `math.fsum`,
membership, a set comprehension) is legal.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

BLIND = "sorted len any all set frozenset min max fsum bool isinstance issubset issuperset isdisjoint".split()
"""Calls whose result does not depend on the order of their argument."""

ORDERED = (
    "list tuple iter enumerate next zip map filter reversed sum reduce deque dict fromkeys join extend extendleft "
    "chain from_iterable islice fromiter array asarray accumulate product combinations permutations writelines"
).split()
"""Calls that show, keep or fold in the order of their arguments."""

SET_METHODS = "union intersection difference symmetric_difference".split()
SET_TYPES = "set frozenset Set FrozenSet AbstractSet MutableSet".split()
OPERATORS = (ast.BitOr, ast.BitAnd, ast.Sub, ast.BitXor)


def set_iterations(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """`(line, source text)` of every place where a set's order can be seen."""
    yield from _Finder(tree, frozenset(), _attributes(tree)).run()


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a scope, without those of the functions and classes inside it (they themselves are included)."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield from _own_nodes(child)


def _annotated_as_set(annotation: ast.expr | None) -> bool:
    if annotation is None:
        return False
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return _annotated_as_set(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.BinOp):
        return _annotated_as_set(annotation.left) or _annotated_as_set(annotation.right)
    if isinstance(annotation, ast.Subscript):
        if _last(annotation.value) in ("Final", "ClassVar", "Optional", "Annotated"):
            inner = annotation.slice.elts[0] if isinstance(annotation.slice, ast.Tuple) else annotation.slice
            return _annotated_as_set(inner)
        return _last(annotation.value) in SET_TYPES
    return _last(annotation) in SET_TYPES


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _attributes(tree: ast.Module) -> frozenset[str]:
    """Attribute names that some class of the file declares or sets as a set."""
    names: list[str] = []
    no_names = _Finder(tree, frozenset(), frozenset())
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names += [
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and _annotated_as_set(item.annotation)
            ]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
            if _annotated_as_set(node.annotation):
                names.append(node.target.attr)
        elif isinstance(node, ast.Assign) and no_names.is_set(node.value):
            names += [target.attr for target in node.targets if isinstance(target, ast.Attribute)]
    return frozenset(names)


class _Finder:
    """Looks at one scope, then at those inside it, with the names known to be sets."""

    def __init__(self, scope: ast.AST, outer: frozenset[str], attributes: frozenset[str]):
        self.scope = scope
        self.attributes = attributes
        self.names = outer
        self.blind: list[ast.AST] = []

    def run(self) -> Iterator[tuple[int, str]]:
        own = list(_own_nodes(self.scope))
        self.names = self._names(own)
        self.blind = [
            argument for node in own if isinstance(node, ast.Call) and _is_blind(node) for argument in node.args
        ]
        for node in own:
            for iterated in self._iterated(node):
                if self.is_set(iterated):
                    yield iterated.lineno, ast.unparse(iterated)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
                yield from _Finder(node, self.names, self.attributes).run()

    def _names(self, own: list[ast.AST]) -> frozenset[str]:
        # A name that this scope assigns is its own, whatever it was outside.
        names = self.names - {n.id for n in own if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        if isinstance(self.scope, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            arguments = self.scope.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            names -= {argument.arg for argument in every}
            names |= {argument.arg for argument in every if _annotated_as_set(argument.annotation)}
        # Twice, so that a name set from another name is found whatever the order.
        for _ in range(2):
            self.names = names
            for node in own:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    if _annotated_as_set(node.annotation) or (node.value is not None and self.is_set(node.value)):
                        names |= {node.target.id}
                elif isinstance(node, ast.Assign) and self.is_set(node.value):
                    names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
                elif isinstance(node, ast.NamedExpr) and self.is_set(node.value):
                    names |= {node.target.id}
        return names

    def _iterated(self, node: ast.AST) -> Iterator[ast.expr]:
        if isinstance(node, (ast.For, ast.AsyncFor)):
            yield node.iter
        elif isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.DictComp)):
            if not any(node is argument for argument in self.blind):
                yield from (generator.iter for generator in node.generators)
        elif isinstance(node, (ast.Starred, ast.YieldFrom)) or (
            isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Tuple, ast.List))
        ):
            yield node.value
        elif isinstance(node, ast.Call):
            yield from self._called(node)

    def _called(self, node: ast.Call) -> Iterator[ast.expr]:
        name = _last(node.func)
        if name in ORDERED or (name in ("min", "max") and not _is_blind(node)):
            yield from node.args
        if isinstance(node.func, ast.Attribute) and name == "pop" and not node.args:
            yield node.func.value

    def is_set(self, node: ast.expr) -> bool:
        """True when the expression is surely a set, as far as this scope tells."""
        if isinstance(node, (ast.Set, ast.SetComp)):
            return True
        if isinstance(node, (ast.Name, ast.Attribute)):
            return node.id in self.names if isinstance(node, ast.Name) else node.attr in self.attributes
        if isinstance(node, ast.IfExp):
            return self.is_set(node.body) or self.is_set(node.orelse)
        if isinstance(node, ast.BinOp):
            sides = (node.left, node.right)
            return isinstance(node.op, OPERATORS) and any(self.is_set(side) or _is_view(side) for side in sides)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                copied = node.func.attr == "copy" and self.is_set(node.func.value)
                return copied or node.func.attr in SET_METHODS
            func = node.func.value if isinstance(node.func, ast.Subscript) else node.func
            return _last(func) in ("set", "frozenset")
        return False


def _is_blind(node: ast.Call) -> bool:
    """`min` and `max` with a key return the first of equals, so they do see the order."""
    name = _last(node.func)
    return name in BLIND and not (name in ("min", "max") and any(keyword.arg == "key" for keyword in node.keywords))


def _is_view(node: ast.expr) -> bool:
    """`d.keys()` or `d.items()`: an operator makes a set of it."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("keys", "items")
