"""One object of each kind with a value in every field, to see that none is lost on the way."""

from datetime import UTC, datetime
from typing import Any

from kubelend.wire import bodies, broker_objects, objects
from kubelend.wire.bodies import Amounts, Quantities
from kubelend.wire.objects import Metadata

AT = datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)
COST = bodies.Cost("0.05", "0.01", "1.2", "0.001", "EUR")
NAMED: dict[str, str | int] = {"cpu": "4", "memory": "8Gi"}
POLICY = bodies.LendingPolicy(
    ["team-*"], ["guest"], NAMED, NAMED, {"gpu": 2}, ["Mon-Fri 18:00-08:00 Europe/Rome"]
)
CONSTRAINTS = bodies.Constraints({"tier": "gold"}, "eu", ["berlin"], "2.50", "EUR")
WEIGHTS = {"headroom": 0.5, "price": 2.0}
CONDITION = objects.Condition("Ready", "True", "ClusterActive", "it answers", AT, 3, "none")
STORED_RECORD = broker_objects.StoredRecord(
    2**62, "5ea1", '{"large": 9007199254740993, "text": "\u00b5"}'
)

HANDSHAKE = bodies.Handshake(
    *("liqo-a", "bm9uY2U=", "c2lnbmVk", "a2V5", "Y3Ny", "Y2VydA==", "Y2E="),
    *("https://a:6443", "http://proxy", "tenant", "not yet"),
)
SENT_HANDSHAKE = objects.SentHandshake(AT, HANDSHAKE)
HELD = bodies.HoldReport(held=True, reason="Held", message="all of it")
SHOWN_RESERVATION = bodies.Reservation(
    *("rsv-a-1", "a", "b"),
    bodies.Quantities("1", "1Gi", "1", "1Gi", {"example.com/fpga": "1"}),
    bodies.ReservationStatus("Reserved", "locked", "Placed", AT, AT, AT, AT, AT, AT, HELD),
    *(AT, 7, "1h"),
    ["c"],
    bodies.AgreedCost("0.5", "EUR"),
    7,
)
INSTRUCTION = bodies.Instruction(7, "requester", "Use", "Use b", SHOWN_RESERVATION, "signed")
REFUSED = objects.Condition("Accepted", "False", "NoCapacity", "none", AT, 3, "ask for less")
PEERED: dict[str, Any] = {"handshake_time": AT, "peer": HANDSHAKE, "peer_handshakes": 2}


def metadata(name: str) -> Metadata:
    return Metadata(name=name, labels={"a": "b"}, annotations={"c": "d"}, finalizers=("e.f/g",))


def amounts(cpu: str = "500m") -> Amounts:
    return Amounts(cpu, "1Gi", "1", "10Gi", {"example.com/fpga": "2"})


def quantities() -> Quantities:
    return Quantities("500m", "1Gi", "1", "10Gi", {"example.com/fpga": "2"})


REQUESTED: dict[str, Any] = {
    "requested_cpu": "500m",
    "requested_memory": "256Mi",
    "requested_gpu": "1",
    "requested_storage": "1Gi",
    "extended_resources": {"example.com/fpga": "2"},
}
PROMISED: dict[str, Any] = {
    **REQUESTED,
    "reservation_name": "rsv-a-1",
    "message": "Use b for 500m CPU / 256Mi Memory",
    "expires_at": AT,
    "cost": bodies.AgreedCost("0.5", "EUR"),
}

ADVERTISEMENT = objects.Advertisement(
    metadata("cluster-advertisement"),
    objects.AdvertisementSpec(
        "a",
        # More may be asked for than there is: what is worked out may be below zero.
        objects.MeasuredResources(*(amounts() for _ in range(3)), *(amounts("-1") for _ in "1234")),
        AT,
        COST,
    ),
    objects.AdvertisementStatus("Error", AT, True, "the broker cannot be reached"),
)
REQUEST = bodies.ReservationRequest(
    quantities(), 7, "1h", "1m", "binpack", WEIGHTS, "b", CONSTRAINTS, failover=False
)
RESOURCE_REQUEST = objects.ResourceRequest(
    metadata("small"),
    objects.ResourceRequestSpec(
        **REQUESTED,
        priority=-5,
        duration="1h30m",
        wait="90s",
        policy="cost",
        weights=WEIGHTS,
        target_cluster_id="b",
        constraints=CONSTRAINTS,
        failover=False,
        renew=True,
        namespaces=("default",),
    ),
    objects.ResourceRequestStatus(
        phase="Reserved",
        target_cluster_id="b",
        reservation_name="rsv-a-1",
        reason="Placed",
        message="Resources reserved in cluster b",
        last_update_time=AT,
        expires_at=AT,
        observed_generation=1,
        sent_request=objects.SentRequest(
            1,
            REQUEST,
        ),
        conditions=(CONDITION,),
    ),
)
RESERVATION_INSTRUCTION = objects.ReservationInstruction(
    metadata("rsv-a-1"),
    objects.ReservationInstructionSpec(**PROMISED, target_cluster_id="b", namespaces=("default",)),
    objects.ReservationInstructionStatus(
        "17", True, AT, "Ready", "joined", AT, ("b", "c"), ("b",), "rsv-a-1", (CONDITION,)
    ),
)
PROVIDER_INSTRUCTION = objects.ProviderInstruction(
    metadata("rsv-a-1-provider"),
    objects.ProviderInstructionSpec(
        **PROMISED,
        requester_cluster_id="a",
        instruction=INSTRUCTION,
        observed_report_time=AT,
        accepted=REFUSED,
        **PEERED,
    ),
    objects.ProviderInstructionStatus(
        True, AT, "Held", "set aside", AT, (CONDITION,), AT, SENT_HANDSHAKE
    ),
)
CLUSTER_ADVERTISEMENT = broker_objects.ClusterAdvertisement(
    metadata("a-adv"),
    broker_objects.ClusterAdvertisementSpec(
        cluster_id="a",
        resources=broker_objects.AdvertisedResources(
            capacity=quantities(),
            allocated=quantities(),
            available=amounts("-1"),
            allocatable=Quantities(64, 2**40, 8, 2**41, {"example.com/fpga": 2}),
            reserved=amounts(),
        ),
        cluster_name="Alpha",
        cost=COST,
        timestamp=AT,
        endpoint_url="https://alpha.example:6443",
        labels={"tier": "gold"},
        region="eu",
        valid_for="5m",
        policy=POLICY,
        renew_time=AT,
    ),
    broker_objects.ClusterAdvertisementStatus(
        phase="Active",
        last_update_time=AT,
        active=True,
        message="all is well",
        score="66.67",
        conditions=(CONDITION,),
        observed_generation=2,
        valid_until=AT,
        cordon_reason="maintenance",
        reservations=3,
        reserved=amounts(),
        available=amounts(),
        record=STORED_RECORD,
    ),
)
RESERVATION = broker_objects.Reservation(
    metadata("rsv-a-1"),
    broker_objects.ReservationSpec(
        requested_resources=quantities(),
        target_cluster_id="b",
        duration="1h",
        priority=10,
        requester_id="a",
        wait="30m",
        policy="balanced",
        weights=WEIGHTS,
        constraints=CONSTRAINTS,
        failover=False,
        released=True,
        active_cluster_id="b",
        renewal=broker_objects.Renewal(AT, "2h"),
        handshake=SENT_HANDSHAKE,
    ),
    broker_objects.ReservationStatus(
        phase="Active",
        message="Resources locked in cluster b",
        reason="Placed",
        target_cluster_id="b",
        reserved_at=AT,
        expires_at=AT,
        wait_until=AT,
        acknowledged_at=AT,
        held=bodies.HoldReport(True, "Held", "all of it"),
        activated_at=AT,
        finished_at=AT,
        last_update_time=AT,
        conditions=(CONDITION,),
        observed_generation=1,
        instruction=INSTRUCTION,
        renew_time=AT,
        **PEERED,
        record=STORED_RECORD,
    ),
)
CLUSTER_SESSION = broker_objects.ClusterSession(
    metadata("session"),
    broker_objects.ClusterSessionSpec(AT, "rsv-a-1", "one", "w-1"),
    broker_objects.ClusterSessionStatus(
        cluster_id="a",
        observed_generation=2,
        watch="w-1",
        revision=7,
        compacted_revision=3,
        reservation=SHOWN_RESERVATION,
        grant_keys=(bodies.PublicKey("k1", "eA", "OKP", "Ed25519", "EdDSA", "sig"),),
        conditions=(CONDITION,),
        last_update_time=AT,
    ),
)
SUGGESTION = bodies.Suggestion("b", "less", {"cpu": "1"}, "0.5", "EUR", {"gpu": "a"})
PLACEMENT_REVIEW = broker_objects.PlacementReview(
    metadata("lend-1"),
    broker_objects.PlacementReviewSpec(REQUEST, "a", "rsv-a-1", 5),
    broker_objects.PlacementReviewStatus(
        bodies.Explanation(
            *("fits", 2, 1, {"NoGpu": 1}),
            candidates=[bodies.Candidate("b", True, ["NoGpu"], 0.5, "0.5", "EUR", SUGGESTION)],
            suggestion=SUGGESTION,
            quota=["too much"],
        ),
        (CONDITION,),
        1,
    ),
)
LEDGER_RECORD = broker_objects.LedgerRecord(metadata("head"), "head", STORED_RECORD)

ALL = (
    ADVERTISEMENT,
    RESOURCE_REQUEST,
    RESERVATION_INSTRUCTION,
    PROVIDER_INSTRUCTION,
    CLUSTER_ADVERTISEMENT,
    RESERVATION,
    PLACEMENT_REVIEW,
    CLUSTER_SESSION,
    LEDGER_RECORD,
)
