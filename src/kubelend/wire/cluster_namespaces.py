"""Cluster namespaces: names, labels, texts and manifests, shared by the broker and the agents.

A cluster namespace is a namespace of the broker's cluster that belongs to one cluster (docs/transports.md).
Its account may write requests and read responses, but cannot write responses; the only status that it may
write is that of ProviderInstructions. `kubelend create clusternamespace` prints the manifests.
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Any, ClassVar, Final, TypeVar

import msgspec

from kubelend.core.errors import InvalidInput, KubelendError, UnexpectedResponse
from kubelend.wire import bodies, broker_objects, objects, problems
from kubelend.wire.broker_objects import ClusterSession
from kubelend.wire.objects import AgentRequest, BrokerResponse, Metadata, Object

DecodedBody = TypeVar("DecodedBody")

CLUSTER_LABEL: Final = "broker.fluidos.eu/cluster-id"
"""The label of a cluster namespace: its value is the cluster ID."""
IDEMPOTENCY_ANNOTATION: Final = "broker.fluidos.eu/idempotency-key"
"""The annotation of a reservation that an agent requests: the same key gives the same reservation."""
SESSION_NAME: Final = "session"
"""Of the ClusterSession, the one object for requests about the whole cluster."""

NO_RESPONSE: Final = BrokerResponse()

_LABEL_VALUE: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)

_INSTRUCTION_DECODER: Final = msgspec.json.Decoder(bodies.Instruction)
_RESERVATION_DECODER: Final = msgspec.json.Decoder(bodies.Reservation)
_HANDSHAKE_DECODER: Final = msgspec.json.Decoder(bodies.HandshakeResult)
_KEYS_DECODER: Final = msgspec.json.Decoder(bodies.KeySet)
_ADVERTISEMENT_DECODER: Final = msgspec.json.Decoder(bodies.Advertisement)


class Namespace(Object, frozen=True):
    """A Namespace with its metadata only."""

    group: ClassVar[str] = ""
    version: ClassVar[str] = "v1"
    kind: ClassVar[str] = "Namespace"
    plural: ClassVar[str] = "namespaces"

    metadata: Metadata

    @property
    def cluster_id(self) -> str:
        """The cluster ID; empty without the label."""
        return self.metadata.labels.get(CLUSTER_LABEL, "")


def check_cluster_label(cluster: str) -> str:
    """Checks that the ID can be a label value: not every common name of a certificate is one."""
    if not _LABEL_VALUE.fullmatch(cluster):
        raise InvalidInput(
            f"{cluster[:64]!r} cannot have a cluster namespace: the cluster ID is not a valid label value",
            hint="use up to 63 letters, digits, dashes, dots and underscores",
        )
    return cluster


def advertisement_object_name(cluster: str) -> str:
    return f"{objects.object_name(cluster)}-adv"


def request_object_name(key: str) -> str:
    """Derived from the key alone, so that a repeated request finds its object."""
    return f"ask-{sha256(key.encode()).hexdigest()[:40]}"


def instruction_object_name(reservation: str) -> str:
    return f"{objects.object_name(reservation)}-provider"


def reservation_object_name(reservation: str) -> str:
    """Of an object that shows a reservation which was requested elsewhere."""
    return objects.object_name(reservation)


def request_fields(request: AgentRequest) -> dict[str, object]:
    """For a merge patch: replaces all fields of the previous request."""
    return {
        "id": request.id,
        "verb": request.verb,
        "arguments": request.arguments,
        "agent": request.agent,
        "handshake": request.handshake or None,
    }


def acknowledgement_from_request(request: AgentRequest) -> bodies.AcknowledgeRequest:
    """Agents of earlier versions report nothing."""
    try:
        return msgspec.json.decode(request.arguments or "{}", type=bodies.AcknowledgeRequest)
    except msgspec.MsgspecError as error:
        raise InvalidInput(f"acknowledgement: {error}") from None


def response_fields(response: BrokerResponse) -> dict[str, object]:
    return {"requestID": response.request_id, "body": response.body, "error": response.error}


def instruction_from_response(response: BrokerResponse | None) -> bodies.Instruction | None:
    """The latest instruction about a reservation; None if there is none yet."""
    return _decode_response(response, _INSTRUCTION_DECODER)


def advertisement_from_response(response: BrokerResponse) -> bodies.Advertisement:
    return _decode_body(response.body, _ADVERTISEMENT_DECODER)


def reservation_from_response(response: BrokerResponse | None) -> bodies.Reservation | None:
    """The reservation that was requested by ID; None if the broker does not support this verb."""
    return _decode_response(response, _RESERVATION_DECODER)


def handshake_from_response(response: BrokerResponse | None) -> bodies.HandshakeResult:
    """The result of a handshake; empty if the broker does not support this verb."""
    return _decode_response(response, _HANDSHAKE_DECODER) or bodies.HandshakeResult()


def keys_from_response(response: BrokerResponse | None) -> bodies.KeySet:
    """The keys that verify grants; none if the broker does not support this verb."""
    return _decode_response(response, _KEYS_DECODER) or bodies.KeySet([])


def error_from_response(response: BrokerResponse | None) -> KubelendError | None:
    """The broker's error, if there is one."""
    if response is None or not response.error:
        return None
    return problems.error_from_response(0, response.error.encode())


def error_text(error: KubelendError) -> str:
    """The JSON text of an error, without its explanation, which can be long: `kubelend explain` shows it."""
    problem = problems.to_problem(error)
    return msgspec.json.encode(msgspec.structs.replace(problem, explanation=None)).decode()


def body_text(body: bodies.Body) -> str:
    return msgspec.json.encode(body).decode()


def _decode_response(
    response: BrokerResponse | None, decoder: msgspec.json.Decoder[DecodedBody]
) -> DecodedBody | None:
    return _decode_body(response.body, decoder) if response and response.body else None


def _decode_body(text: str, decoder: msgspec.json.Decoder[DecodedBody]) -> DecodedBody:
    try:
        return decoder.decode(text)
    except msgspec.MsgspecError as error:
        raise UnexpectedResponse(f"the broker's response cannot be decoded: {error}") from error


Manifest = dict[str, Any]

AGENT_ACCOUNT: Final = "kubelend-agent"
_RBAC_GROUP: Final = "rbac.authorization.k8s.io"
_READ_VERBS: Final = ("get", "list", "watch")

AGENT_RULES: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    (broker_objects.GROUP, "clusteradvertisements", (*_READ_VERBS, "create", "update")),
    (broker_objects.GROUP, "reservations", (*_READ_VERBS, "create", "patch", "delete")),
    (broker_objects.GROUP, "clustersessions", (*_READ_VERBS, "patch")),
    (objects.GROUP, "providerinstructions", _READ_VERBS),
    (objects.GROUP, "providerinstructions/status", ("patch",)),
)
"""Group, resource and verbs of the account's Role."""

BROKER_RULES: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    ("", "namespaces", ("list", "watch")),
    (broker_objects.GROUP, "clusteradvertisements", ("list", "watch")),
    (broker_objects.GROUP, "clusteradvertisements/status", ("patch",)),
    (broker_objects.GROUP, "reservations", ("list", "watch", "create", "patch", "delete")),
    (broker_objects.GROUP, "reservations/status", ("patch",)),
    (broker_objects.GROUP, "clustersessions", ("list", "watch")),
    (broker_objects.GROUP, "clustersessions/status", ("patch",)),
    (objects.GROUP, "providerinstructions", ("list", "watch", "create", "patch", "delete")),
)
"""The broker's ClusterRole for all cluster namespaces."""


def cluster_namespace_manifests(cluster: str, namespace: str, *, user: str = "") -> list[Manifest]:
    """For `kubectl apply`. The account is a ServiceAccount, or a user that the API server knows."""
    check_cluster_label(cluster)
    group, version = broker_objects.GROUP, objects.VERSION
    found: list[Manifest] = [
        _manifest("v1", "Namespace", namespace, ""),
        _manifest(f"{group}/{version}", ClusterSession.kind, SESSION_NAME, namespace),
    ]
    found[0]["metadata"]["labels"] = {CLUSTER_LABEL: cluster}
    if not user:
        found.append(_manifest("v1", "ServiceAccount", AGENT_ACCOUNT, namespace))
    role = _manifest(f"{_RBAC_GROUP}/v1", "Role", AGENT_ACCOUNT, namespace) | {
        "rules": policy_rules(AGENT_RULES)
    }
    return [*found, role, _role_binding(namespace, user)]


def policy_rules(rules: tuple[tuple[str, str, tuple[str, ...]], ...]) -> list[Manifest]:
    return [
        {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
        for group, resource, verbs in rules
    ]


def _role_binding(namespace: str, user: str) -> Manifest:
    subject = (
        {"apiGroup": _RBAC_GROUP, "kind": "User", "name": user}
        if user
        else {"kind": "ServiceAccount", "name": AGENT_ACCOUNT, "namespace": namespace}
    )
    return _manifest(f"{_RBAC_GROUP}/v1", "RoleBinding", AGENT_ACCOUNT, namespace) | {
        "roleRef": {"apiGroup": _RBAC_GROUP, "kind": "Role", "name": AGENT_ACCOUNT},
        "subjects": [subject],
    }


def _manifest(api_version: str, kind: str, name: str, namespace: str) -> Manifest:
    metadata: Manifest = {"name": name}
    if namespace:
        metadata["namespace"] = namespace
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}
