"""What commands print: texts of 80 columns, formats for programs, and no control character of others."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
import yaml
from msgspec.structs import replace

from kubelend.cli import clusters, lab, limits, main, members, output, reservations
from kubelend.cli.clusters import CLUSTERS
from kubelend.cli.limits import POLICIES, QUOTAS
from kubelend.cli.members import MEMBERS, TOKENS
from kubelend.cli.output import OutputFormat
from kubelend.cli.reservations import RESERVATIONS
from kubelend.core.errors import Forbidden, KubelendError
from kubelend.kits import tables
from kubelend.lab import state
from kubelend.lab.state import LabDirectory, LabState
from kubelend.lab.walkthrough import ComponentStatus, LabHealth
from kubelend.wire import admin_bodies, bodies
from kubelend.wire.admin_bodies import Member, PolicyStatus, Quota, QuotaStatus, QuotaUse, Removal

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
LATER = NOW + timedelta(minutes=15)
MINUTE = timedelta(minutes=1)
PIN = f"sha256:{'0' * 64}"


# -- reservations

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
        reserved_at=NOW - 5 * MINUTE,
        expires_at=NOW + 55 * MINUTE,
    ),
    created_at=NOW - 5 * MINUTE,
    priority=10,
    duration="1h0m0s",
    cost=bodies.AgreedCost("0.054294967", "EUR"),
)
PENDING = bodies.Reservation(
    *("rsv-agent-cluster-1-nopqrstuvwxyz", "agent-cluster-1", ""),
    bodies.Quantities("50", "1Gi"),
    bodies.ReservationStatus("Pending", "Waiting: 0/2 clusters fit", "Waiting"),
    NOW - MINUTE / 2,
)


def test_reservations_as_a_table():
    assert RESERVATIONS.table([RESERVED, PENDING], NOW) == (
        "NAME                               PHASE     REQUESTER        PROVIDER         CPU   MEMORY  AGE\n"
        "rsv-agent-cluster-1-abcdefghijklm  Reserved  agent-cluster-1  agent-cluster-2  500m  256Mi   5m\n"
        "rsv-agent-cluster-1-nopqrstuvwxyz  Pending   agent-cluster-1  -                50    1Gi     30s"
    )
    header, row, _ = RESERVATIONS.table([RESERVED, PENDING], NOW, wide=True).splitlines()
    assert " ".join(header.split()[7:]) == "LEFT GPU STORAGE PRIORITY COST REASON"
    assert row.split(maxsplit=7)[7] == "55m   1    -        10        0.0543 EUR/h  Locked"


def test_a_reservation_as_one_line_and_in_detail():
    assert reservations.summary(RESERVED, NOW) == (
        "rsv-agent-cluster-1-abcdefghijklm is Reserved on agent-cluster-2 for 55m"
    )
    assert reservations.summary(PENDING, NOW) == (
        "rsv-agent-cluster-1-nopqrstuvwxyz is Pending: Waiting: 0/2 clusters fit"
    )
    assert reservations.details(RESERVED, NOW) == (
        "Name:       rsv-agent-cluster-1-abcdefghijklm\n"
        "Phase:      Reserved (Locked)\n"
        "Message:    Resources locked in cluster agent-cluster-2\n"
        "Requester:  agent-cluster-1\n"
        "Target:     agent-cluster-2\n"
        "Resources:  500m cpu, 256Mi memory, 1 gpu, 2 example.com/fpga\n"
        "Cost:       0.0543 EUR per hour\n"
        "Priority:   10\n"
        "Duration:   1h0m0s\n"
        "Created:    2026-01-02T02:59:05Z (5m ago)\n"
        "Reserved:   2026-01-02T02:59:05Z (5m ago)\n"
        "Expires:    2026-01-02T03:59:05Z (in 55m)"
    )
    assert "Priority:   0\n" in reservations.details(PENDING, NOW)


SUGGESTION = (
    "agent-cluster-3 fits if you request 50m cpu less, or wait until reservations there end"
)
EXPLANATION = bodies.Explanation(
    "1/3 clusters fit: 2 InsufficientCPU",
    3,
    1,
    {"InsufficientCPU": 2},
    [
        bodies.Candidate("agent-cluster-2", True, [], 0.8055, "0.028737418", "USD"),
        bodies.Candidate(
            *("agent-cluster-3", False, ["InsufficientCPU"]),
            suggestion=bodies.Suggestion("agent-cluster-3", SUGGESTION),
        ),
    ],
)


def test_an_explanation_ranks_the_clusters_and_suggests_what_would_help():
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
    suggestion = bodies.Suggestion("b", "b fits if you " + "ask for less " * 10)
    nearest = bodies.Explanation(
        "0/1 cluster fits", 1, 0, {}, [], suggestion, quota=["r holds 30 of 32 cpu"]
    )
    summary, _, quota, _, *wrapped = reservations.explanation_text(nearest, 80).splitlines()
    assert (summary, quota) == ("0/1 cluster fits", "Quota: r holds 30 of 32 cpu.")
    assert wrapped[0].startswith("Nearest: b fits if you ask for less")
    assert max(map(len, wrapped)) <= 80
    none = bodies.Explanation("no cluster has advertised yet", 0, 0, {})
    assert reservations.explanation_text(none, 80) == "no cluster has advertised yet"


# -- clusters

IN_EFFECT = bodies.EffectivePolicy(
    allow=[["team-*"], ["team-a", "team-b"]],
    deny=["team-x"],
    keep_back={"cpu": "4", "memory": "8Gi"},
    hours=[["Mon-Fri 18:00-08:00 Europe/Rome", "Sat,Sun 00:00-24:00"]],
)
METRICS = bodies.Metrics(
    capacity=bodies.Quantities("10", "8025424Ki", gpu="2"),
    allocatable=bodies.Quantities("10", "8025424Ki", gpu="2"),
    allocated=bodies.Quantities("1050m", "418Mi"),
    reserved=bodies.Quantities("3", "1Gi"),
    available=bodies.Quantities("5950m", "6548816Ki", gpu="2"),
)
COST = bodies.Cost("0.02", "0.01", currency="EUR")
TIMES: dict[str, Any] = {
    "last_update_time": NOW - timedelta(seconds=12),
    "valid_until": NOW + 9 * MINUTE,
}
CORDON: dict[str, Any] = {"cordoned": True, "cordon_reason": "new kernel"}
CLUSTER = bodies.Cluster(
    bodies.Advertisement(
        "agent-cluster-2", METRICS, region="eu-west", labels={"tier": "gold"}, cost=COST
    ),
    bodies.ClusterStatus("Active", True, "70.55", "Good", reservations=3, **TIMES, **CORDON),
)


def cluster(**fields):
    return replace(CLUSTER, status=replace(CLUSTER.status, **fields))


def test_clusters_as_a_table():
    assert CLUSTERS.table([CLUSTER], NOW) == (
        "NAME             STATUS    CPU-FREE  MEMORY-FREE  GPU-FREE  SCORE  LENT  SEEN\n"
        "agent-cluster-2  Cordoned  5950m     6.2Gi        2         70.55  3     12s"
    )
    ending = cluster(certificate_until=NOW + timedelta(days=30))
    header, row = CLUSTERS.table([ending], NOW, wide=True).splitlines()
    assert header[79:] == "CPU  MEMORY  STORAGE-FREE  REGION   PRICE          CERTIFICATE  ENDPOINT"
    assert row[79:] == "10   7.6Gi   -             eu-west  0.02/0.01 EUR  30d          -"


DETAILS = (
    "Name:           agent-cluster-2\n"
    "Status:         Cordoned\n"
    "Cordon reason:  new kernel\n"
    "Score:          70.55 (Good)\n"
    "Lends:          3 reservations\n"
    "Region:         eu-west\n"
    "Labels:         tier=gold\n"
    "Prices:         0.02 per core, 0.01 per GB and hour, in EUR\n"
    "{policy}"
    "Last seen:      2026-01-02T03:03:53Z (12s ago)\n"
    "Valid until:    2026-01-02T03:13:05Z (in 9m)\n"
    "\n"
    "RESOURCE  CAPACITY   ALLOCATABLE  ALLOCATED  RESERVED  AVAILABLE{withheld[0]}\n"
    "cpu       10         10           1050m      3         5950m{withheld[1]}\n"
    "memory    8025424Ki  8025424Ki    418Mi      1Gi       6548816Ki{withheld[2]}\n"
    "gpu       2          2            0          0         2{withheld[3]}"
)


def test_a_cluster_in_detail_with_its_policy_and_what_that_withholds():
    assert clusters.cluster_details(CLUSTER, NOW) == DETAILS.format(policy="", withheld=[""] * 4)
    limited = cluster(policy=IN_EFFECT, withheld={"cpu": "4"})
    assert clusters.cluster_details(limited, NOW) == DETAILS.format(
        policy="Lends to:       team-* and also team-a, team-b\n"
        "Not to:         team-x\n"
        "Keeps back:     4 cpu, 8Gi memory\n"
        "Opening hours:  Mon-Fri 18:00-08:00 Europe/Rome, Sat,Sun 00:00-24:00\n",
        withheld=["  WITHHELD", "      4", "  0", "          0"],
    )


@pytest.mark.parametrize(
    "fields, status",
    [
        ({"cordoned": False, "closed": True}, "Closed"),
        ({"closed": True}, "Cordoned"),
        ({"cordoned": False}, "Active"),
        ({"active": False, "phase": "Stale"}, "Stale,Cordoned"),
    ],
    ids=str,
)
def test_the_status_of_a_cluster(fields, status):
    assert CLUSTERS.table([cluster(**fields)], NOW).splitlines()[1].split()[1] == status


def test_a_drain_is_summarized():
    released = replace(RESERVED, status=bodies.ReservationStatus("Released", "Drained"))
    text = clusters.drain_summary(bodies.DrainResult(CLUSTER, [RESERVED, released]), NOW)
    assert text.startswith(
        "cluster/agent-cluster-2 drained: 1 moved to other clusters, 1 released\n\nNAME "
    )
    empty = clusters.drain_summary(bodies.DrainResult(CLUSTER, []), NOW)
    assert empty == "cluster/agent-cluster-2 drained; it had no reservations"


# -- policies and quotas

POLICY = PolicyStatus(
    "milan",
    admin=bodies.LendingPolicy(allow=["team-*"], keep_back={"cpu": "4", "memory": "2Gi"}),
    advertised=bodies.LendingPolicy(
        allow=["team-a", "team-b"], deny=["team-x"], keep_back={"memory": "8Gi"}
    ),
    effective=IN_EFFECT,
)
QUOTA = QuotaStatus(
    "team-a",
    Quota({"cpu": "32", "gpu": "0"}, reservations=5, budget="50", currency="EUR"),
    QuotaUse({"cpu": "30", "memory": "9Gi"}, {"cpu": "2"}, 3, 1, "12.345678901"),
)


def test_a_policy_shows_who_set_what_and_what_is_in_effect():
    assert limits.policy_text(POLICY, None) == (
        "LIMIT          ADMIN              ADVERTISED      EFFECTIVE\n"
        "Lends to       team-*             team-a, team-b  team-* and also team-a, team-b\n"
        "Not to         -                  team-x          team-x\n"
        "Keeps back     4 cpu, 2Gi memory  8Gi memory      4 cpu, 8Gi memory\n"
        "Opening hours  -                  -               "
        "Mon-Fri 18:00-08:00 Europe/Rome, Sat,Sun 00:00-24:00"
    )
    assert max(map(len, limits.policy_text(POLICY, 80).splitlines())) <= 80
    assert limits.policy_text(PolicyStatus("milan"), 80) == (
        "milan has no lending policy: it lends all free resources, to everyone and at any time"
    )
    assert POLICIES.table([POLICY], NOW) == (
        "CLUSTER  POLICY\n"
        "milan    lends to team-* and also team-a, team-b; not to team-x; keeps back 4 cpu, 8Gi memory;"
        " opening hours Mon-Fri 18:00-08:00 Europe/Rome, Sat,Sun 00:00-24:00"
    )


def test_a_quota_shows_its_use():
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
    assert QUOTAS.table([QUOTA, QuotaStatus("b", Quota(), QuotaUse(reservations=2))], NOW) == (
        "CLUSTER  RESERVATIONS       SPENT-TODAY        AMOUNTS\n"
        "team-a   4 of 5, 1 pending  12.3457 of 50 EUR  30 of 32 cpu, 0 of 0 gpu\n"
        "b        2                  -                  -"
    )


# -- members and tokens


def new_token(role="cluster", name=""):
    return admin_bodies.NewToken("kl1.abc.xyz", "abc", role, LATER, 1, 8444, PIN, "8760h", name)


@pytest.mark.parametrize(
    "token, broker, address, command",
    [
        (
            *(new_token(name="berlin"), "https://broker.example.org:8443", ""),
            f"https://broker.example.org:8444 --ca-hash {PIN} --cluster-id berlin --out certs/berlin",
        ),
        (
            *(new_token(), "https://[::1]:8443/", ""),
            f"'https://[::1]:8444' --ca-hash {PIN} --cluster-id CLUSTER --out certs/CLUSTER",
        ),
        (
            *(new_token("viewer", "Bob; rm -rf /"), "https://b:8443", "https://join.example.org"),
            f"https://join.example.org --ca-hash {PIN} --name 'Bob; rm -rf /' --role viewer"
            " --out 'certs/Bob%3B rm -rf %2F'",
        ),
    ],
    ids=["bound", "unbound", "person"],
)
def test_a_join_command_can_be_pasted_whatever_the_name(token, broker, address, command):
    expected = f"KUBELEND_TOKEN=kl1.abc.xyz kubelend join {command}"
    assert members.join_command(token, broker, address) == expected


def test_tokens_as_a_table_and_in_detail():
    found = admin_bodies.Token("abc", "Used", "viewer", 0, NOW, "alice", LATER, "bob")
    assert TOKENS.table([found], NOW) == (
        "ID   STATE  ROLE    NAME  USES-LEFT  EXPIRES                        CREATED-BY\n"
        "abc  Used   viewer  bob   0          2026-01-02T03:19:05Z (in 15m)  alice"
    )
    assert members.token_details(found, NOW) == (
        "ID:          abc\n"
        "State:       Used\n"
        "Role:        viewer\n"
        "Name:        bob\n"
        "Uses left:   0\n"
        "Created:     2026-01-02T03:04:05Z (0s ago)\n"
        "Created by:  alice\n"
        "Expires:     2026-01-02T03:19:05Z (in 15m)"
    )


def test_members_as_a_table_and_in_detail():
    certificate = admin_bodies.MemberCertificate("1f", NOW, NOW + timedelta(days=365), PIN)
    accepted = Member("cluster", "a", "Approved", NOW, certificate=certificate)
    pending = Member("cluster", "b", "Pending", NOW, pending_key=PIN)
    revoked = Member("viewer", "c", "Revoked", NOW, revoked_at=NOW - MINUTE, reason="left")
    header, a, b, c = MEMBERS.table([accepted, pending, revoked], NOW, wide=True).splitlines()
    assert " ".join(header.split()) == (
        "ROLE NAME STATUS SINCE CERTIFICATE PENDING-KEY DECIDED-BY TOKEN SERIAL AUTHORITY REASON"
    )
    assert a.split() == ["cluster", "a", "Approved", "0s", "365d", "-", "-", "-", "1f", PIN, "-"]
    assert b.split()[2:6] == ["Pending", "0s", "-", PIN]
    assert c.split() == ["viewer", "c", "Revoked", "60s", *["-"] * 6, "left"]
    assert MEMBERS.table([pending], NOW).splitlines()[1].endswith(PIN)
    assert members.member_details(accepted, NOW) == (
        "Name:         a\n"
        "Role:         cluster\n"
        "Status:       Approved\n"
        "Requested:    2026-01-02T03:04:05Z (0s ago)\n"
        "Certificate:  1f\n"
        "Valid until:  2027-01-02T03:04:05Z (in 365d)\n"
        f"Authority:    {PIN}"
    )


@pytest.mark.parametrize(
    "role, fields, text",
    [
        ("viewer", {}, ""),
        ("admin", {"tokens": ["a", "b"]}, "; 2 tokens that it created deleted"),
        ("cluster", {}, "; its reservations stay until they end, or until --release"),
        (
            *("cluster", {"released": ["r"], "drained": ["s", "t"]}),
            "; 1 borrowed reservation released, 2 lent reservations moved or released",
        ),
    ],
    ids=["viewer", "admin", "keep", "release"],
)
def test_a_revocation_is_summarized(role, fields, text):
    done = admin_bodies.Revocation(Member(role, "x", "Revoked", NOW), True, **fields)
    summary = members.revocation_summary(done, release="released" in fields)
    assert summary == f"{role}/x revoked{text}"


STAY = "; its certificates stay revoked until"


@pytest.mark.parametrize(
    "left, text",
    [
        (Removal(False), ""),
        (Removal(False, tokens=["a"]), "; 1 token that it created deleted"),
        (
            Removal(True, tokens=["a", "b"]),
            f"{STAY} it is approved again; 2 tokens that it created deleted",
        ),
        (Removal(True, LATER), f"{STAY} the last one ends, 2026-01-02T03:19:05Z (in 15m)"),
    ],
)
def test_a_deletion_is_summarized(left, text):
    assert members.deletion_summary("cluster/x", left, NOW) == f"cluster/x deleted{text}"


def test_an_approval_names_the_certificates_that_stay_revoked():
    member = Member("cluster", "x", "Approved", NOW)
    assert members.approval_summary(member, NOW) == "cluster/x approved"
    assert members.approval_summary(replace(member, revoked_at=NOW), NOW) == (
        "cluster/x approved; certificates from before 2026-01-02T03:04:05Z (0s ago) stay revoked"
    )


# -- the lab

LAB = LabState(broker="https://localhost:1", kubectl="/opt/kubectl", store="kubernetes:///k")


def test_the_health_of_a_lab_is_tables_or_sentences():
    ready = LabHealth([ComponentStatus("broker", "ready", "broker.log")], [], [])
    assert lab.health_text(ready) == (
        "COMPONENT  STATE  LOCATION\nbroker     ready  broker.log\n\n"
        "No advertisements.\n\nNo reservations."
    )
    failed = LabHealth([ComponentStatus("broker", "a long error message", "broker.log")], [], [])
    assert lab.health_text(failed).splitlines()[1] == "broker     NotReady  broker.log"
    assert failed.problems == [
        "broker: a long error message",
        "agent-cluster-1 does not advertise",
        "agent-cluster-2 does not advertise",
    ]


@pytest.mark.parametrize("has_kubectl", [True, False])
def test_commands_for_a_lab_name_its_directory_and_kubectl(tmp_path, monkeypatch, has_kubectl):
    if has_kubectl:
        (tmp_path / "kubectl").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    named = lab.next_commands(LabDirectory(tmp_path / "a b"), LAB)
    assert named[0] == f"export KUBELEND_LAB_DIRECTORY='{tmp_path}/a b'"
    program = "kubectl" if has_kubectl else "/opt/kubectl"
    assert f"{program} --context broker-cluster get reservations" in named
    default = lab.next_commands(LabDirectory(state.default_directory()), LAB)
    assert default[0].startswith("export KUBECONFIG=")


# -- tables, times and amounts


LONG = "one two three four five six"
WRAPPED = f"one two three four\n{' ' * 42}five six"


@pytest.mark.parametrize(
    "cells, width, text",
    [
        ([("long-name", "5m"), ("b", "")], None, "NAME       WHY\nlong-name  5m\nb          -"),
        ([("x" * 4, LONG)], 26, "NAME  WHY\nxxxx  one two three four\n      five six"),
        ([("x", LONG * 9)], None, f"NAME  WHY\nx     {LONG * 9}"),
        ([("x" * 40, LONG)], 40, f"NAME{' ' * 38}WHY\n{'x' * 40}  {WRAPPED}"),
    ],
    ids=["aligned", "last column wrapped", "no width", "narrow terminal"],
)
def test_a_table_is_aligned_and_only_its_last_column_wrapped(cells, width, text):
    assert tables.format_table(("NAME", "WHY"), cells, width=width) == text


def test_columns_are_aligned_to_the_left_or_right():
    rows = [("7", "a"), ("1,234", "b")]
    lines = tables.align_columns(("N", "WHAT"), rows, right=[0])
    assert lines == ["    N  WHAT", "    7  a", "1,234  b"]
    assert tables.align_columns(("A", "B"), []) == ["A  B"]


@pytest.mark.parametrize(
    "duration, text",
    [
        (timedelta(), "0s"),
        (timedelta(seconds=-5), "0s"),
        (timedelta(seconds=119), "119s"),
        (timedelta(minutes=2), "2m"),
        (timedelta(minutes=119, seconds=58), "2h"),
        (timedelta(hours=2, minutes=59, seconds=58), "3h"),
        (timedelta(hours=2, minutes=30), "2h30m"),
        (timedelta(hours=10), "10h"),
        (timedelta(hours=47, minutes=59), "2d"),
        (timedelta(days=365), "365d"),
    ],
    ids=str,
)
def test_a_span_is_rounded(duration, text):
    assert tables.format_span(duration) == text


def test_time_of_a_step_ends_at_the_last_column_and_a_long_title_is_wrapped():
    assert tables.title_line(" 1  Start", 0.25) == " 1  Start".ljust(74) + "250 ms"
    first, second = tables.title_line(f"node: {'refused ' * 10}", 1.2).splitlines()
    assert len(second) == 80
    assert second.startswith("    refused")
    assert second.endswith(" 1.2 s")
    assert f"{first} {second[4:-5].strip()}" == f"node: {'refused ' * 10}".strip()


def test_times_counts_and_details():
    assert tables.format_time(NOW + timedelta(hours=3), NOW) == "2026-01-02T06:04:05Z (in 3h)"
    assert tables.format_time(NOW - 5 * MINUTE, NOW) == "2026-01-02T02:59:05Z (5m ago)"
    assert tables.format_time(None, NOW) == ""
    counts = [tables.format_count(number, "cluster") for number in (0, 1, 2)]
    assert counts == ["0 clusters", "1 cluster", "2 clusters"]
    text = output.details(
        [("Name", "x"), ("Region", ""), ("Uses", 0), ("Never", None), ("Ended", NOW)], NOW
    )
    assert text == "Name:   x\nUses:   0\nEnded:  2026-01-02T03:04:05Z (0s ago)"


@pytest.mark.parametrize(
    "price, shown",
    [
        ("0.402949673", "0.4029"),
        ("12.345678901", "12.3457"),
        ("12", "12"),
        ("0.5", "0.5"),
        ("0.000000001", "0.000000001"),
        ("0", "0"),
    ],
)
def test_a_small_price_is_not_rounded_to_zero(price, shown):
    assert output.format_price(price) == shown


@pytest.mark.parametrize(
    "amount, shown",
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
def test_bytes_are_rounded_down(amount, shown):
    assert output.short_bytes(amount) == shown


# -- for programs


def typed(one):
    return {"kind": "Reservation", **msgspec.to_builtins(one)}


@pytest.mark.parametrize(
    "format, read",
    [(OutputFormat.JSON, json.loads), (OutputFormat.YAML, yaml.safe_load)],
    ids=["json", "yaml"],
)
def test_programs_get_kind_and_body_and_of_a_list_the_items(format, read, capsys):
    RESERVATIONS.show(RESERVED, format, lambda: "for people")
    assert read(capsys.readouterr().out) == typed(RESERVED)
    for found in ([RESERVED, PENDING], []):
        RESERVATIONS.show_list(found, format)
        items = [typed(one) for one in found]
        assert read(capsys.readouterr().out) == {"kind": "ReservationList", "items": items}


def test_a_name_has_its_kind_before_it(capsys):
    RESERVATIONS.show(RESERVED, OutputFormat.NAME)
    RESERVATIONS.show_list([PENDING], OutputFormat.NAME)
    assert capsys.readouterr().out.split() == [
        "reservation/rsv-agent-cluster-1-abcdefghijklm",
        "reservation/rsv-agent-cluster-1-nopqrstuvwxyz",
    ]


@pytest.mark.parametrize("format", [OutputFormat.TABLE, OutputFormat.WIDE, OutputFormat.NAME])
def test_an_empty_list_is_a_sentence_on_standard_error(format, capsys):
    RESERVATIONS.show_list([], format, " in namespace x")
    assert capsys.readouterr() == ("", "No reservations found in namespace x.\n")


# -- text from others

ACTIVE = [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F)]
ACTIVE += [0x061C, 0x200E, 0x200F, *range(0x2066, 0x206A), 0xD800]
HOSTILE = "a\x1b[2K\r\n\x00\x9b31m\u202eb\u2028c\x85d"
SHOWN = r"a\x1b[2K\r\n\x00\x9b31m\u202eb\u2028c\x85d"
HOSTILE_COST = bodies.Cost("1", "1", currency=HOSTILE)
HOSTILE_CLUSTER = bodies.Cluster(
    bodies.Advertisement(
        *(HOSTILE, METRICS),
        region=HOSTILE,
        labels={HOSTILE: HOSTILE},
        cost=HOSTILE_COST,
        endpoint_url=HOSTILE,
    ),
    replace(CLUSTER.status, phase=HOSTILE, rating=HOSTILE, cordon_reason=HOSTILE, message=HOSTILE),
)
HOSTILE_STATUS = bodies.ReservationStatus(HOSTILE, HOSTILE, HOSTILE)
HOSTILE_RESERVATION = bodies.Reservation(
    HOSTILE, HOSTILE, HOSTILE, bodies.Quantities("1", "1Gi"), HOSTILE_STATUS, NOW
)
HOSTILE_EXPLANATION = bodies.Explanation(
    *(HOSTILE, 1, 0, {}, [bodies.Candidate(HOSTILE, False, [HOSTILE])]),
    suggestion=bodies.Suggestion(HOSTILE, HOSTILE),
    quota=[HOSTILE],
)
HOSTILE_MEMBER = Member(role=HOSTILE, name=HOSTILE, status=HOSTILE, requested_at=NOW)
TEXTS = {
    "clusters": (CLUSTERS.table([HOSTILE_CLUSTER], NOW, wide=True), 2),
    "cluster": (clusters.cluster_details(HOSTILE_CLUSTER, NOW), 17),
    "drained cluster": (
        clusters.drain_summary(bodies.DrainResult(HOSTILE_CLUSTER, [HOSTILE_RESERVATION]), NOW),
        4,
    ),
    "reservations": (RESERVATIONS.table([HOSTILE_RESERVATION], NOW, wide=True), 2),
    "reservation": (reservations.details(HOSTILE_RESERVATION, NOW), 8),
    "summary": (reservations.summary(HOSTILE_RESERVATION, NOW), 1),
    "explanation": (reservations.explanation_text(HOSTILE_EXPLANATION, None), 8),
    "members": (MEMBERS.table([HOSTILE_MEMBER], NOW, wide=True), 2),
    "member": (members.approval_summary(HOSTILE_MEMBER, NOW), 1),
    "policy": (limits.policy_text(PolicyStatus(HOSTILE), None), 1),
}
"""Bodies with control characters in every text, and the number of lines of each output."""


@pytest.mark.parametrize("name", TEXTS)
def test_a_hostile_body_adds_no_line_and_no_control_character(name):
    text, count = TEXTS[name]
    assert SHOWN in text
    assert len(text.split("\n")) == count
    assert all(line.isprintable() for line in text.split("\n"))


class Body(msgspec.Struct):
    """Any body."""

    name: str


@pytest.mark.parametrize("code", ACTIVE, ids=hex)
def test_control_characters_are_escaped_for_people_and_preserved_for_programs(code):
    written = tables.sanitize_line(f"a{chr(code)}b")
    assert (written.isascii(), written.isprintable()) == (True, True)
    assert (written[:2], written[-1]) == ("a\\", "b")
    if code == 0xD800:  # a surrogate, which no JSON has
        return
    body = Body(f"a{chr(code)}é")
    for text, read in (
        (output.json(body), json.loads),
        (output.json(body, indent=-1), json.loads),
        (output.yaml(body), yaml.safe_load),
    ):
        assert read(text) == {"name": body.name}
        assert all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize("text", ["", "eu-west 1", "Zürich", "東京", "a\\b", "50 €", "👩‍🚀"])
def test_ordinary_text_is_not_escaped(text):
    assert tables.sanitize_line(text) == tables.sanitize_lines(text) == text
    if text:
        assert yaml.safe_load(output.yaml(Body(text))) == {"name": text}
        assert (text in output.yaml(Body(text))) or "👩" in text
        assert json.dumps(text, ensure_ascii=False) in output.json(Body(text))


def test_tables_rows_and_own_line_ends():
    header, first, second = tables.format_table(("A", "B"), [(HOSTILE, "x"), ("y", HOSTILE)]).split(
        "\n"
    )
    assert first == f"{SHOWN}  x"
    assert header.index("B") == second.index(SHOWN) == len(f"{SHOWN}  ")
    assert tables.format_row((HOSTILE, ""), (3, 3)) == f"{SHOWN}  -"
    assert tables.format_pairs([("Name", HOSTILE), (HOSTILE, "x")]).count("\n") == 1
    assert tables.sanitize_lines("one\x1b\ntwo\r") == "one\\x1b\ntwo\\r"


def test_notes_names_and_errors_are_one_line_each(capsys):
    output.note(HOSTILE)
    output.print_error(Forbidden(HOSTILE, hint=HOSTILE))
    output.show(Body(HOSTILE), OutputFormat.NAME, str, [HOSTILE, "b"])
    output.show(Body(HOSTILE), OutputFormat.NAME, str, [])
    out, err = capsys.readouterr()
    assert out == f"{SHOWN}\nb\n"
    note, error, end = err.split("\n")
    assert (note, end) == (SHOWN, "")
    assert error.startswith(r"error: a\x1b[2K \x00\x9b31m\u202eb c d; a\x1b")
    assert error.isprintable()


@pytest.mark.parametrize("flags", ["", "--debug "], ids=["", "debug"])
def test_an_error_text_of_a_broker_cannot_end_a_line(flags, monkeypatch, capsys):
    def fail(*_):
        raise KubelendError(HOSTILE)

    monkeypatch.setattr("kubelend.cli.app.Versions", fail)
    assert main.run([*flags.split(), "version"]) == 1
    text = capsys.readouterr().err
    assert all(line.isprintable() for line in text.split("\n"))
    assert text.count("\n") == 1 or flags
