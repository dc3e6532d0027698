"""What the sources say of each field of a record: for the pages and schemas that are made from it.

Python keeps no docstrings of attributes, so they are read from the source. Only programs that generate
files do that: what runs in a cluster never loads this.
"""

from __future__ import annotations

import ast
import inspect
from functools import cache


def of_class(kind: type) -> str:
    """What a record is, in one line."""
    return " ".join(inspect.cleandoc(kind.__doc__ or "").split())


@cache
def of_fields(kind: type) -> dict[str, str]:
    """By the name of the field; a record that inherits a field inherits what is said of it."""
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
