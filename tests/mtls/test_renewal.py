"""Renewal at a real broker: what a holder gets, also while the authority is exchanged, and what not."""

import asyncio
import contextlib
import shutil
from datetime import UTC, datetime, timedelta

import pytest

import brokers
import waiting
from certificates import Certificates
from desks import due
from kubelend.apps import renewal
from kubelend.core.errors import Forbidden, Revoked
from kubelend.core.lifecycle import Role
from kubelend.kits import backoff
from kubelend.pki import authority, csr, files, identity, keys, x509
from kubelend.transports import tls
from kubelend.transports.client import BrokerClient
from waiting import PATIENCE

TIMEOUT = timedelta(seconds=PATIENCE)


class Scene:
    """A broker with an authority, in a process of its own, and those who call it."""

    def __init__(self, root, certificates, broker):
        self.root = root
        self.certificates = certificates
        self.broker = broker
        self.url = f"https://localhost:{broker.port}"

    def holder(self, name="a"):
        """A directory whose certificate has a tenth of its life left."""
        return shutil.copytree(due(self.certificates, name), self.root / f"live-{name}")

    def client(self, directory):
        return BrokerClient(self.url, directory, backoff=backoff.NO_RETRIES)

    def renewer(self, client, directory):
        return renewal.renewer_for(client, self.url, directory, TIMEOUT)

    async def renew(self, directory):
        async with self.client(directory) as client:
            renewed = await self.renewer(client, directory).renew(now(), force=True)
            assert renewed is not None
            await client.refresh()
            await client.version()
        return files.load_credentials(directory)


def now():
    return datetime.now(UTC)


@pytest.fixture
async def scene(tmp_path):
    certificates = Certificates(tmp_path / "certificates")
    certificates.authority.save(tmp_path / "ca")
    async with brokers.child(
        certificates,
        tmp_path,
        ca_path=str(tmp_path / "ca"),
        enrol_port="0",
        certificate_check_interval="10ms",
        http_cert_path=str(shutil.copytree(certificates.server(), tmp_path / "server")),
    ) as broker:
        yield Scene(tmp_path, certificates, broker)


async def test_a_client_that_lives_on_calls_with_its_new_certificate(scene):
    directory = scene.holder()
    old = tls.own_certificate(directory)
    async with scene.client(directory) as client:
        await client.version()
        renewed = await scene.renewer(client, directory).renew_if_due(now())
        assert renewed is not None
        assert await client.refresh()
        await client.version()
        assert await scene.renewer(client, directory).renew_if_due(now()) is None
    new = files.load_credentials(directory)
    assert new.certificate == renewed.certificate != old
    assert identity.caller_from_certificate(new.certificate) == identity.caller_from_certificate(
        old
    )
    assert x509.is_issued_by(new.certificate, scene.certificates.authority.certificate)


async def test_who_was_not_let_in_here_gets_no_longer_life_however_often_it_renews(scene):
    hour = timedelta(hours=1)
    profile = identity.client_profile("temp", Role.ADMIN)
    made = scene.certificates.write("temp", profile, at=now(), lifetime=hour)
    directory = shutil.copytree(made, scene.root / "live-temp")
    for _ in range(2):
        credentials = await scene.renew(directory)
        assert x509.lifetime_of(credentials.certificate) == hour
    async with scene.client(scene.certificates.admin("alice")) as admin:
        await admin.members.approve(Role.ADMIN, "temp")
    credentials = await scene.renew(directory)
    assert x509.lifetime_of(credentials.certificate) == timedelta(days=365)


async def test_nobody_renews_in_another_name(scene):
    request = csr.make_csr("root", Role.ADMIN, keys.generate(keys.Algorithm.P256))
    async with scene.client(scene.holder()) as client:
        with pytest.raises(Forbidden, match="not for cluster 'a'"):
            await client.certificates.renew(request)


async def test_many_renewers_of_one_directory_make_one_certificate(scene):
    directory = scene.holder()
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(scene.client(directory)) for _ in range(8)]
        renewers = [scene.renewer(client, directory) for client in clients]
        moment = now()
        done = await asyncio.gather(*(each.renew_if_due(moment) for each in renewers))
    (renewed,) = (each for each in done if each is not None)
    assert tls.own_certificate(directory) == renewed.certificate


async def test_holders_follow_a_new_authority_and_drop_the_old_one_when_all_have_moved(scene):
    directory, other = scene.holder("a"), scene.holder("b")
    first = scene.certificates.authority.certificate
    successor = authority.rotate_authority(scene.root / "ca", now=now())

    async def is_followed(each):
        found = await scene.renew(each)
        return x509.is_issued_by(found.certificate, successor.certificate)

    await waiting.until(lambda: is_followed(directory))
    moved = files.load_credentials(directory)
    assert set(moved.authorities) == {first, successor.certificate}
    async with scene.client(other) as client:
        await client.version()

    assert await is_followed(other)
    finished, dropped = authority.finish_rotation(scene.root / "ca")
    assert dropped == (first,)

    async def is_alone():
        return (await scene.renew(directory)).authorities == finished.trusted

    await waiting.until(is_alone)
    assert (await scene.renew(other)).authorities == (successor.certificate,)


async def test_who_was_revoked_gets_no_successor_and_keeps_its_files(scene):
    directory = scene.holder()
    before = files.load_credentials(directory).certificate
    async with scene.client(scene.certificates.admin("alice")) as admin:
        await admin.members.revoke(Role.CLUSTER, "a", release=False)
    async with scene.client(directory) as client:
        with pytest.raises(Revoked):
            await scene.renewer(client, directory).renew(now())
        assert await scene.renewer(client, directory).renew_if_due(now()) is None
    assert files.load_credentials(directory).certificate == before
