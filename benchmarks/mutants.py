"""Mutants of a Python file: every small change of its syntax tree that a test should notice.

A mutant changes one place: a comparison, an arithmetic, bit or boolean operator, a number, a truth
value, a `not`, min against max, a statement left out. Type annotations, docstrings and messages of
errors are left alone.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SWAPS: dict[type[ast.AST], tuple[type[Any], ...]] = {
    **{ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE)},
    **{ast.GtE: (ast.Gt, ast.Lt), ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,)},
    **{ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,)},
    **{ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div,), ast.Div: (ast.Mult,)},
    **{ast.FloorDiv: (ast.Mult,), ast.Mod: (ast.Add,), ast.Pow: (ast.Mult,)},
    **{ast.LShift: (ast.RShift,), ast.RShift: (ast.LShift,), ast.BitAnd: (ast.BitOr,)},
    **{ast.BitOr: (ast.BitAnd,), ast.BitXor: (ast.BitAnd,), ast.And: (ast.Or,), ast.Or: (ast.And,)},
}
_NAMES = {"min": "max", "max": "min", "argmin": "argmax", "argmax": "argmin", "any": "all"}


@dataclass(frozen=True)
class Mutant:
    """One changed module.

    Attributes:
        path: of the file, relative to the root.
        line: of the changed place, from 1.
        span: first and last line of the statement around it, or of a compound statement's head:
            a run that reaches none of them cannot notice the change.
        text: the file's line.
        change: what changes, in words.
        source: the whole changed module.
    """

    path: str
    line: int
    span: tuple[int, int]
    text: str
    change: str
    source: str


def mutants(root: Path, path: str) -> Iterator[Mutant]:
    """All mutants of a file, from top to bottom."""
    text = (root / path).read_text("utf-8")
    lines, tree = text.splitlines(), ast.parse(text)
    seen = {ast.unparse(tree)}
    for number, (node, span) in enumerate(places(tree)):
        for change, edit in edits(node):
            changed = copy.deepcopy(tree)
            edit(next(n for i, (n, _) in enumerate(places(changed)) if i == number))
            source = ast.unparse(ast.fix_missing_locations(changed))
            if source not in seen:  # two ways to the same change
                seen.add(source)
                line = lines[node.lineno - 1].strip()
                yield Mutant(path, node.lineno, span, line, change, source)


def places(tree: ast.AST, span: tuple[int, int] = (0, 0)) -> Iterator[tuple[Any, tuple[int, int]]]:
    """Nodes that may change, each with its statement's lines, in the order of the text.

    Annotations, docstrings, decorators and messages of errors are not among them.
    """
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "exc", "msg"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST):
                continue
            text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if text or isinstance(node, ast.Import | ast.ImportFrom):
                continue
            inner = _span(node) or span
            if hasattr(node, "lineno"):
                yield node, inner
            yield from places(node, inner)


def _span(node: Any) -> tuple[int, int] | None:
    """Lines of a statement, of a compound one without its body; None for what is no statement."""
    if not isinstance(node, ast.stmt | ast.ExceptHandler):
        return None
    body = getattr(node, "body", None)
    last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno
    return node.lineno, last or node.lineno


def edits(node: Any) -> Iterator[tuple[str, Any]]:
    """(what changes, the function that changes such a node) for every mutation of a node."""
    if isinstance(node, ast.Compare):
        for new in _SWAPS.get(type(node.ops[0]), ()):
            yield _named(node.ops[0], new), lambda n, new=new: n.ops.__setitem__(0, new())
    elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp):
        for new in _SWAPS.get(type(node.op), ()):
            yield _named(node.op, new), lambda n, new=new: setattr(n, "op", new())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "Not left out", lambda n: setattr(n, "operand", ast.UnaryOp(ast.Not(), n.operand))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "USub left out", lambda n: setattr(n, "op", ast.UAdd())
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} -> {not node.value}", lambda n: setattr(n, "value", not n.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        for step in (1, -1):
            yield (
                f"{node.value} -> {node.value + step}",
                lambda n, s=step: setattr(n, "value", n.value + s),
            )
    elif isinstance(node, ast.Name | ast.Attribute):
        name = "id" if isinstance(node, ast.Name) else "attr"
        new_name = _NAMES.get(getattr(node, name))
        if new_name:
            yield f"{getattr(node, name)} -> {new_name}", lambda n: setattr(n, name, new_name)
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "condition negated", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call left out", lambda n: setattr(n, "value", ast.Constant(None))
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "returns None", lambda n: setattr(n, "value", ast.Constant(None))


def _named(old: ast.AST, new: type[Any]) -> str:
    return f"{type(old).__name__} -> {new.__name__}"
