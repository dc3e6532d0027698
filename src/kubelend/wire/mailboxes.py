"""How the objects of a mailbox are called, and what their texts say: the same at both of its ends.

A mailbox is a namespace of the broker's cluster that belongs to one cluster; docs/transports.md tells of it.
The agent's transport `kubernetes` and the broker's controller go by this.
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
"""The label by which a namespace is a cluster's mailbox: its value is the cluster's ID."""
KEY: Final = "broker.fluidos.eu/idempotency-key"
"""The annotation of a reservation that an agent asks for: the same key, the same reservation."""
NAME: Final = "session"
"""Of the one object that stands for the whole mailbox."""

NOBODY: Final = Reply()

_LABEL: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)

_INSTRUCTIONS: Final = msgspec.json.Decoder(bodies.Instruction)
_RESERVATIONS: Final = msgspec.json.Decoder(bodies.Reservation)
_ADVERTISEMENTS: Final = msgspec.json.Decoder(bodies.Advertisement)


class Namespace(Object, frozen=True):
    """As far as whose mailbox it is."""

    group: ClassVar[str] = ""
    version: ClassVar[str] = "v1"
    kind: ClassVar[str] = "Namespace"
    plural: ClassVar[str] = "namespaces"

    metadata: Metadata

    @property
    def owner(self) -> str:
        """The cluster; empty if it is nobody's."""
        return self.metadata.labels.get(OWNER, "")


def check_owner(cluster: str) -> str:
    """The ID of a cluster that can have a mailbox: not every common name of a certificate is a label."""
    if not _LABEL.fullmatch(cluster):
        raise InvalidInput(
            f"{cluster[:64]!r} cannot have a cluster namespace: the cluster ID is not a valid label value",
            hint="use up to 63 letters, digits, dashes, dots and underscores",
        )
    return cluster


def advertisement_name(cluster: str) -> str:
    return f"{names.safe(cluster)}-adv"


def reservation_name(key: str) -> str:
    """Made from the key alone, so that who asks again finds what was asked before."""
    return f"ask-{sha256(key.encode()).hexdigest()[:40]}"


def instruction_name(reservation: str) -> str:
    return f"{names.safe(reservation)}-provider"


def mirror_name(reservation: str) -> str:
    """Of a reservation that was not asked for here, and is shown all the same."""
    return names.safe(reservation)


def question(asked: Question) -> dict[str, object]:
    """As a merge patch has it: with nothing of the question before left in it."""
    return {"id": asked.id, "verb": asked.verb, "arguments": asked.arguments, "agent": asked.agent}


def reply(said: Reply) -> dict[str, object]:
    return {"requestID": said.request_id, "body": said.body, "error": said.error}


def instruction(said: Reply | None) -> bodies.Instruction | None:
    """What the broker last said of a reservation; None if it has not spoken yet."""
    return None if said is None or not said.body else _read(said.body, _INSTRUCTIONS)


def advertisement(said: Reply) -> bodies.Advertisement:
    return _read(said.body, _ADVERTISEMENTS)


def reservation(said: Reply | None) -> bodies.Reservation | None:
    """The one that was asked for by name; None if the broker does not know that one can ask so."""
    return None if said is None or not said.body else _read(said.body, _RESERVATIONS)


def refusal(said: Reply | None) -> KubelendError | None:
    """The error which the broker raised, if it did."""
    if said is None or not said.error:
        return None
    return problems.from_answer(0, said.error.encode())


def refused(error: KubelendError) -> str:
    """The text of an error: what explains it in full is left to `kubelend explain`, for it can be long."""
    problem = problems.to_problem(error)
    return msgspec.json.encode(msgspec.structs.replace(problem, explanation=None)).decode()


def text(body: bodies.Body) -> str:
    return msgspec.json.encode(body).decode()


def _read(said: str, decoder: msgspec.json.Decoder[Body]) -> Body:
    try:
        return decoder.decode(said)
    except msgspec.MsgspecError as problem:
        raise UnexpectedAnswer(f"the broker's words cannot be read: {problem}") from problem
