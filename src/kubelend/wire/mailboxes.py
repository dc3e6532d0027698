"""Cluster namespaces: names, labels, texts and manifests, shared by the broker and the agents.

A cluster namespace is a namespace of the broker's cluster that belongs to one cluster (docs/transports.md).
Its account may write requests and read responses, but cannot write responses; the only status that it may
write is that of ProviderInstructions. `kubelend create clusternamespace` prints the manifests.
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import ClassVar, Final, TypeVar

import msgspec

from kubelend.core.errors import InvalidInput, KubelendError, UnexpectedAnswer
from kubelend.wire import bodies, names, problems
from kubelend.wire.objects import Metadata, Object, Question, Reply

Body = TypeVar("Body")

OWNER: Final = "broker.fluidos.eu/cluster-id"
"""The label of a cluster namespace: its value is the cluster ID."""
KEY: Final = "broker.fluidos.eu/idempotency-key"
"""The annotation of a reservation that an agent requests: the same key gives the same reservation."""
NAME: Final = "session"
"""Of the ClusterSession, the one object for requests about the whole cluster."""

NOBODY: Final = Reply()

_LABEL: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)

_INSTRUCTIONS: Final = msgspec.json.Decoder(bodies.Instruction)
_RESERVATIONS: Final = msgspec.json.Decoder(bodies.Reservation)
_ADVERTISEMENTS: Final = msgspec.json.Decoder(bodies.Advertisement)


class Namespace(Object, frozen=True):
    """A Namespace with its metadata only."""

    group: ClassVar[str] = ""
    version: ClassVar[str] = "v1"
    kind: ClassVar[str] = "Namespace"
    plural: ClassVar[str] = "namespaces"

    metadata: Metadata

    @property
    def owner(self) -> str:
        """The cluster ID; empty without the label."""
        return self.metadata.labels.get(OWNER, "")


def check_owner(cluster: str) -> str:
    """Checks that the ID can be a label value: not every common name of a certificate is one."""
    if not _LABEL.fullmatch(cluster):
        raise InvalidInput(
            f"{cluster[:64]!r} cannot have a cluster namespace: the cluster ID is not a valid label value",
            hint="use up to 63 letters, digits, dashes, dots and underscores",
        )
    return cluster


def advertisement_name(cluster: str) -> str:
    return f"{names.safe(cluster)}-adv"


def reservation_name(key: str) -> str:
    """Derived from the key alone, so that a repeated request finds its object."""
    return f"ask-{sha256(key.encode()).hexdigest()[:40]}"


def instruction_name(reservation: str) -> str:
    return f"{names.safe(reservation)}-provider"


def mirror_name(reservation: str) -> str:
    """Of an object that shows a reservation which was requested elsewhere."""
    return names.safe(reservation)


def question(asked: Question) -> dict[str, object]:
    """For a merge patch: replaces all fields of the previous request."""
    return {"id": asked.id, "verb": asked.verb, "arguments": asked.arguments, "agent": asked.agent}


def reply(said: Reply) -> dict[str, object]:
    return {"requestID": said.request_id, "body": said.body, "error": said.error}


def instruction(said: Reply | None) -> bodies.Instruction | None:
    """The latest instruction about a reservation; None if there is none yet."""
    return None if said is None or not said.body else _read(said.body, _INSTRUCTIONS)


def advertisement(said: Reply) -> bodies.Advertisement:
    return _read(said.body, _ADVERTISEMENTS)


def reservation(said: Reply | None) -> bodies.Reservation | None:
    """The reservation that was requested by ID; None if the broker does not support this verb."""
    return None if said is None or not said.body else _read(said.body, _RESERVATIONS)


def refusal(said: Reply | None) -> KubelendError | None:
    """The broker's error, if there is one."""
    if said is None or not said.error:
        return None
    return problems.from_answer(0, said.error.encode())


def refused(error: KubelendError) -> str:
    """The JSON text of an error, without its explanation, which can be long: `kubelend explain` shows it."""
    problem = problems.to_problem(error)
    return msgspec.json.encode(msgspec.structs.replace(problem, explanation=None)).decode()


def text(body: bodies.Body) -> str:
    return msgspec.json.encode(body).decode()


def _read(said: str, decoder: msgspec.json.Decoder[Body]) -> Body:
    try:
        return decoder.decode(said)
    except msgspec.MsgspecError as error:
        raise UnexpectedAnswer(f"the broker's response cannot be decoded: {error}") from error
