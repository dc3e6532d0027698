"""Bodies of the REST API: names of all fields, unknown fields, defaults and limits."""

import json

import msgspec
import pytest

from kubelend.wire import admin_bodies, bodies

FIELDS = {
    bodies.Amounts: "cpu memory gpu storage extended",
    bodies.Quantities: "cpu memory gpu storage extended",
    bodies.Metrics: "capacity allocatable allocated reserved available",
    bodies.Cost: "cpuCost memoryCost gpuCost storageCost currency",
    bodies.LendingPolicy: "allow deny keepBack maxLent maxPerRequester hours",
    bodies.EffectivePolicy: "allow deny keepBack maxLent maxPerRequester hours",
    bodies.Advertisement: (
        "clusterID resources clusterName timestamp cost labels region validFor endpointURL policy"
    ),
    bodies.ReservationRequest: (
        "requestedResources priority duration wait policy weights targetClusterID constraints"
        " failover"
    ),
    bodies.Constraints: "labels region exclude maxPricePerHour currency",
    bodies.ReservationStatus: (
        "phase message reason reservedAt expiresAt waitUntil acknowledgedAt activatedAt finishedAt held"
    ),
    bodies.AgreedCost: "pricePerHour currency",
    bodies.Reservation: (
        "id requesterID targetClusterID requestedResources status createdAt priority duration"
        " previousClusterIDs cost revision"
    ),
    bodies.ReservationList: "reservations next",
    bodies.PublishResult: "advertisement providerInstructions",
    bodies.RenewRequest: "duration",
    bodies.HoldReport: "held reason message",
    bodies.AcknowledgeRequest: "held",
    bodies.RefuseRequest: "reason",
    bodies.CordonRequest: "reason",
    bodies.ClusterStatus: (
        "phase active score rating lastUpdateTime validUntil cordoned cordonReason reservations"
        " message certificateUntil policy withheld closed"
    ),
    bodies.Cluster: "advertisement status",
    bodies.ClusterList: "clusters next",
    bodies.DrainResult: "cluster reservations",
    bodies.Instruction: "revision role action message reservation grant",
    bodies.SignedGrant: "grant",
    bodies.PublicKey: "kid x kty crv alg use",
    bodies.KeySet: "keys",
    bodies.Suggestion: "clusterID text less maxPricePerHour currency dropLabels",
    bodies.Candidate: "clusterID fits rejections score pricePerHour currency suggestion",
    bodies.Handshake: (
        "clusterID nonce signedNonce publicKey csr certificate ca apiServer proxyURL tenantNamespace error"
    ),
    bodies.HandshakeResult: "peer grant",
    bodies.Explanation: "summary total fitting rejections candidates suggestion quota",
    bodies.Problem: "type title status detail code error hint retryable explanation",
    bodies.Version: "version api",
    admin_bodies.Actor: "name role remote via",
    admin_bodies.AuditLine: "number at actor action subject digest before after code message",
    admin_bodies.AuditLog: "lines next",
    admin_bodies.CertificateRequest: "request",
    admin_bodies.IssuedCertificate: "certificate authorities",
    admin_bodies.TokenRequest: "ttl role name uses",
    admin_bodies.NewToken: (
        "token id role expiresAt uses enrolPort caHash certificateLifetime name"
    ),
    admin_bodies.Token: "id state role usesLeft createdAt createdBy expiresAt name",
    admin_bodies.TokenList: "tokens",
    admin_bodies.MemberCertificate: "serial issuedAt expiresAt authority",
    admin_bodies.Member: (
        "role name status requestedAt pendingKey token decidedAt decidedBy certificate revokedAt reason"
    ),
    admin_bodies.MemberList: "members next",
    admin_bodies.ApproveRequest: "key keepOld",
    admin_bodies.RevokeRequest: "release reason",
    admin_bodies.Revocation: "member known released drained tokens approved",
    admin_bodies.Removal: "rejected rejectedUntil tokens approved",
    admin_bodies.JoinRequest: "token name request role",
    admin_bodies.JoinResult: "certificate authorities port",
    admin_bodies.JoinPending: "status key",
    admin_bodies.PolicyRequest: "allow deny keepBack maxLent maxPerRequester hours",
    admin_bodies.PolicyStatus: "clusterID admin advertised effective",
    admin_bodies.PolicyList: "policies next",
    admin_bodies.QuotaRequest: "amounts reservations budget currency",
    admin_bodies.Quota: "amounts reservations budget currency",
    admin_bodies.QuotaUse: "held waitedFor reservations waiting spentToday",
    admin_bodies.QuotaStatus: "clusterID quota used",
    admin_bodies.QuotaList: "quotas next",
}

FORBIDS_UNKNOWN = (
    admin_bodies.PolicyRequest,
    admin_bodies.QuotaRequest,
    admin_bodies.TokenRequest,
    admin_bodies.ApproveRequest,
    admin_bodies.RevokeRequest,
    bodies.CordonRequest,
)
"""Written by administrators: a misspelt limit would be no limit, and a misspelt name be anybody."""


def test_every_body_has_its_row_and_its_fields_their_names():
    modules = vars(bodies).values(), vars(admin_bodies).values()
    kinds = {kind for found in modules for kind in found if isinstance(kind, type)}
    assert {kind for kind in kinds if issubclass(kind, bodies.Body)} - {bodies.Body} == set(FIELDS)
    for row, names in FIELDS.items():
        assert list(row.__struct_encode_fields__) == names.split(), row


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_unknown_fields_are_ignored_and_defaults_omitted(kind):
    """An older or newer peer may send more fields, and reads missing ones as their default."""
    unknown = b'{"unknown":[1,{"x":2}]}'
    is_required = any(field.required for field in msgspec.structs.fields(kind))
    if kind in FORBIDS_UNKNOWN or is_required:
        problem = "unknown field" if kind in FORBIDS_UNKNOWN else "missing required field"
        with pytest.raises(msgspec.ValidationError, match=problem):
            msgspec.json.decode(unknown, type=kind)
    else:
        assert msgspec.json.decode(unknown, type=kind) == kind()
        assert msgspec.json.encode(kind()) == b"{}"


def test_bodies_of_the_published_system_are_decoded():
    """Without any field of ours."""
    text = b"""{"clusterID":"agent-cluster-2","clusterName":"x","timestamp":"2025-10-01T10:00:00Z",
        "resources":{"capacity":{"cpu":"10","memory":"8025424Ki"},
                     "allocatable":{"cpu":"10","memory":"8025424Ki"},
                     "allocated":{"cpu":"1050m","memory":"418Mi"},
                     "available":{"cpu":"8950m","memory":"7597392Ki"}}}"""
    body = msgspec.json.decode(text, type=bodies.Advertisement)
    assert body.cluster_id == "agent-cluster-2"
    assert body.resources.allocated == bodies.Quantities("1050m", "418Mi")
    asked = msgspec.json.decode(
        b'{"requestedResources":{"cpu":"500m","memory":"256Mi"},"priority":10,"duration":"1h"}',
        type=bodies.ReservationRequest,
    )
    assert (asked.priority, asked.duration) == (10, "1h")


AMOUNTS = {"cpu": "1", "memory": "1Gi"}
ASKED = {"requestedResources": AMOUNTS}
OFFERED = {"clusterID": "a", "resources": {"capacity": AMOUNTS}}
MANY = {str(n): "1" for n in range(33)}


def asked(**amounts):
    return {"requestedResources": {**AMOUNTS, **amounts}}


BODIES = {
    bodies.ReservationRequest: [
        (asked(cpu=None), "requestedResources.cpu"),
        (asked(cpu=1.5), "requestedResources.cpu"),
        (asked(cpu=True), "requestedResources.cpu"),
        (asked(memory=["1Gi"]), "requestedResources.memory"),
        (asked(extended=["x"]), "requestedResources.extended"),
        (asked(extended=MANY), "length <= 32 - at `$.requestedResources.extended`"),
        ({"requestedResources": {"cpu": "1"}}, "field `memory` - at"),
        ({"requestedResources": {"memory": "1"}}, "field `cpu` - at"),
        ({**ASKED, "duration": "1h " * 30}, "`str` of length <= 64"),
        ({**ASKED, "duration": 3600}, "got `int` - at `$.duration`"),
        ({**ASKED, "priority": "high"}, "got `str` - at `$.priority`"),
        ({**ASKED, "priority": 2**31}, "`int` <= 2147483647"),
        ({**ASKED, "priority": 10**400}, ""),
        ({**ASKED, "priority": 1.5}, "got `float` - at `$.priority`"),
        ({**ASKED, "weights": {"price": "1"}}, "`float`, got `str`"),
        ({**ASKED, "targetClusterID": 7}, "`str`, got `int`"),
        ({**ASKED, "targetClusterID": "x" * 254}, "length <= 253"),
    ],
    bodies.Constraints: [
        ({"labels": {"a": 1}}, "`str`, got `int`"),
        ({"exclude": "a"}, "`array`, got `str`"),
        ({"exclude": ["a"] * 257}, "`array` of length <= 256"),
        ({"exclude": ["a", "x" * 254]}, "length <= 253"),
    ],
    bodies.Advertisement: [
        ({**OFFERED, "resources": {}}, "field `capacity` - at `$.resources`"),
        ({**OFFERED, "timestamp": "yesterday"}, "RFC3339"),
        ({**OFFERED, "timestamp": "2026-01-01T00:00:00"}, "a timezone"),
        ({**OFFERED, "labels": {str(n): "" for n in range(65)}}, "<= 64"),
        ({**OFFERED, "clusterName": "x" * 254}, "at `$.clusterName`"),
        ({**OFFERED, "clusterID": "x" * 254}, "at `$.clusterID`"),
        ({**OFFERED, "clusterID": None}, "got `null` - at `$.clusterID`"),
    ],
}


@pytest.mark.parametrize(
    "kind, body, problem",
    [(kind, *case) for kind, cases in BODIES.items() for case in cases],
    ids=lambda value: str(value)[-40:],
)
def test_body_of_another_type_or_size_is_rejected_with_its_field(kind, body, problem):
    with pytest.raises(msgspec.ValidationError) as rejected:
        msgspec.json.decode(json.dumps(body), type=kind)
    assert problem in str(rejected.value)


def test_names_may_have_the_maximum_length_and_timestamps_any_zone():
    longest = {**OFFERED, "clusterID": "x" * 253, "clusterName": "x" * 253}
    for text in ("1999-12-31T23:59:59.123456789Z", "2999-01-01T00:00:00+14:00"):
        msgspec.convert({**longest, "timestamp": text}, type=bodies.Advertisement)
