"""Commands of other packages, known by name and help alone until somebody runs them.

What `bench` and `demo` import would cost every `kubelend --help` its quickness.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command


class Deferred(TyperCommand):
    """Stands for `module:attribute`, a Typer app or a plain function."""

    def __init__(self, name: str, help: str, place: str) -> None:
        super().__init__(name, help=help, rich_markup_mode=None)
        self._module, _, self._attribute = place.partition(":")

    @property
    def exists(self) -> bool:
        return importlib.util.find_spec(self._module) is not None

    def load(self) -> Any:
        """The command itself."""
        found = getattr(importlib.import_module(self._module), self._attribute)
        if isinstance(found, typer.Typer):
            return get_command(found)
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name=self.name)(found)
        return get_command(app)

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **more: Any) -> Any:
        """Called to run, or to complete, the command: from here on it is the real one."""
        return self.load().make_context(info_name, args, *rest, **more)
