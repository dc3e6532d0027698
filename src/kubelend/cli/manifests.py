"""What `make manifests` writes: the CustomResourceDefinitions as files, and the page about their fields."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from kubelend.wire import crds, docstrings, rules

_HEADER = "# Made by `make manifests` from the records in src/kubelend/wire. Do not edit.\n"


def files(directory: Path) -> dict[Path, str]:
    """Every definition as it is applied, for servers from 1.25 on."""
    return {directory / name: text(document) for name, document in crds.documents().items()}


def text(document: dict[str, Any]) -> str:
    """One definition as YAML, in the order in which people read it."""
    body = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
    return f"{_HEADER}---\n{body}"


def fields() -> Iterator[tuple[str, str, list[tuple[str, ...]]]]:
    """Of each kind: its name, what it is, and a row for each field."""
    for kind in crds.KINDS:
        root = crds.definition(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        shown = {name: part for name, part in root["properties"].items() if name not in _KUBERNETES}
        rows = list(_rows("", {**root, "properties": shown}))
        yield f"{kind.kind} ({kind.group})", docstrings.of_class(kind), rows


_KUBERNETES = frozenset({"apiVersion", "kind", "metadata"})


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - PyYAML asks for each part
        """Equal parts are written out each time: `kubectl` reads anchors, people do not."""
        return True


def _scalar(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Unicode's separators are line breaks to YAML: only in double quotes they are written by their names."""
    style = '"' if _SEPARATORS.search(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_SEPARATORS = re.compile("[\u2028\u2029]")
_Dumper.add_representer(str, _scalar)


def _rows(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, part in schema.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        must = "yes" if name in schema.get("required", ()) else ""
        yield f"`{here}`", _type(part), must, part["description"], _limits(part)
        yield from _rows(f"{here}[]" if "items" in part else here, part.get("items", part))


def _type(schema: dict[str, Any]) -> str:
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    if "items" in schema:
        return f"list of {_type(schema['items'])}"
    if "additionalProperties" in schema:
        return f"map of {_type(schema['additionalProperties'])}"
    return "time" if schema.get("format") == "date-time" else str(schema["type"])


def _limits(schema: dict[str, Any]) -> str:
    said = [one["message"] for one in schema.get(rules.VALIDATIONS, ())]
    if "enum" in schema:
        said.append("one of " + ", ".join(f"`{word}`" for word in schema["enum"] if word))
    for key, words in _BOUNDS.items():
        if key in schema:
            said.append(words.format(schema[key]))
    return "; ".join(said)


_BOUNDS = {
    "minimum": "at least {}",
    "maximum": "at most {}",
    "maxLength": "up to {} characters",
    "maxItems": "up to {} items",
    "maxProperties": "up to {} names",
    "default": "`{}` if not said",
}
