"""Where the everyday commands are carried out: at the broker itself, or in a cluster of the kubeconfig.

`kubectl lend` means the cluster that kubectl means: that of the current context, or of the flags that kubectl
has for it. There it looks at objects and makes some, with the user's own rights, and needs no certificate.
Whoever names a broker gets the broker. `kubelend` by itself asks the broker, unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated

import msgspec
import typer

from kubelend.apps.settings import ClientSettings
from kubelend.core.errors import InvalidInput, InvalidSettings

PLUGIN = "kubectl lend"
"""What `main` calls itself when kubectl has started it."""


class Place(msgspec.Struct, frozen=True):
    """A cluster, as kubectl's flags name it; what is empty is up to the kubeconfig."""

    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""
    timeout: timedelta = timedelta(seconds=30)
    is_everywhere: bool = False
    """All namespaces at once."""


Settings = ClientSettings | Place

ContextName = Annotated[
    str,
    typer.Option(
        "--context",
        help="Work on the objects in the cluster of this context, with its user's rights, instead of"
        " asking a broker. As `kubectl lend` this is the default, with the current context.",
        metavar="NAME",
    ),
]
Kubeconfig = Annotated[
    str,
    typer.Option("--kubeconfig", help="The kubeconfig that has the context.", metavar="PATH"),
]
Namespace = Annotated[
    str,
    typer.Option(
        "--namespace",
        "-n",
        help="Of the objects; the context's, or where the broker is, if not given.",
        metavar="NAME",
    ),
]
Everywhere = Annotated[
    bool,
    typer.Option("--all-namespaces", "-A", help="Objects of all namespaces of the cluster."),
]


class Named(msgspec.Struct, frozen=True):
    """How the broker was named, if it was."""

    by_flag: bool = False
    by_variable: bool = False


def is_wanted(place: Place, named: Named, program: str) -> bool:
    """Whether the objects of a cluster are meant: flags win over variables, and both over the name."""
    is_place_named = bool(place.kubeconfig or place.context or place.namespace)
    if is_place_named and named.by_flag:
        raise InvalidSettings(
            "a broker and a cluster are named both",
            hint="give --broker and --cert-path, or --context, --kubeconfig and --namespace",
        )
    if is_place_named or named.by_flag:
        return is_place_named
    return program == PLUGIN and not named.by_variable


def everywhere(settings: Settings) -> Place:
    """The same cluster, with all of its namespaces."""
    if not isinstance(settings, Place):
        raise InvalidInput("--all-namespaces goes with a cluster", hint="give --context as well")
    if settings.namespace:
        raise InvalidInput("--namespace and --all-namespaces exclude each other", hint="give one")
    return msgspec.structs.replace(settings, is_everywhere=True)


def gathered(arguments: Sequence[str]) -> list[str]:
    """With kubectl's flags behind the command: its users write them before it as well."""
    before: list[str] = []
    moved: list[str] = []
    rest = list(arguments)
    while rest:
        name, equals, _ = rest[0].partition("=")
        if name in _WITH_VALUE or name in _ALONE:
            count = 2 if name in _WITH_VALUE and not equals else 1
            moved += rest[:count]
            del rest[:count]
        elif rest[0].startswith("-") and rest[0] not in _ROOTS_OWN:
            break
        else:
            before.append(rest.pop(0))
    end = rest.index("--") if "--" in rest else len(rest)
    return [*before, *rest[:end], *moved, *rest[end:]]


_WITH_VALUE = frozenset({"--context", "--kubeconfig", "--namespace", "-n"})
_ALONE = frozenset({"--all-namespaces", "-A"})
_ROOTS_OWN = frozenset({"--debug"})
