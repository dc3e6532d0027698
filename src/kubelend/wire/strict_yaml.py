"""Strict YAML: text to plain values and records, with errors that name the line or the field.

For what people write: manifests, simulations, the client configuration. No text may harm the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeVar

import msgspec
import yaml

from kubelend.core.errors import InvalidInput
from kubelend.wire import validation

MAX_BYTES: Final = 2**20
"""In bytes; the limit of Kubernetes, and far more than any file needs."""

MAX_DEPTH: Final = 64
"""Nesting levels: the parser is recursive, and some 10,000 would crash the process."""

Record = TypeVar("Record")


def load_yaml(text: bytes) -> Any:
    """The plain values of one YAML document, without nulls; timestamps stay strings."""
    if len(text) > MAX_BYTES:
        raise InvalidInput(f"{len(text)} bytes, more than the limit of {MAX_BYTES}")
    try:
        decoded = text.decode()
        _check_shape(decoded)
        found = yaml.load(decoded, Loader=_Loader)  # noqa: S506  a subclass of the safe one
        return validation.without_nulls(found)
    except yaml.MarkedYAMLError as error:
        raise InvalidInput(f"not valid YAML: {_error_position(error)}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise InvalidInput(f"not valid YAML: {error}") from error


def convert_record(found: Any, kind: type[Record]) -> Record:
    """The values as a record, or `InvalidInput` that names the field."""
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise InvalidInput(validation.readable_validation_error(error)) from error


def convert_strict(found: Any, kind: type[Record]) -> Record:
    """As `convert_record`, but unknown fields are errors: for what people write."""
    made = convert_record(found, kind)
    for path in unknown_fields(found, made, ""):
        raise InvalidInput(f"{path.removeprefix('.')}: unknown field")
    return made


# The C classes are ten times faster; not every build of PyYAML has them.
_BaseLoader: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_BaseLoader):  # type: ignore[misc]  # chosen at run time
    """Keeps timestamps as strings: msgspec parses them, quoted or not, and a label may look like
    one. A key that is given twice is an error.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        known: set[Any] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # refused below, as a key that cannot be hashed
            if key.value in known:
                text = f"{key.value} is given twice"
                raise yaml.constructor.ConstructorError(problem=text, problem_mark=key.start_mark)
            known.add(key.value)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in _BaseLoader.yaml_implicit_resolvers.items()
}


def _check_shape(text: str) -> None:
    """Before anything is built: aliases can make a small text huge, and deep nesting crashes the
    parser.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            raise InvalidInput("aliases (*) are not allowed", hint="repeat the value")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise InvalidInput(f"nested more than {MAX_DEPTH} levels deep")


def _error_position(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{place}{error.problem}"


def unknown_fields(raw: Any, read: Any, path: str) -> Iterator[str]:
    if isinstance(raw, dict) and isinstance(read, msgspec.Struct):
        names = {field.encode_name: field.name for field in msgspec.structs.fields(read)}
        for name, value in raw.items():
            if name not in names:
                yield f"{path}.{name}"
            else:
                yield from unknown_fields(value, getattr(read, names[name]), f"{path}.{name}")
    elif isinstance(raw, list) and isinstance(read, list | tuple):
        for index, (value, part) in enumerate(zip(raw, read, strict=False)):
            yield from unknown_fields(value, part, f"{path}[{index}]")
