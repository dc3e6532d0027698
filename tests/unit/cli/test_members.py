"""How members, tokens and the command to paste look to people."""

from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from kubelend.cli import members
from kubelend.wire import admin_bodies

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LATER = NOW + timedelta(minutes=15)
PIN = f"sha256:{'0' * 64}"


def made(role="cluster", name="", port=8444):
    return admin_bodies.NewToken("kl1.abc.xyz", "abc", role, LATER, 1, port, PIN, "8760h", name)


@pytest.mark.parametrize(
    "token, broker, address, command",
    [
        (
            made(name="berlin"),
            "https://broker.example.org:8443",
            "",
            "KUBELEND_TOKEN=kl1.abc.xyz"
            f" kubelend join https://broker.example.org:8444 --ca-hash {PIN}"
            " --cluster-id berlin --out certs/berlin",
        ),
        (
            made(),
            "https://[::1]:8443/",
            "",
            f"KUBELEND_TOKEN=kl1.abc.xyz kubelend join 'https://[::1]:8444' --ca-hash {PIN}"
            " --cluster-id CLUSTER --out certs/CLUSTER",
        ),
        (
            made("viewer", "Bob; rm -rf /"),
            "https://b:8443",
            "https://join.example.org",
            f"KUBELEND_TOKEN=kl1.abc.xyz kubelend join https://join.example.org --ca-hash {PIN}"
            " --name 'Bob; rm -rf /' --role viewer --out 'certs/Bob%3B rm -rf %2F'",
        ),
    ],
    ids=["bound", "unbound", "person"],
)
def test_command_can_be_pasted_whatever_the_name(token, broker, address, command):
    assert members.join_command(token, broker, address) == command


def test_tokens_are_shown_with_what_is_left_of_them():
    found = admin_bodies.Token("abc", "Used", "viewer", 0, NOW, "alice", LATER, "bob")
    header, row = members.token_table([found], NOW).splitlines()
    assert header.split() == list(members.TOKEN_HEADERS)
    assert row.split()[:5] == ["abc", "Used", "viewer", "bob", "0"]
    assert "(in 15m)" in row


def test_members_are_shown_with_the_days_left_and_the_key_of_who_waits():
    certificate = admin_bodies.MemberCertificate("1f", NOW, NOW + timedelta(days=365), PIN)
    found = [
        admin_bodies.Member("cluster", "a", "Accepted", NOW, certificate=certificate),
        admin_bodies.Member("cluster", "b", "Pending", NOW, asks=PIN),
        admin_bodies.Member("viewer", "c", "Revoked", NOW, revoked_at=NOW, reason="left"),
    ]
    _, a, b, c = members.member_table(found, NOW).splitlines()
    assert a.split() == ["cluster", "a", "Accepted", "0s", "365d", "-"]
    assert b.split() == ["cluster", "b", "Pending", "0s", "-", PIN]
    assert c.split() == ["viewer", "c", "Revoked", "0s", "-", "-"]
    *_, wide = members.member_table(found, NOW, wide=True).splitlines()
    assert wide.split()[-1] == "left"


@pytest.mark.parametrize(
    "role, release, released, drained, text",
    [
        ("viewer", False, [], [], "viewer/x revoked"),
        (
            "cluster",
            False,
            [],
            [],
            "cluster/x revoked; its reservations stay until they end, or until --release",
        ),
        (
            "cluster",
            True,
            ["r"],
            ["s", "t"],
            "cluster/x revoked; 1 borrowed reservation released,"
            " 2 lent reservations moved or released",
        ),
    ],
)
def test_revocation_says_what_it_did(role, release, released, drained, text):
    done = admin_bodies.Revocation(
        admin_bodies.Member(role, "x", "Revoked", NOW), True, released, drained
    )
    assert members.revocation_summary(done, release=release) == text


@pytest.mark.parametrize(
    "left, text",
    [
        (admin_bodies.Removal(False), "cluster/x deleted"),
        (
            admin_bodies.Removal(False, tokens=["a"]),
            "cluster/x deleted; 1 token that it created deleted",
        ),
        (
            admin_bodies.Removal(True, tokens=["a", "b"]),
            "cluster/x deleted; its certificates stay revoked until it is approved again;"
            " 2 tokens that it created deleted",
        ),
        (
            admin_bodies.Removal(True, LATER),
            "cluster/x deleted; its certificates stay revoked until the last one ends,"
            " 2026-01-01T00:15:00Z (in 15m)",
        ),
    ],
)
def test_removal_says_what_stays(left, text):
    assert members.deletion_summary("cluster/x", left, NOW) == text


def test_revoked_administrator_is_told_with_its_tokens():
    member = admin_bodies.Member("admin", "x", "Revoked", NOW)
    done = admin_bodies.Revocation(member, True, tokens=["a", "b"])
    text = "admin/x revoked; 2 tokens that it created deleted"
    assert members.revocation_summary(done, release=False) == text


def test_acceptance_says_which_certificates_stay_refused():
    member = admin_bodies.Member("cluster", "x", "Accepted", NOW)
    assert members.approval_summary(member, NOW) == "cluster/x approved"
    text = "cluster/x approved; certificates from before 2026-01-01T00:00:00Z (0s ago) stay revoked"
    assert members.approval_summary(replace(member, revoked_at=NOW), NOW) == text
