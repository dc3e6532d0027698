"""`kubelend version`: of this command, and of the broker if asked."""

from __future__ import annotations

import inspect
from typing import cast

import msgspec

import kubelend
from kubelend.apps.settings import ClientSettings
from kubelend.cli import calling, escapes, options, output
from kubelend.cli.output import Format


class Versions(msgspec.Struct, frozen=True, omit_defaults=True):
    """What answers to `version`."""

    client: str
    broker: str = ""


def _read(**values: str) -> ClientSettings | None:
    return cast("ClientSettings", options.client(**values)) if values["broker"] else None


# No broker is asked unless one is named, so this flag has no default here.
_read.__dict__["__signature__"] = inspect.Signature(
    [
        parameter.replace(default="") if parameter.name == "broker" else parameter
        for parameter in inspect.signature(options.client).parameters.values()
    ]
)


@options.takes(settings=_read)
def version(format: options.Output = Format.TABLE, *, settings: ClientSettings | None) -> None:
    """The version of this command; with --broker, also the broker's."""
    found = Versions(kubelend.__version__)
    if settings is not None:
        answer = calling.call(settings, lambda client: client.version())
        found = msgspec.structs.replace(found, broker=answer.version)
    if format is Format.JSON:
        print(output.json(found))
    elif format is Format.YAML:
        print(output.yaml(found), end="")
    else:
        print(f"Client: {found.client}")
        if found.broker:
            print(f"Broker: {escapes.line(found.broker)}")
