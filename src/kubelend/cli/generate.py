"""Writes the generated files (documents and CustomResourceDefinitions), or checks that they are up to date.

python -m kubelend.cli.generate [--check]

`make generate`, `make manifests` and `make check` run it in the root of the repository.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from typer.core import TyperGroup

import kubelend
from kubelend.cli import app, output
from kubelend.cli.app import LazyCommand
from kubelend.cli.output import ExitCode
from kubelend.core.errors import KubelendError
from kubelend.wire import crds, docstrings, json_types, openapi, problems, routes
from kubelend.wire.route import BODY_ERRORS, COMMON_ERRORS, UNROUTED_ERRORS, Access, Route

_NOTICE = "<!-- Made by `make generate` from the code. Do not edit. -->"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kubelend.cli.generate")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 on a difference"
    )
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where the documents are")
    parser.add_argument(
        "--crds", type=Path, default=Path("deploy/crds"), help="where the definitions are"
    )
    options = parser.parse_args()
    stale = {
        path: text
        for path, text in {**documents(options.docs), **crd_files(options.crds)}.items()
        if not path.exists() or path.read_text("utf-8") != text
    }
    if options.check and stale:
        names = ", ".join(map(str, stale))
        sys.exit(f"error: {names} differ from the code; run `make generate`")
    for path, text in stale.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        print(f"wrote {path}")


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", _NOTICE, *parts]) + "\n"


def documents(directory: Path) -> dict[Path, str]:
    """Every generated page and its text."""
    return {
        directory / "openapi.json": output.json(openapi.document(kubelend.__version__)) + "\n",
        directory / "cli.md": command_line(),
        directory / "routes.md": rest_routes(),
        directory / "errors.md": error_codes(),
        directory / "object-fields.md": object_fields(),
    }


def command_line() -> str:
    """Every command, flag and variable, and the exit codes."""
    return _page(
        "The command line",
        "`kubelend` and `kubectl lend` are the same command with different defaults: `kubelend` calls"
        " the broker, `kubectl lend` works on the cluster of kubectl's context, where a command has"
        " `--kube-context` ([kubernetes.md](kubernetes.md#kubectl-lend)).",
        "A flag wins over `--context`, that over a variable, that over the current context of the"
        " configuration file (`kubelend config`), and that over the default. The file is"
        " `$KUBELEND_CONFIG`, or `kubelend/config.yaml` below `$XDG_CONFIG_HOME` or `~/.config`.",
        "`-o name` prints `kind/name`, and every command takes `kind/name` where it takes a name."
        " `-o json` and `-o yaml` print a list as `kind` and `items`.",
        "## Exit codes",
        _table(("code", "meaning"), ((str(int(code)), code.meaning) for code in ExitCode)),
        *_commands("kubelend", app.build_app()),
    )


def rest_routes() -> str:
    """Every route, and who may call it."""
    return _page(
        "REST routes and permissions",
        "Every call is made over mutual TLS; the client certificate identifies the caller. Errors are problem"
        " details (`application/problem+json`) with a stable `code`: [errors.md](errors.md) has all of them."
        f" Any route may also answer {', '.join(problems.status_and_codes(COMMON_ERRORS))}."
        " Bodies are in [openapi.json](openapi.json).",
        _table(("in the column of a role", "who may call"), _WORDS.items()),
        "Every route rejects callers without a certificate, or with one that is expired, revoked or issued"
        " by another authority; the broker's own certificate; and a proxy that does not forward a client's."
        " A role without permission gets 403. A reservation of other clusters is reported as 404.",
        _table(
            ("method", "path", *_ROLES, "what it does", "errors"),
            (_route_cells(route) for route in routes.ROUTES),
        ),
    )


def error_codes() -> str:
    """Every error code, and the routes that send it."""
    return _page(
        "Error codes",
        "Errors of the REST interface are problem details (RFC 9457, `application/problem+json`). `detail`"
        " says what is wrong, `hint` what to do, and `error` both; `code` is stable, for programs."
        " If `retryable` is true, the same call may succeed later; `Retry-After` says when, if that is"
        " known. A newer broker may send other codes: handle those by the HTTP status.",
        _table(("code", "status", "retryable", "meaning", "sent by"), map(_error_cells, _KINDS)),
        "The names are those of the operations in [openapi.json](openapi.json). [routes.md](routes.md) has"
        " the codes of each route. Joining has a listener of its own, the enrolment port.",
    )


def object_fields() -> str:
    """Every field of every custom resource."""
    intro = (
        "The same as `kubectl explain --recursive` prints. What each kind is for, and its columns in"
        " `kubectl get`, are in [objects.md](objects.md)."
    )
    kinds = (
        part
        for name, summary, rows in crd_fields()
        for part in (f"## {name}", summary, _table(_FIELD_HEADERS, rows))
    )
    return _page("Fields of the custom resources", intro, *kinds)


_FIELD_HEADERS = ("field", "type", "required", "meaning", "limits")

_ROLES = ("cluster", "viewer", "admin")
_WORDS = {
    "yes": "every caller with this role, a cluster for itself",
    "no": "not allowed",
    "its own": "the cluster in the path, or the requester and provider of the reservation in the path",
    "requester": "the cluster that borrowed the reservation in the path",
    "provider": "the cluster that lends the reservation in the path",
}
_WHO = {
    Access.ANYONE: ("yes", "yes", "yes"),
    Access.CLUSTER: ("yes", "no", "no"),
    Access.OWNER: ("its own", "yes", "yes"),
    Access.PARTY: ("its own", "no", "no"),
    Access.REQUESTER: ("requester", "no", "yes"),
    Access.PROVIDER: ("provider", "no", "no"),
    Access.READER: ("no", "yes", "yes"),
    Access.ADMIN: ("no", "no", "yes"),
}
"""The words for each of `_ROLES`."""


def _commands(path: str, command: Any) -> Iterator[str]:
    if isinstance(command, LazyCommand):
        command = command.load()
    context = command.make_context(path, [], resilient_parsing=True)
    yield f"## {path}"
    yield f"```\n{' '.join([path, *command.collect_usage_pieces(context)])}\n```"
    yield command.help or ""
    flags = [
        _flag_cells(parameter, context) for parameter in command.params if not _hidden(parameter)
    ]
    if flags:
        yield _table(("flag", "variable", "default", "meaning"), flags)
    if isinstance(command, TyperGroup):
        for name, child in command.commands.items():
            if not child.hidden:
                yield from _commands(f"{path} {name}", child)


def _hidden(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument" or parameter.hidden)


def _flag_cells(parameter: Any, context: Any) -> tuple[str, ...]:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    value = "" if parameter.is_flag else f" {parameter.make_metavar(ctx=context)}"
    default = parameter.get_default(context)
    text = "" if default is None or parameter.is_flag else str(default)
    return (
        names + value,
        f"`{parameter.envvar}`" if parameter.envvar else "",
        f"`{text}`" if text else "",
        parameter.help or "",
    )


def _route_cells(route: Route) -> tuple[str, ...]:
    known = ", ".join(problems.status_and_codes(route.declared_errors))
    return (route.method, f"`{route.path}`", *_WHO[route.access], route.summary, known)


def _error_cells(kind: json_types.ErrorClass) -> tuple[str, ...]:
    status, code = problems.status_and_codes([kind])[0].split()
    meaning = _INTERNAL if kind is KubelendError else docstrings.class_docstring(kind)
    again = "yes" if kind.retryable else ""
    return (f"`{code}`", status, again, meaning, ", ".join(_senders(kind)) or _NOT_SENT)


def _senders(kind: json_types.ErrorClass) -> Iterator[str]:
    if kind in COMMON_ERRORS:
        yield "any route"
    else:
        if kind in UNROUTED_ERRORS:
            yield "any call that no route takes"
        if kind in BODY_ERRORS:
            yield "any route with a body"
        named = [f"`{route.name}`" for route in routes.ROUTES if kind in route.errors]
        yield from named if len(named) <= _MOST_NAMES else ["many routes"]
    if kind in routes.ENROLMENT_ERRORS:
        yield "joining"


_KINDS = tuple(json_types.ERRORS_BY_CODE.values())
_MOST_NAMES = 8
_INTERNAL = "Unexpected error; the broker's log has the details."
_NOT_SENT = "not sent: used by commands and agents"


def _table(headers: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    cells = (tuple(cell.replace("|", "\\|") for cell in row) for row in rows)
    lines = [headers, tuple("---" for _ in headers), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# -- CustomResourceDefinitions

_CRD_HEADER = "# Made by `make manifests` from the records in src/kubelend/wire. Do not edit.\n"


def crd_files(directory: Path) -> dict[Path, str]:
    """Every definition as it is applied, for servers from 1.25 on."""
    return {directory / name: crd_yaml(document) for name, document in crds.crd_documents().items()}


def crd_yaml(document: dict[str, Any]) -> str:
    """One definition as YAML, in the order in which people read it."""
    body = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
    return f"{_CRD_HEADER}---\n{body}"


def crd_fields() -> Iterator[tuple[str, str, list[tuple[str, ...]]]]:
    """Of each kind: its name, what it is, and a row for each field."""
    for kind in crds.ALL_KINDS:
        root = crds.crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        shown = {name: part for name, part in root["properties"].items() if name not in _KUBERNETES}
        rows = list(_rows("", {**root, "properties": shown}))
        yield f"{kind.kind} ({kind.group})", docstrings.class_docstring(kind), rows


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
    parts = [one["message"] for one in schema.get(json_types.VALIDATIONS, ())]
    if "enum" in schema:
        parts.append("one of " + ", ".join(f"`{value}`" for value in schema["enum"] if value))
    for key, template in _BOUNDS.items():
        if key in schema:
            parts.append(template.format(schema[key]))
    return "; ".join(parts)


_BOUNDS = {
    "minimum": "at least {}",
    "maximum": "at most {}",
    "maxLength": "up to {} characters",
    "maxItems": "up to {} items",
    "maxProperties": "up to {} names",
    "default": "`{}` by default",
}


if __name__ == "__main__":
    main()
