"""OpenAPI 3.1 document, generated from the routes and the types of their bodies."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec

from kubelend.wire import bodies, json_types, problems
from kubelend.wire.route import COMMON_ERRORS, EVENT_STREAM, Parameter, Route
from kubelend.wire.routes import ROUTES

Json = dict[str, Any]

_TITLE = "Kubelend broker"
_DESCRIPTION = (
    "REST API of the broker for multi-cluster capacity sharing. All requests use mutual TLS: the common name"
    " of the client certificate is the cluster ID, its organisation the role. An agent sends an instance ID,"
    " new at each start, in the header Kubelend-Agent: while one instance is active for a cluster, requests"
    " of another are rejected with IdentityInUse."
)
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_REFERENCE = re.compile(r'"#/components/schemas/(\w+)"')
_PATH_PARAMETER_SCHEMA: Json = {"type": "string", "minLength": 1, **json_types.PLAIN}


@cache
def document_bytes(version: str) -> bytes:
    """The document as served and committed, indented."""
    return msgspec.json.format(msgspec.json.encode(document(version)), indent=2) + b"\n"


def document(version: str) -> Json:
    """Build the document; deterministic for a version."""
    types = [*_types(), bodies.Problem]
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    schema_of = {repr(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    _allow_nulls(components, [schema_of[repr(route.body)] for route in ROUTES if route.body])
    return {
        "openapi": "3.1.0",
        "info": {
            "title": _TITLE,
            "version": version,
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "https://localhost:8443"}],
        "security": [{"mutualTLS": []}],
        "paths": _paths(schema_of),
        "components": {
            "schemas": components,
            "securitySchemes": {"mutualTLS": {"type": "mutualTLS"}},
        },
    }


def _allow_nulls(components: dict[str, Json], bodies: list[Json]) -> None:
    """In what a request contains, null in an optional field is the same as no field."""
    for name in _referenced(components, bodies):
        found = components[name]
        required = found.get("required", [])
        for field, schema in found.get("properties", {}).items():
            if field not in required:
                found["properties"][field] = _nullable(schema)


def _referenced(components: dict[str, Json], schemas: list[Json]) -> set[str]:
    found: set[str] = set()
    unread = schemas
    while unread:
        text = msgspec.json.encode(unread).decode()
        names = set(_REFERENCE.findall(text)) - found
        found |= names
        unread = [components[name] for name in sorted(names)]
    return found


def _nullable(schema: Json) -> Json:
    null = {"type": "null"}
    if "anyOf" in schema:
        return schema if null in schema["anyOf"] else {**schema, "anyOf": [*schema["anyOf"], null]}
    if schema.keys().isdisjoint({"enum", "not", "$ref"}):
        return {**schema, "type": [schema["type"], "null"]}
    rest = {name: value for name, value in schema.items() if name != "default"}
    return {"anyOf": [rest, null], "default": schema["default"]}


def _types() -> list[Any]:
    found: list[Any] = []
    for route in ROUTES:
        for kind in (route.body, *route.responses.values()):
            if kind is not None and kind not in found:
                found.append(kind)
    return found


def _paths(schema_of: dict[str, Json]) -> Json:
    paths: Json = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
    return paths


def _operation(route: Route, schema_of: dict[str, Json]) -> Json:
    operation: Json = {
        "operationId": route.name,
        "summary": route.summary,
        "description": f"Access: {route.access}.",
        "parameters": [*_path_parameters(route), *map(_parameter, route.parameters)],
        "responses": {**_responses(route, schema_of), **_errors(route, schema_of)},
    }
    if route.body is not None:
        content = {"application/json": {"schema": schema_of[repr(route.body)]}}
        operation["requestBody"] = {"required": _requires_body(route), "content": content}
    return operation


def _path_parameters(route: Route) -> list[Json]:
    return [
        {"name": name, "in": "path", "required": True, "schema": _PATH_PARAMETER_SCHEMA}
        for name in _PLACEHOLDER.findall(route.path)
    ]


def _parameter(parameter: Parameter) -> Json:
    return {
        "name": parameter.name,
        "in": parameter.location,
        "description": parameter.description,
        "schema": msgspec.json.schema(parameter.schema),
    }


def _responses(route: Route, schema_of: dict[str, Json]) -> Json:
    answers: Json = {}
    for status, kind in route.responses.items():
        answer: Json = {"description": route.summary}
        if kind is not None:
            schema = schema_of[repr(kind)]
            schema = _event(schema) if route.media_type == EVENT_STREAM else schema
            answer["content"] = {route.media_type: {"schema": schema}}
        answers[str(status)] = answer
    return answers


def _event(data: Json) -> Json:
    """Schema of one event of a stream, in the style of OpenAPI 3.2."""
    nothing = {"type": "object", "maxProperties": 0}
    return {
        "type": "object",
        "description": "One event. `reset` has no data: drop all known state, the full state follows.",
        "properties": {
            "event": {"type": "string", "enum": ["instruction", "reset"]},
            "id": {"type": "string"},
            "data": {
                "type": "string",
                "contentMediaType": "application/json",
                "contentSchema": {"anyOf": [data, nothing]},
            },
        },
        "required": ["event", "data"],
    }


def _errors(route: Route, schema_of: dict[str, Json]) -> Json:
    content = {problems.CONTENT_TYPE: {"schema": schema_of[repr(bodies.Problem)]}}
    answers: Json = {}
    for kind in route.declared_errors:
        status = str(int(problems.http_status(kind(""))))
        described = answers.get(status, {}).get("description")
        codes = f"{described}, {kind.code}" if described else kind.code
        answers[status] = {"description": codes, "content": content}
    answers["default"] = {"description": _OTHER_ERRORS, "content": content}
    return answers


_OTHER_ERRORS = (
    f"Any other error. Errors of all routes: {', '.join(problems.status_and_codes(COMMON_ERRORS))}"
)


def _requires_body(route: Route) -> bool:
    """A body whose fields all have defaults is optional, except in a PUT, which replaces the whole object."""
    return route.method == "PUT" or any(
        field.required for field in msgspec.structs.fields(route.body)
    )
