"""Policies, quotas and costs as people see them, to the letter."""

from datetime import UTC, datetime

import pytest

from kubelend.cli import clusters, limits, output, reservation_views, reservations
from kubelend.wire import bodies
from kubelend.wire.admin_bodies import PolicyStatus, Quota, QuotaStatus, QuotaUse

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
HOLDS = bodies.EffectivePolicy(
    allow=[["team-*"], ["team-a", "team-b"]],
    deny=["team-x"],
    keep_back={"cpu": "4", "memory": "8Gi"},
    hours=[["Mon-Fri 18:00-08:00 Europe/Rome", "Sat,Sun 00:00-24:00"]],
)
POLICY = PolicyStatus(
    "milan",
    admin=bodies.LendingPolicy(allow=["team-*"], keep_back={"cpu": "4", "memory": "2Gi"}),
    advertised=bodies.LendingPolicy(
        allow=["team-a", "team-b"], deny=["team-x"], keep_back={"memory": "8Gi"}
    ),
    effective=HOLDS,
)
QUOTA = QuotaStatus(
    "team-a",
    Quota({"cpu": "32", "gpu": "0"}, reservations=5, budget="50", currency="EUR"),
    QuotaUse({"cpu": "30", "memory": "9Gi"}, {"cpu": "2"}, 3, 1, "12.345678901"),
)


def test_policy_shows_who_says_what_and_what_holds():
    assert limits.policy_text(POLICY, None) == (
        "LIMIT          BY ADMIN           BY CLUSTER      IN EFFECT\n"
        "Lends to       team-*             team-a, team-b  team-* and also team-a, team-b\n"
        "Not to         -                  team-x          team-x\n"
        "Keeps back     4 cpu, 2Gi memory  8Gi memory      4 cpu, 8Gi memory\n"
        "Opening hours  -                  -               "
        "Mon-Fri 18:00-08:00 Europe/Rome, Sat,Sun 00:00-24:00"
    )
    wrapped = limits.policy_text(POLICY, 80)
    assert max(map(len, wrapped.splitlines())) <= 80


def test_cluster_without_limits_is_one_sentence():
    assert limits.policy_text(PolicyStatus("milan"), 80) == (
        "milan has no lending policy: it lends all free resources, to everyone and at any time"
    )


def test_quota_shows_what_is_used_of_what():
    assert limits.quota_text(QUOTA) == (
        "Cluster:       team-a\n"
        "Reservations:  4 of 5, 1 pending\n"
        "Spent today:   12.3457 of 50 EUR\n"
        "\n"
        "RESOURCE  USED  PENDING  LIMIT\n"
        "cpu       30    2        32\n"
        "gpu       0     0        0\n"
        "memory    9Gi   0        -"
    )
    assert limits.quota_text(QuotaStatus("b", Quota(), QuotaUse())) == (
        "Cluster:       b\nReservations:  0"
    )


def test_quotas_are_a_line_each():
    assert limits.quota_table([QUOTA, QuotaStatus("b", Quota(), QuotaUse(reservations=2))]) == (
        "CLUSTER  RESERVATIONS       SPENT TODAY        AMOUNTS\n"
        "team-a   4 of 5, 1 pending  12.3457 of 50 EUR  30 of 32 cpu, 0 of 0 gpu\n"
        "b        2                  -                  -"
    )


@pytest.mark.parametrize(
    "exact, shown",
    [("0.5", "0.5"), ("12.345678901", "12.3457"), ("0", "0"), ("0.000000001", "0.000000001")],
)
def test_money_is_rounded_where_it_can_be(exact, shown):
    assert output.format_price(exact) == shown


def cluster(**fields):
    known = bodies.Metrics(bodies.Quantities("8", "16Gi"), available=bodies.Quantities("8", "16Gi"))
    status = bodies.ClusterStatus("Active", True, "100.00", "Excellent", NOW, NOW, **fields)
    return bodies.Cluster(bodies.Advertisement("milan", known), status)


def test_cluster_shows_its_policy_and_what_that_withholds():
    text = clusters.cluster_details(cluster(policy=HOLDS, withheld={"cpu": "4"}), NOW)
    assert "Lends to:       team-* and also team-a, team-b\n" in text
    assert "Keeps back:     4 cpu, 8Gi memory\n" in text
    assert "Lends at most" not in text
    assert text.endswith(
        "RESOURCE  CAPACITY  ALLOCATABLE  ALLOCATED  RESERVED  AVAILABLE  WITHHELD\n"
        "cpu       8         0            0          0         8          4\n"
        "memory    16Gi      0            0          0         16Gi       0"
    )
    assert "WITHHELD" not in clusters.cluster_details(cluster(), NOW)


@pytest.mark.parametrize(
    "fields, status",
    [
        ({"closed": True}, "Closed"),
        ({"closed": True, "cordoned": True}, "Cordoned"),
        ({}, "Active"),
    ],
    ids=str,
)
def test_cluster_outside_its_hours_is_closed(fields, status):
    assert clusters.cluster_table([cluster(**fields)], NOW).splitlines()[1].split()[1] == status


def test_reservation_shows_what_it_costs():
    found = bodies.Reservation(
        "rsv-1",
        "r",
        "a",
        bodies.Quantities("1", "1Gi"),
        bodies.ReservationStatus("Reserved", "", "Locked"),
        NOW,
        cost=bodies.AgreedCost("0.054294967", "EUR"),
    )
    assert "Cost:       0.0543 EUR per hour\n" in reservation_views.details(found, NOW)
    header, row = reservation_views.table([found], NOW, wide=True).splitlines()
    assert header.index("COST") == row.index("0.0543 EUR/h")


def test_explanation_shows_the_quota_beside_the_clusters():
    found = bodies.Explanation(
        "1/1 cluster fits", 1, 1, {}, quota=["r holds 30 of 32 cpu; ask less"]
    )
    assert reservations.explanation_text(found, 80) == (
        "1/1 cluster fits\n\nQuota: r holds 30 of 32 cpu; ask less."
    )
