"""Names, labels, payloads and RBAC of a cluster namespace, shared by the broker and the agent.

A cluster namespace is a namespace of the broker's cluster that belongs to one member cluster
(docs/transports.md). The agent's transport `kubernetes` and the broker's controllers use this.
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
"""Label that makes a namespace a cluster namespace. Its value is the cluster's ID."""
KEY: Final = "broker.fluidos.eu/idempotency-key"
"""Annotation with the idempotency key of a Reservation created by an agent."""
NAME: Final = "mailbox"
"""Name of the session object, of which each cluster namespace has one."""

NOBODY: Final = Reply()

_LABEL: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)

_INSTRUCTIONS: Final = msgspec.json.Decoder(bodies.Instruction)
_RESERVATIONS: Final = msgspec.json.Decoder(bodies.Reservation)
_ADVERTISEMENTS: Final = msgspec.json.Decoder(bodies.Advertisement)


class Namespace(Object, frozen=True):
    """Namespace, with the label that names its cluster."""

    group: ClassVar[str] = ""
    version: ClassVar[str] = "v1"
    kind: ClassVar[str] = "Namespace"
    plural: ClassVar[str] = "namespaces"

    metadata: Metadata

    @property
    def owner(self) -> str:
        """ID of the cluster; empty if this is not a cluster namespace."""
        return self.metadata.labels.get(OWNER, "")


def check_owner(cluster: str) -> str:
    """Return the cluster ID if it can be a label value; not every common name of a certificate can."""
    if not _LABEL.fullmatch(cluster):
        raise InvalidInput(
            f"{cluster[:64]!r}: cluster ID is not a valid label value",
            hint="use up to 63 letters, digits, dashes, dots and underscores",
        )
    return cluster


def advertisement_name(cluster: str) -> str:
    return f"{names.safe(cluster)}-adv"


def reservation_name(key: str) -> str:
    """Name of a Reservation that an agent creates. Derived from the idempotency key alone, so that a retry
    finds it.
    """
    return f"ask-{sha256(key.encode()).hexdigest()[:40]}"


def instruction_name(reservation: str) -> str:
    return f"{names.safe(reservation)}-provider"


def mirror_name(reservation: str) -> str:
    """Name of the copy of a Reservation that was not created in this namespace."""
    return names.safe(reservation)


def question(asked: Question) -> dict[str, object]:
    """Encode a call for a merge patch. All fields are set, so that nothing of the previous call remains."""
    return {"id": asked.id, "call": asked.call, "text": asked.text, "agent": asked.agent}


def reply(said: Reply) -> dict[str, object]:
    return {"question": said.question, "told": said.told, "problem": said.problem}


def instruction(said: Reply | None) -> bodies.Instruction | None:
    """Decode the latest state of a reservation; None if the broker has not responded yet."""
    return None if said is None or not said.told else _read(said.told, _INSTRUCTIONS)


def advertisement(said: Reply) -> bodies.Advertisement:
    return _read(said.told, _ADVERTISEMENTS)


def reservation(said: Reply | None) -> bodies.Reservation | None:
    """Decode the reservation that was read by name; None if the broker does not support reading by name."""
    return None if said is None or not said.told else _read(said.told, _RESERVATIONS)


def refusal(said: Reply | None) -> KubelendError | None:
    """Decode the error of a call, if it failed."""
    if said is None or not said.problem:
        return None
    return problems.from_answer(0, said.problem.encode())


def refused(error: KubelendError) -> str:
    """Encode an error. The explanation is left out because of its size; `kubelend explain` has it."""
    problem = problems.to_problem(error)
    return msgspec.json.encode(msgspec.structs.replace(problem, explanation=None)).decode()


def text(body: bodies.Body) -> str:
    return msgspec.json.encode(body).decode()


def _read(said: str, decoder: msgspec.json.Decoder[Body]) -> Body:
    try:
        return decoder.decode(said)
    except msgspec.MsgspecError as problem:
        raise UnexpectedAnswer(f"response of the broker cannot be decoded: {problem}") from problem
