"""Bodies that people have written into a file, as YAML or JSON."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TypeVar

from kubelend.core.errors import InvalidInput

Body = TypeVar("Body")


def read(path: str, kind: type[Body], noun: str) -> Body:
    """The body in a file, or on standard input for `-`."""
    import msgspec
    import yaml

    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text("utf-8")
        return msgspec.convert(yaml.safe_load(text), kind, strict=False)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise InvalidInput(f"{path} is no {noun}: {error}", hint="see docs/limits.md") from error
