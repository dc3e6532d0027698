"""Certificates that change while the broker runs: new connections see them, open ones go on."""

import shutil
import ssl
from typing import Any

import aiohttp
import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

import brokers
import make
import tls_peers
import waiting
from callers import Caller
from certificates import Certificates
from kubelend.pki import files
from kubelend.pki.identity import BROKER_NAME, Profile

SOON = make.SECOND / 100


class Live:
    """A broker's directory whose files a test exchanges."""

    def __init__(self, root, certificates):
        self.certificates = certificates
        self.directory = root / "live"
        shutil.copytree(certificates.server(), self.directory)

    def put(self, source):
        for name in ("tls.key", "tls.crt", "ca.crt"):
            (self.directory / name).write_bytes((source / name).read_bytes())

    def rename(self, name):
        """A certificate of the same authority, with this common name."""
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = (x509.DNSName("localhost"),)
        profile = Profile(subject, ExtendedKeyUsageOID.SERVER_AUTH, names)
        self.put(self.certificates.write(f"server-{name}", profile))


@pytest.fixture
def live(tmp_path):
    return Live(tmp_path, Certificates(tmp_path / "certificates"))


@pytest.fixture
async def broker(live):
    async with brokers.running(
        live.certificates, http_cert_path=live.directory, certificate_check_interval=SOON
    ) as running:
        yield running


async def serial_shown(caller):
    """The serial number of the certificate that a new connection sees."""
    async with tls_peers.connected(caller.port, caller.context, "localhost") as connection:
        return connection.serial


async def reloaded(log, times=1):
    await waiting.until(lambda: len(log.lines("Certificates reloaded")) >= times)


async def test_new_connections_see_the_new_certificate_and_open_ones_go_on(broker, live, log):
    a = broker.cluster("a")
    async with a.stream() as stream:
        await stream.event()
        before = await serial_shown(a)
        live.rename("another-broker")
        await reloaded(log)
        assert await serial_shown(a) == tls_peers.serial_in(live.directory) != before
        await a.advertise()
        made = await broker.cluster("r").reserve()
        assert (await stream.event()).told == ("provider", "Hold", made["id"])


async def test_names_of_the_broker_follow_its_certificate(broker, live, log):
    """Whoever holds the present certificate's name is no cluster; who held the old one may be."""
    newcomer = broker.cluster("another-broker")
    assert (await newcomer.get("version")).status == 200
    live.rename("another-broker")
    await reloaded(log)
    assert (await newcomer.get("version")).refusal == (403, "InvalidIdentity")
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, BROKER_NAME)])
    profile = Profile(subject, ExtendedKeyUsageOID.CLIENT_AUTH)
    old = broker.holder(live.certificates.write("old-name", profile))
    assert (await old.get("version")).status == 200


async def test_expiry_in_the_metrics_follows(broker, live, log):
    first = broker.metric("kubelend_certificate_expiry_timestamp_seconds", name="server")
    now = live.certificates.now
    longer = live.certificates.authority.issue(
        files_profile("longer"), make.HOUR * 24 * 200, now=now
    )
    files.save_credentials(live.directory, longer, overwrite=True)
    await reloaded(log)
    shown = broker.metric("kubelend_certificate_expiry_timestamp_seconds", name="server")
    assert shown != first
    assert shown == pytest.approx((now + make.HOUR * 24 * 200).timestamp(), abs=1)


def files_profile(name):
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    return Profile(subject, ExtendedKeyUsageOID.SERVER_AUTH, (x509.DNSName("localhost"),))


async def test_clients_of_a_new_authority_are_let_in_and_of_the_old_one_no_more(
    broker, live, log, tmp_path
):
    old = broker.cluster("a")
    assert (await old.get("version")).status == 200
    successor = Certificates(tmp_path / "successor", authority="successor")
    live.put(successor.server())
    await reloaded(log)
    new = Caller(broker.port, successor.cluster("a"), "a")
    assert (await new.get("version")).status == 200
    await new.hang_up()
    # On its open connection it learns why; a new one is not let in.
    assert (await old.get("version")).refusal == (403, "Revoked")
    await old.hang_up()
    old.context.load_verify_locations(successor.server() / "ca.crt")
    with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
        await old.get("version")


@pytest.mark.parametrize("broken", ["tls.crt", "tls.key", "ca.crt"])
async def test_files_that_do_not_fit_are_reported_once_and_the_old_ones_stay(
    broker, live, log, broken
):
    good = (live.directory / broken).read_bytes()
    (live.directory / broken).write_bytes(b"nonsense")
    problem = "Certificate reload failed, keeping the previous ones"
    await waiting.until(lambda: bool(log.lines(problem)))
    assert (await broker.cluster("a").get("version")).status == 200
    assert broken in log.lines(problem)[0]["error"]
    (live.directory / broken).write_bytes(good)
    await reloaded(log)
    assert len(log.lines(problem)) == 1
    assert (await broker.cluster("b").get("version")).status == 200


async def test_process_takes_up_new_files_too(tmp_path):
    live = Live(tmp_path, Certificates(tmp_path / "certificates"))
    settings: dict[str, Any] = {
        "http_cert_path": str(live.directory),
        "certificate_check_interval": "10ms",
    }
    async with brokers.child(live.certificates, tmp_path, **settings) as broker:
        a = broker.cluster("a")
        assert (await a.get("version")).status == 200
        live.rename("another-broker")
        await waiting.until(lambda: bool(broker.logged("Certificates reloaded")))
        assert (await a.get("version")).status == 200
        assert await serial_shown(a) == tls_peers.serial_in(live.directory)
        assert (await broker.cluster("another-broker").get("version")).status == 403
