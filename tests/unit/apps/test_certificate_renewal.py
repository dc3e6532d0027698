"""Renewal of certificates: by a client through the broker, and by the agent in child processes."""

import asyncio
import json
import stat
import sys
from contextlib import asynccontextmanager
from datetime import timedelta

import msgspec
import pytest
from msgspec.structs import replace

import make
from certificates import Certificates
from issuers import Issuer, due
from kubelend.agent.health import ComponentHealth
from kubelend.apps import join
from kubelend.apps.agent_launcher import CERTIFICATE_COMPONENT, AgentCertificateRenewer
from kubelend.core.errors import BrokerUnreachable, InvalidSettings, UnexpectedResponse
from kubelend.core.lifecycle import Role
from kubelend.pki import files, identity
from kubelend.pki.authority import Authority
from kubelend.pki.keys import Algorithm
from kubelend.wire.admin_bodies import IssuedCertificate
from waiting import PATIENCE

NAMES = ("tls.crt", "tls.key", "ca.crt")


@pytest.fixture
def certificates(tmp_path):
    return Certificates(tmp_path)


@pytest.fixture
def now(certificates):
    return certificates.now


@pytest.fixture
def directory(certificates):
    return due(certificates)


@pytest.fixture
def issuer(certificates, now):
    return Issuer(certificates.authority, now)


@pytest.fixture
def renew(directory, issuer, now):
    """Renews at the present time, by the issuer by default."""

    async def renew(where=directory, request=None, verify=None, **flags):
        request, verify = request or issuer.issue, verify or issuer.verify
        return await join.renew(where, request, verify, now, **flags)

    return renew


def contents(directory):
    return {name: (directory / name).read_bytes() for name in NAMES}


def has_no_leftovers(directory):
    return sorted(path.name for path in directory.iterdir()) == sorted(NAMES)


# -- when


async def test_certificate_that_is_not_due_is_renewed_only_by_force(
    certificates, issuer, renew, now
):
    directory = certificates.cluster("a")
    before = contents(directory)
    assert await renew(directory) is None
    assert (issuer.requests, contents(directory)) == ([], before)
    assert await renew(directory, force=True) is not None


# -- how


@pytest.mark.parametrize("algorithm", list(Algorithm), ids=str)
async def test_new_certificate_has_a_new_key_of_the_same_algorithm_which_is_never_sent(
    certificates, issuer, now, renew, algorithm
):
    life, profile = timedelta(days=1), identity.client_profile("a")
    valid = {"at": now - 0.9 * life, "lifetime": life}
    directory = certificates.write("a", profile, algorithm=algorithm, **valid)
    old = files.load_credentials(directory)
    (directory / "tls.key").chmod(0o640)
    renewed = await renew(directory)
    new = files.load_credentials(directory)
    assert renewed is not None
    assert new.certificate == renewed.certificate
    before, after = map(identity.caller_from_certificate, (old.certificate, new.certificate))
    assert before == after
    assert type(new.key) is type(old.key)
    assert new.key.public_key() != old.key.public_key()
    assert new.certificate.not_valid_after_utc > now + timedelta(days=364)
    assert stat.S_IMODE((directory / "tls.key").stat().st_mode) == 0o640
    (request,) = issuer.requests
    assert "PRIVATE" not in request
    assert request.count("-----BEGIN ") == 1


async def test_trusted_authorities_follow_the_broker(certificates, directory, issuer, renew, now):
    other = Authority.create("other", now=now).certificate
    issuer.authority = replace(certificates.authority, trusted=(*issuer.authority.trusted, other))
    assert await renew()
    assert files.load_credentials(directory).authorities == issuer.authority.trusted
    issuer.authority = certificates.authority
    await renew(force=True)
    assert files.load_credentials(directory).authorities == certificates.authority.trusted


async def test_new_files_are_verified_with_a_call_before_they_are_installed(directory, renew):
    before, seen = contents(directory), []

    async def verify(staged):
        seen.append((contents(directory) == before, files.load_credentials(staged).certificate))

    renewed = await renew(verify=verify)
    assert renewed is not None
    assert seen == [(True, renewed.certificate)]


# -- what is not installed


def another_name(issuer):
    issuer.name = "mallory"


def another_role(issuer):
    issuer.role = Role.ADMIN


def another_authority(issuer):
    other = Authority.create("other", now=issuer.now)
    issuer.authority = msgspec.structs.replace(other, trusted=issuer.authority.trusted)


def expired(issuer):
    issuer.now, issuer.lifetime = issuer.now - timedelta(days=2), timedelta(days=1)


def answering(change):
    def spoil(issuer):
        issue = issuer.issue

        async def spoilt(request):
            return change(await issue(request), issuer)

        issuer.issue = spoilt

    return spoil


def for_another_key(answer, issuer):
    other = issuer.authority.issue(identity.client_profile("a"), now=issuer.now)
    return IssuedCertificate(files.to_pem([other.certificate]).decode(), answer.authorities)


def no_certificate(answer, _):
    return IssuedCertificate("", answer.authorities)


def no_authority(answer, _):
    return IssuedCertificate(answer.certificate, "nonsense")


def half_a_certificate(answer, _):
    return IssuedCertificate(answer.certificate[:300], "")


@pytest.mark.parametrize(
    "spoil, problem",
    [
        (another_name, "is for cluster mallory, not for cluster a"),
        (another_role, "is for admin a, not for cluster a"),
        (another_authority, "not signed by any of the broker's authorities"),
        (expired, "has already expired"),
        (answering(for_another_key), "is for another key"),
        (answering(no_certificate), "contains no certificate"),
        (answering(no_authority), "contains no certificate"),
        (answering(half_a_certificate), "contains no certificate"),
    ],
    ids=["name", "role", "authority", "expired", "key", "empty", "no authority", "half"],
)
async def test_unexpected_certificate_is_not_installed(directory, issuer, renew, spoil, problem):
    spoil(issuer)
    before = contents(directory)
    with pytest.raises(UnexpectedResponse, match=problem):
        await renew()
    assert contents(directory) == before
    assert issuer.verified == []


@pytest.mark.parametrize("step", ["request", "verify"])
async def test_renewal_that_fails_installs_nothing_and_leaves_nothing(directory, renew, step):
    async def fail(_):
        raise BrokerUnreachable("not with these")

    before = contents(directory)
    with pytest.raises(BrokerUnreachable):
        await renew(**{step: fail})
    assert contents(directory) == before
    assert has_no_leftovers(directory)


async def test_cancelled_renewal_leaves_no_trace(directory, renew):
    begun = asyncio.Event()

    async def verify(_):
        begun.set()
        await asyncio.Event().wait()

    renewing = asyncio.create_task(renew(verify=verify))
    await begun.wait()
    renewing.cancel()
    await asyncio.wait([renewing])
    assert has_no_leftovers(directory)
    assert await renew()


async def test_only_one_process_at_a_time_renews(directory, issuer, renew):
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(request):
        begun.set()
        await go_on.wait()
        return await issuer.issue(request)

    renewing = asyncio.create_task(renew(request=slowly))
    await begun.wait()
    assert await renew(force=True) is None
    go_on.set()
    assert await renewing is not None
    assert await renew() is None
    assert len(issuer.requests) == 1


async def test_mounted_secret_is_not_renewed(directory, issuer, renew, tmp_path):
    mount = tmp_path / "mount"
    mount.mkdir()
    (mount / "..data").symlink_to(directory)
    for name in NAMES:
        (mount / name).symlink_to(f"..data/{name}")
    with pytest.raises(InvalidSettings, match="renew the files with the tool that manages them"):
        await renew(mount)
    assert issuer.requests == []


@pytest.mark.parametrize("name", NAMES)
async def test_unusable_file_is_an_error(directory, issuer, renew, name):
    (directory / name).write_bytes(b"nonsense")
    with pytest.raises(InvalidSettings, match=name):
        await renew()
    assert issuer.requests == []


# -- the agent, in child processes

LATER = make.T0 + timedelta(days=200)
SHOWN = json.dumps({"name": "berlin", "renewAt": LATER.isoformat()})


class ReportedHealth(ComponentHealth):
    """Signals the first report."""

    def __init__(self):
        super().__init__()
        self.reported = asyncio.Event()

    def report(self, component, error="", **details):
        assert component == CERTIFICATE_COMPONENT
        super().report(component, error, **details)
        self.reported.set()


class FakeInterpreter:
    """Records the command that it is started with, and responds as set."""

    def __init__(self, directory, monkeypatch):
        self.directory = directory
        self.commands = directory / "commands"
        self.script = directory / "python"
        monkeypatch.setattr(sys, "executable", str(self.script))
        self.respond(f"echo '{SHOWN}'")
        (directory / "tls.crt").write_text("a certificate")

    def respond(self, command):
        self.script.write_text(f'#!/bin/sh\necho "$4" >> {self.commands}\n{command}\n')
        self.script.chmod(0o755)

    @property
    def started(self):
        return self.commands.read_text().split() if self.commands.exists() else []


@pytest.fixture
def interpreter(tmp_path, monkeypatch):
    return FakeInterpreter(tmp_path, monkeypatch)


@asynccontextmanager
async def renewing(interpreter, renew_at=None):
    health = ReportedHealth()
    renewer = AgentCertificateRenewer(
        interpreter.directory, "https://localhost:1", health, lambda: make.T0, renew_at
    )
    task = asyncio.create_task(renewer.run())
    try:
        async with asyncio.timeout(PATIENCE):
            await health.reported.wait()
        yield health
        assert not task.done()
    finally:
        task.cancel()


@pytest.mark.parametrize(
    "renew_at, started",
    [
        pytest.param(LATER, [], id="not due"),
        pytest.param(None, ["show"], id="unknown"),
        pytest.param(make.T0, ["renew", "show"], id="due"),
    ],
)
async def test_agent_starts_a_child_process_only_when_it_has_to(interpreter, renew_at, started):
    async with renewing(interpreter, renew_at) as health:
        assert health.not_ready_reason == ""
    assert interpreter.started == started


@pytest.mark.parametrize(
    "command, problem",
    [
        ("echo 'error: the broker is away' >&2; exit 6", "show` failed: error: the broker is away"),
        ("echo nonsense", "certificate show`: JSON is malformed"),
        ("", "cannot be run: No such file"),
    ],
    ids=["failed", "unreadable", "not started"],
)
async def test_agent_reports_the_error_of_a_child_process_and_retries(
    interpreter, command, problem
):
    interpreter.respond(command)
    if not command:
        interpreter.script.unlink()
    async with renewing(interpreter) as health:
        assert problem in health.not_ready_reason
