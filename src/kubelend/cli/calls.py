"""Connects to a backend and calls it: the one place where the command line runs an event loop."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import msgspec

from kubelend.apps.settings import ClientSettings
from kubelend.cli.options import Target
from kubelend.core.errors import InvalidInput, NoCapacity
from kubelend.wire import bodies, validation

if TYPE_CHECKING:
    from kubelend.transports.client import BrokerClient

Answer = TypeVar("Answer")
Fields = Mapping[str, str]
"""By the field of a body, the flag that sets it."""

LIVE: Final = "Reserved,Active"
"""The phases in which a reservation holds resources."""

NO_FIELDS: Final[Fields] = MappingProxyType({})


def fields_of(prefix: str, *names: str) -> dict[str, str]:
    """The fields below a prefix whose flags have their names: `maxLent` is set by `--max-lent`."""
    return {f"{prefix}{name}": f"--{_CAPITAL.sub(_lower, name)}" for name in names}


def _lower(found: re.Match[str]) -> str:
    return f"-{found[0].lower()}"


_CAPITAL: Final = re.compile("[A-Z]")


class Backend(Protocol):
    """What commands call: the broker (`BrokerClient`), or the objects of a cluster (`KubeBackend`)."""

    async def reserve(
        self, request: bodies.ReservationRequest, *, key: str = ""
    ) -> bodies.Reservation: ...

    async def get_reservation(self, reservation: str) -> bodies.Reservation: ...

    async def release(self, reservation: str) -> bodies.Reservation: ...

    async def all_reservations(
        self, *, role: str = "", phase: str = "", cluster: str = ""
    ) -> list[bodies.Reservation]: ...

    def stream(self) -> AsyncGenerator[bodies.Instruction, None]: ...

    async def explain(
        self, request: bodies.ReservationRequest, *, limit: int = 0
    ) -> bodies.Explanation: ...

    async def explain_reservation(
        self, reservation: str, *, limit: int = 0
    ) -> bodies.Explanation: ...

    async def reserve_dry_run(self, request: bodies.ReservationRequest) -> bodies.Explanation: ...

    async def cordon(self, cluster: str, reason: str = "") -> bodies.Cluster: ...

    async def uncordon(self, cluster: str) -> bodies.Cluster: ...

    async def drain(self, cluster: str, reason: str = "") -> bodies.DrainResult: ...

    async def get_cluster(self, cluster: str) -> bodies.Cluster: ...

    async def all_clusters(self) -> list[bodies.Cluster]: ...


def call_backend(
    target: Target, ask: Callable[[Backend], Awaitable[Answer]], fields: Fields = NO_FIELDS
) -> Answer:
    """Call what the flags select: a broker, or a cluster of the kubeconfig."""
    if isinstance(target, ClientSettings):
        return call_broker(target, ask, fields)
    import asyncio

    from kubelend.cli import kube_backend

    async def conversation() -> Answer:
        async with kube_backend.open_backend(target) as backend:
            return await ask(backend)

    with naming_flags(fields):
        return asyncio.run(conversation())


def call_broker(
    settings: ClientSettings,
    ask: Callable[[BrokerClient], Awaitable[Answer]],
    fields: Fields = NO_FIELDS,
) -> Answer:
    """Connect, call, disconnect. After a success, renew the certificate if that is due."""
    import asyncio

    from kubelend.cli import certificates
    from kubelend.transports.client import BrokerClient

    async def conversation() -> Answer:
        async with BrokerClient(
            settings.broker_url, settings.cert_path, timeout=settings.timeout
        ) as client:
            answer = await ask(client)
            if settings.auto_renew:
                await certificates.renew_if_due(settings, client)
            return answer

    with naming_flags(fields):
        return asyncio.run(conversation())


def search_scope(backend: Backend) -> str:
    """Where objects were searched, as the end of a sentence; empty for a broker."""
    return str(getattr(backend, "where", ""))


@contextlib.contextmanager
def naming_flags(fields: Fields) -> Iterator[None]:
    """Make errors name the flag that was typed, instead of the field of the body."""
    try:
        yield
    except NoCapacity as error:
        error.hint = suggest_flags(error.hint)
        raise
    except InvalidInput as error:
        message = _with_flag(error.message, fields)
        if message == error.message:
            raise
        raise type(error)(message, hint=error.hint) from error


def suggest_flags(text: str) -> str:
    """A suggestion of the broker, with the flags to change."""
    for change, flag in _SUGGESTED_CHANGES:
        text = change.sub(flag, text)
    return text


_SUGGESTED_CHANGES: Final = (
    (re.compile("remove the pin to another cluster"), "leave out --cluster"),
    (re.compile("remove its exclusion"), "leave out its --exclude"),
    (re.compile(r"drop the label topology\.kubernetes\.io/(region=\S+)"), r"leave out --\1"),
    (re.compile(r"drop the label (\S+)"), r"leave out --label \1"),
    (re.compile(r"allow (\S+) (\S+) per hour"), r"set --max-price \1 --currency \2"),
)


def _with_flag(message: str, fields: Fields) -> str:
    if message.startswith(_UNDECODABLE):
        error = msgspec.ValidationError(message.removeprefix(_UNDECODABLE))
        match = _FIELD.match(validation.readable_validation_error(error))
    else:
        match = _FIELD.match(message)
    if match is None:
        return message
    path, problem = match["path"].removeprefix("spec."), match["problem"]
    for end in range(len(path), 0, -1):
        if (flag := fields.get(path[:end])) is not None and path[end : end + 1] in {"", ".", "["}:
            rest = path[end:].strip('.[]"')
            return f"{flag}{f' {rest}' if rest else ''}: {problem}"
    return message


_FIELD: Final = re.compile(r"(?P<path>[A-Za-z][\w./\[\]-]*): (?P<problem>.*)", re.DOTALL)
_UNDECODABLE: Final = "body: "
