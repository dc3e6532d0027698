"""While authorities are exchanged nobody is refused, whatever of the old and the new each side has."""

import itertools
import ssl
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pytest

import tls_peers
from kubelend.pki import authority, files, identity
from kubelend.pki.authority import Authority
from kubelend.transports import tls

NOW = datetime.now(UTC)
DAY = timedelta(days=1)


class Side(NamedTuple):
    """What a server or a client has in its directory."""

    leaf: str
    trusts: str

    def accepts(self, other):
        """Only who has dropped the old authority refuses what it signed."""
        return other.leaf == "new" or self.trusts != "new"


SIDES = [Side(*pair) for pair in itertools.product(["old", "new"], ["old", "both", "new"])]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A server's and a client's directory for each side that there can be."""
    root = tmp_path_factory.mktemp("rotation")
    old = Authority.create("kubelend", now=NOW - DAY)
    old.save(root / "ca")
    new = authority.rotate_authority(root / "ca", now=NOW)
    signers = {"old": old, "new": Authority.load(root / "ca")}
    bundles = {"old": [old.certificate], "both": new.trusted, "new": [new.certificate]}
    for (leaf, trusts), end in itertools.product(SIDES, ["server", "client"]):
        profile = (
            identity.server_profile()
            if end == "server"
            else identity.client_profile("agent-cluster-1")
        )
        directory = root / f"{end}-{leaf}-{trusts}"
        files.save_credentials(directory, signers[leaf].issue(profile, now=NOW))
        (directory / "ca.crt").write_bytes(files.to_pem(bundles[trusts]))
    return root


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=str)
@pytest.mark.parametrize(
    "client", SIDES, ids=lambda side: f"client {side.leaf} trusts {side.trusts}"
)
@pytest.mark.parametrize(
    "server", SIDES, ids=lambda side: f"server {side.leaf} trusts {side.trusts}"
)
def test_both_sides_let_each_other_in_until_one_has_dropped_the_old(
    directories, server, client, version
):
    context = tls.client_context(directories / f"client-{client.leaf}-{client.trusts}")
    context.minimum_version = context.maximum_version = version
    seen = tls_peers.shake_hands(
        tls.server_context(directories / f"server-{server.leaf}-{server.trusts}"), context
    )
    if server.accepts(client) and client.accepts(server):
        assert (seen.server_error, seen.client_error, seen.caller) == ("", "", "agent-cluster-1")
    else:
        assert "certificate" in seen.server_error + seen.client_error.lower()
        assert seen.caller == "" or not client.accepts(server)


@pytest.mark.parametrize("trusts", ["old", "both", "new"])
def test_a_peer_that_knows_no_partial_chains_follows_too(directories, trusts):
    """As others' clients are set up: a chain must end in a self-signed certificate."""
    context = tls.client_context(directories / f"client-new-{trusts}")
    context.verify_flags &= ~ssl.VERIFY_X509_PARTIAL_CHAIN
    server = tls.server_context(directories / "server-new-both")
    server.verify_flags &= ~ssl.VERIFY_X509_PARTIAL_CHAIN
    seen = tls_peers.shake_hands(server, context)
    assert (seen.server_error, seen.client_error, seen.caller) == ("", "", "agent-cluster-1")


def test_a_cross_certificate_that_has_ended_harms_nobody_who_trusts_the_new(tmp_path):
    """Holders keep it in tls.crt until they renew, also after the old authority's end."""
    old = Authority.create("kubelend", DAY, now=NOW - 2 * DAY)
    new = old.successor(now=NOW - 2 * DAY)
    assert new.chain[0].not_valid_after_utc < NOW
    for name, profile in [
        ("server", identity.server_profile()),
        ("client", identity.client_profile("a")),
    ]:
        files.save_credentials(tmp_path / name, new.issue(profile, now=NOW))
    seen = tls_peers.shake_hands(
        tls.server_context(tmp_path / "server"), tls.client_context(tmp_path / "client")
    )
    assert (seen.server_error, seen.client_error, seen.caller) == ("", "", "a")


def test_a_client_that_trusts_only_the_root_verifies_a_server_below_an_intermediate(tmp_path):
    root = Authority.create("root", now=NOW - DAY)
    below = root.successor(now=NOW - DAY, name="intermediate")
    # Without its self-signed certificate, a successor is an intermediate.
    files.save_authority(tmp_path / "ca", [*below.chain, root.certificate], below.key)
    intermediate = Authority.load(tmp_path / "ca")
    assert intermediate.certificate == below.chain[0]
    for name, profile in [
        ("server", identity.server_profile()),
        ("client", identity.client_profile("a")),
    ]:
        files.save_credentials(tmp_path / name, intermediate.issue(profile, now=NOW))
        (tmp_path / name / "ca.crt").write_bytes(files.to_pem([root.certificate]))
    seen = tls_peers.shake_hands(
        tls.server_context(tmp_path / "server"), tls.client_context(tmp_path / "client")
    )
    assert (seen.server_error, seen.client_error, seen.caller) == ("", "", "a")
