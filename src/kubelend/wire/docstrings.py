"""Attribute docstrings of records, read from the source, for generated pages and schemas.

Python does not keep attribute docstrings at run time. Only generators import this, never the broker or an
agent.
"""

from __future__ import annotations

import ast
import inspect
from functools import cache


def of_class(kind: type) -> str:
    """Return the class docstring as one line."""
    return " ".join(inspect.cleandoc(kind.__doc__ or "").split())


@cache
def of_fields(kind: type) -> dict[str, str]:
    """Return the attribute docstrings by field name, including inherited fields."""
    found: dict[str, str] = {}
    for parent in reversed(kind.__mro__):
        if "__annotations__" in vars(parent):
            found |= _written(parent)
    return found


def _written(kind: type) -> dict[str, str]:
    tree = ast.parse(inspect.getsource(kind)).body[0]
    if not isinstance(tree, ast.ClassDef):
        return {}
    pairs = zip(tree.body, tree.body[1:], strict=False)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairs
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
