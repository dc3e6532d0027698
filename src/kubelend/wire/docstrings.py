"""Reads docstrings of classes and of their attributes, for generated documentation, schemas and flag help.

Python does not retain attribute docstrings, so they are parsed from the source code. The agent process
never imports this module.
"""

from __future__ import annotations

import ast
import inspect
from functools import cache


def class_docstring(kind: type) -> str:
    """Returns the class docstring on one line."""
    return " ".join(inspect.cleandoc(kind.__doc__ or "").split())


@cache
def field_docstrings(kind: type) -> dict[str, str]:
    """Returns the docstrings by field name, including those of inherited fields."""
    found: dict[str, str] = {}
    for parent in reversed(kind.__mro__):
        if "__annotations__" in vars(parent):
            found |= _attribute_docstrings(parent)
    return found


def _attribute_docstrings(kind: type) -> dict[str, str]:
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
