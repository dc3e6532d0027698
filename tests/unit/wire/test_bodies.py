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


def test_every_body_has_its_row():
    modules = vars(bodies).values(), vars(admin_bodies).values()
    kinds = {kind for found in modules for kind in found if isinstance(kind, type)}
    assert {kind for kind in kinds if issubclass(kind, bodies.Body)} - {bodies.Body} == set(FIELDS)


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_fields_have_their_names(kind):
    assert [field.encode_name for field in msgspec.structs.fields(kind)] == FIELDS[kind].split()


@pytest.mark.parametrize(
    "name, wire",
    [
        ("id", "id"),
        ("cluster_id", "clusterID"),
        ("previous_cluster_ids", "previousClusterIDs"),
        ("endpoint_url", "endpointURL"),
        ("max_price_per_hour", "maxPricePerHour"),
        ("cpu", "cpu"),
        ("requested_cpu", "requestedCPU"),
    ],
)
def test_names_are_in_camel_case_with_acronyms(name, wire):
    assert bodies.camel_case(name) == wire


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_unknown_fields_are_ignored_and_defaults_omitted(kind):
    """An older or newer peer may send more fields, and reads missing ones as their default."""
    if kind in FORBIDS_UNKNOWN:
        with pytest.raises(msgspec.ValidationError, match="unknown field `unknown`"):
            msgspec.json.decode(b'{"unknown":[1,{"x":2}]}', type=kind)
    elif any(field.required for field in msgspec.structs.fields(kind)):
        with pytest.raises(msgspec.ValidationError, match="missing required field"):
            msgspec.json.decode(b'{"unknown":[1,{"x":2}]}', type=kind)
    else:
        assert msgspec.json.decode(b'{"unknown":[1,{"x":2}]}', type=kind) == kind()
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


def asked(**amounts):
    return {"requestedResources": {**AMOUNTS, **amounts}}


@pytest.mark.parametrize(
    "kind, body, problem",
    [
        (bodies.ReservationRequest, asked(cpu=None), "requestedResources.cpu"),
        (bodies.ReservationRequest, asked(cpu=1.5), "requestedResources.cpu"),
        (bodies.ReservationRequest, asked(cpu=True), "requestedResources.cpu"),
        (bodies.ReservationRequest, asked(memory=["1Gi"]), "requestedResources.memory"),
        (bodies.ReservationRequest, asked(extended=["x"]), "requestedResources.extended"),
        (
            bodies.ReservationRequest,
            asked(extended={str(n): "1" for n in range(33)}),
            "length <= 32 - at `$.requestedResources.extended`",
        ),
        (bodies.ReservationRequest, {"requestedResources": {"cpu": "1"}}, "field `memory` - at"),
        (bodies.ReservationRequest, {"requestedResources": {"memory": "1"}}, "field `cpu` - at"),
        (bodies.ReservationRequest, {**ASKED, "duration": "1h " * 30}, "`str` of length <= 64"),
        (bodies.ReservationRequest, {**ASKED, "duration": 3600}, "got `int` - at `$.duration`"),
        (bodies.ReservationRequest, {**ASKED, "priority": "high"}, "got `str` - at `$.priority`"),
        (bodies.ReservationRequest, {**ASKED, "priority": 2**31}, "`int` <= 2147483647"),
        (bodies.ReservationRequest, {**ASKED, "priority": 10**400}, ""),
        (bodies.ReservationRequest, {**ASKED, "priority": 1.5}, "got `float` - at `$.priority`"),
        (bodies.ReservationRequest, {**ASKED, "weights": {"price": "1"}}, "`float`, got `str`"),
        (bodies.ReservationRequest, {**ASKED, "targetClusterID": 7}, "`str`, got `int`"),
        (bodies.ReservationRequest, {**ASKED, "targetClusterID": "x" * 254}, "length <= 253"),
        (bodies.Constraints, {"labels": {"a": 1}}, "`str`, got `int`"),
        (bodies.Constraints, {"exclude": "a"}, "`array`, got `str`"),
        (bodies.Constraints, {"exclude": ["a"] * 257}, "`array` of length <= 256"),
        (bodies.Constraints, {"exclude": ["a", "x" * 254]}, "length <= 253"),
        (bodies.Advertisement, {**OFFERED, "resources": {}}, "field `capacity` - at `$.resources`"),
        (bodies.Advertisement, {**OFFERED, "timestamp": "yesterday"}, "RFC3339"),
        (bodies.Advertisement, {**OFFERED, "timestamp": "2026-01-01T00:00:00"}, "a timezone"),
        (bodies.Advertisement, {**OFFERED, "labels": {str(n): "" for n in range(65)}}, "<= 64"),
        (bodies.Advertisement, {**OFFERED, "clusterName": "x" * 254}, "at `$.clusterName`"),
        (bodies.Advertisement, {**OFFERED, "clusterID": "x" * 254}, "at `$.clusterID`"),
        (bodies.Advertisement, {**OFFERED, "clusterID": None}, "got `null` - at `$.clusterID`"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_body_of_another_type_or_size_is_rejected_with_its_field(kind, body, problem):
    with pytest.raises(msgspec.ValidationError) as rejected:
        msgspec.json.decode(json.dumps(body), type=kind)
    assert problem in str(rejected.value)


@pytest.mark.parametrize("name", ["clusterID", "clusterName"])
def test_names_may_have_the_maximum_length(name):
    msgspec.convert({**OFFERED, name: "x" * 253}, type=bodies.Advertisement)


@pytest.mark.parametrize("text", ["1999-12-31T23:59:59.123456789Z", "2999-01-01T00:00:00+14:00"])
def test_timestamps_of_any_time_and_zone_are_decoded(text):
    msgspec.convert({**OFFERED, "timestamp": text}, type=bodies.Advertisement)
