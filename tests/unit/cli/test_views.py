"""What people see, to the letter and within 80 columns."""

import json
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
import yaml

from kubelend.cli import clusters, output, reservation_views, reservations
from kubelend.cli.output import Format
from kubelend.wire import bodies

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
AMOUNTS = bodies.Quantities("500m", "256Mi", gpu="1", extended={"example.com/fpga": "2"})
RESERVED = bodies.Reservation(
    id="rsv-agent-cluster-1-abcdefghijklm",
    requester_id="agent-cluster-1",
    target_cluster_id="agent-cluster-2",
    requested_resources=AMOUNTS,
    status=bodies.ReservationStatus(
        "Reserved",
        "Resources locked in cluster agent-cluster-2",
        "Locked",
        reserved_at=NOW - timedelta(minutes=5),
        expires_at=NOW + timedelta(minutes=55),
    ),
    created_at=NOW - timedelta(minutes=5),
    priority=10,
    duration="1h0m0s",
)
WAITING = bodies.Reservation(
    id="rsv-agent-cluster-1-nopqrstuvwxyz",
    requester_id="agent-cluster-1",
    target_cluster_id="",
    requested_resources=bodies.Quantities("50", "1Gi"),
    status=bodies.ReservationStatus("Pending", "Waiting: 0/2 clusters fit", "Waiting"),
    created_at=NOW - timedelta(seconds=30),
)
CLUSTER = bodies.Cluster(
    bodies.Advertisement(
        "agent-cluster-2",
        bodies.Metrics(
            capacity=bodies.Quantities("10", "8025424Ki", gpu="2"),
            allocatable=bodies.Quantities("10", "8025424Ki", gpu="2"),
            allocated=bodies.Quantities("1050m", "418Mi"),
            reserved=bodies.Quantities("3", "1Gi"),
            available=bodies.Quantities("5950m", "6548816Ki", gpu="2"),
        ),
        region="eu-west",
        labels={"tier": "gold"},
        cost=bodies.Cost("0.02", "0.01", currency="EUR"),
    ),
    bodies.ClusterStatus(
        "Active",
        True,
        "70.55",
        "Good",
        last_update_time=NOW - timedelta(seconds=12),
        valid_until=NOW + timedelta(minutes=9),
        cordoned=True,
        cordon_reason="new kernel",
        reservations=3,
    ),
)
EXPLANATION = bodies.Explanation(
    summary="1/3 clusters fit: 2 InsufficientCPU",
    total=3,
    fitting=1,
    refusals={"InsufficientCPU": 2},
    candidates=[
        bodies.Candidate("agent-cluster-2", True, [], 0.8055, "0.028737418", "USD"),
        bodies.Candidate(
            "agent-cluster-3",
            False,
            ["InsufficientCPU"],
            remedy=bodies.Suggestion(
                "agent-cluster-3",
                "agent-cluster-3 fits if you request 50m cpu less, or wait until"
                " reservations there end",
            ),
        ),
    ],
    remedy=None,
)


def test_reservations_as_a_table():
    assert reservation_views.table([RESERVED, WAITING], NOW) == (
        "NAME                               PHASE     TARGET           CPU   MEMORY  AGE\n"
        "rsv-agent-cluster-1-abcdefghijklm  Reserved  agent-cluster-2  500m  256Mi   5m\n"
        "rsv-agent-cluster-1-nopqrstuvwxyz  Pending   -                50    1Gi     30s"
    )


def test_reservations_as_a_wide_table():
    header, row, _ = reservation_views.table([RESERVED, WAITING], NOW, wide=True).splitlines()
    assert " ".join(header.split()[6:]) == "LEFT REQUESTER GPU STORAGE PRIORITY COST REASON"
    assert row.split()[6:] == ["55m", "agent-cluster-1", "1", "-", "10", "-", "Locked"]


def test_a_reservation_in_a_sentence():
    assert reservation_views.summary(RESERVED, NOW) == (
        "rsv-agent-cluster-1-abcdefghijklm is Reserved on agent-cluster-2 for 55m"
    )
    assert reservation_views.summary(WAITING, NOW) == (
        "rsv-agent-cluster-1-nopqrstuvwxyz is Pending: Waiting: 0/2 clusters fit"
    )


def test_all_of_a_reservation():
    assert reservation_views.details(RESERVED, NOW) == (
        "Name:       rsv-agent-cluster-1-abcdefghijklm\n"
        "Phase:      Reserved (Locked)\n"
        "Message:    Resources locked in cluster agent-cluster-2\n"
        "Requester:  agent-cluster-1\n"
        "Target:     agent-cluster-2\n"
        "Resources:  500m cpu, 256Mi memory, 1 gpu, 2 example.com/fpga\n"
        "Priority:   10\n"
        "Duration:   1h0m0s\n"
        "Created:    2026-01-02T02:59:05Z (5m ago)\n"
        "Reserved:   2026-01-02T02:59:05Z (5m ago)\n"
        "Expires:    2026-01-02T03:59:05Z (in 55m)"
    )


def test_clusters_as_a_table():
    assert clusters.cluster_table([CLUSTER], NOW) == (
        "NAME             STATUS    CPU-FREE  MEMORY-FREE  GPU-FREE  SCORE  LENT  SEEN\n"
        "agent-cluster-2  Cordoned  5950m     6.2Gi        2         70.55  3     12s"
    )


def test_all_of_a_cluster():
    assert clusters.cluster_details(CLUSTER, NOW) == (
        "Name:           agent-cluster-2\n"
        "Status:         Cordoned\n"
        "Cordon reason:  new kernel\n"
        "Score:          70.55 (Good)\n"
        "Lends:          3 reservations\n"
        "Region:         eu-west\n"
        "Labels:         tier=gold\n"
        "Prices:         0.02 per core, 0.01 per GB and hour, in EUR\n"
        "Last seen:      2026-01-02T03:03:53Z (12s ago)\n"
        "Valid until:    2026-01-02T03:13:05Z (in 9m)\n"
        "\n"
        "RESOURCE  CAPACITY   ALLOCATABLE  ALLOCATED  RESERVED  AVAILABLE\n"
        "cpu       10         10           1050m      3         5950m\n"
        "memory    8025424Ki  8025424Ki    418Mi      1Gi       6548816Ki\n"
        "gpu       2          2            0          0         2"
    )


def test_what_became_of_a_drained_cluster():
    released = msgspec.structs.replace(
        RESERVED, status=bodies.ReservationStatus("Released", "Drained")
    )
    text = clusters.drain_summary(bodies.DrainResult(CLUSTER, [RESERVED, released]), NOW)
    assert text.startswith(
        "cluster/agent-cluster-2 drained: 1 moved to other clusters, 1 released\n\n"
    )
    empty = clusters.drain_summary(bodies.DrainResult(CLUSTER, []), NOW)
    assert empty == "cluster/agent-cluster-2 drained; it had no reservations"


def test_an_explanation_ranks_the_clusters_and_says_what_would_help():
    assert reservations.explanation_text(EXPLANATION, 80) == (
        "1/3 clusters fit: 2 InsufficientCPU\n"
        "\n"
        "CLUSTER          FITS  SCORE   PRICE         REASONS AND SUGGESTIONS\n"
        "agent-cluster-2  yes   0.8055  0.0287 USD/h  -\n"
        "agent-cluster-3  no    -       -             InsufficientCPU: request 50m cpu\n"
        "                                             less, or wait until reservations\n"
        "                                             there end\n"
        "\n"
        "Shown 2 of 3; --limit shows more."
    )


def test_the_nearest_remedy_is_told_within_the_width():
    remedy = bodies.Suggestion("b", "b fits if you " + "ask for less " * 10)
    text = reservations.explanation_text(
        bodies.Explanation("0/1 cluster fits", 1, 0, {}, [], remedy), 80
    )
    assert text.splitlines()[2].startswith("Nearest: b fits if you ask for less")
    assert max(map(len, text.splitlines())) <= 80


def test_an_explanation_without_any_cluster_is_a_sentence():
    nobody = bodies.Explanation("no cluster has advertised yet", 0, 0, {})
    assert reservations.explanation_text(nobody, 80) == "no cluster has advertised yet"


@pytest.mark.parametrize(
    "text",
    [
        reservation_views.table([RESERVED, WAITING], NOW),
        reservation_views.summary(RESERVED, NOW),
        reservation_views.details(RESERVED, NOW),
        clusters.cluster_table([CLUSTER], NOW),
        clusters.cluster_details(CLUSTER, NOW),
        reservations.explanation_text(EXPLANATION, 80),
    ],
    ids=["reservations", "sentence", "reservation", "clusters", "cluster", "explanation"],
)
def test_it_fits_80_columns(text):
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    "price,shown", [("0.402949673", "0.4029"), ("12", "12"), ("0.00001", "0.00001"), ("0", "0")]
)
def test_a_small_price_is_not_rounded_to_nothing(price, shown):
    found = bodies.Candidate("a", True, [], 1.0, price, "USD")
    text = reservations.explanation_text(bodies.Explanation("s", 1, 1, {}, [found]), None)
    assert f"{shown} USD/h" in text


@pytest.mark.parametrize(
    "amount,shown",
    [
        ("7597392Ki", "7.2Gi"),
        ("8Gi", "8Gi"),
        ("1023", "1023"),
        ("1024", "1Ki"),
        ("512Gi", "512Gi"),
        ("150.9Gi", "150Gi"),
        ("", ""),
        ("0", "0"),
    ],
)
def test_bytes_are_shortened_downwards(amount, shown):
    assert output.short_bytes(amount) == shown


# -- for programs


def show(format, capsys):
    names = reservation_views.references([RESERVED])
    output.show(RESERVED, format, kind="Reservation", text=lambda: "text", names=names)
    return capsys.readouterr().out


def show_list(found, format, capsys):
    output.show_list(
        found,
        format,
        kind="Reservation",
        noun="reservations",
        names=reservation_views.references(found),
        text=lambda: "text",
    )
    return capsys.readouterr()


def test_json_and_yaml_are_the_kind_and_the_body_of_the_wire(capsys):
    expected = {"kind": "Reservation", **msgspec.to_builtins(RESERVED)}
    assert json.loads(show(Format.JSON, capsys)) == expected
    assert yaml.safe_load(show(Format.YAML, capsys)) == expected


def test_a_list_has_kind_and_items(capsys):
    expected = {
        "kind": "ReservationList",
        "items": [
            {"kind": "Reservation", **msgspec.to_builtins(one)} for one in (RESERVED, WAITING)
        ],
    }
    assert json.loads(show_list([RESERVED, WAITING], Format.JSON, capsys).out) == expected
    assert yaml.safe_load(show_list([RESERVED, WAITING], Format.YAML, capsys).out) == expected


def test_a_name_has_its_kind_before_it(capsys):
    assert show(Format.NAME, capsys) == "reservation/rsv-agent-cluster-1-abcdefghijklm\n"


@pytest.mark.parametrize("format", [Format.TABLE, Format.WIDE, Format.NAME])
def test_an_empty_list_is_a_sentence_beside_the_output(format, capsys):
    assert show_list([], format, capsys) == ("", "No reservations found.\n")


def test_an_empty_list_is_a_list_to_a_program(capsys):
    shown = json.loads(show_list([], Format.JSON, capsys).out)
    assert shown == {"kind": "ReservationList", "items": []}
