"""Certificates that renew themselves: when, how, and what is left alone if something is wrong."""

import asyncio
import itertools
import stat
from datetime import timedelta

import msgspec
import pytest
from structlog.testing import capture_logs

from certificates import Certificates
from desks import Desk, due
from kubelend.apps.renewal import CHECK_INTERVAL, Renewer
from kubelend.core.errors import (
    BrokerUnreachable,
    InvalidSettings,
    KubelendError,
    NotFound,
    UnexpectedAnswer,
)
from kubelend.core.lifecycle import Role
from kubelend.pki import files, identity
from kubelend.pki.authority import Authority
from kubelend.pki.keys import Algorithm
from kubelend.transports import tls
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
def desk(certificates):
    return Desk(certificates.authority, certificates.now)


@pytest.fixture
def renewer(directory, desk):
    return Renewer(directory, desk.ask, desk.prove)


def contents(directory):
    return {name: (directory / name).read_bytes() for name in NAMES}


def events(logged):
    return [(line["log_level"], line["event"]) for line in logged]


# -- when


def test_it_is_time_with_20_to_25_percent_of_life_left_at_random(certificates, desk, now):
    life = timedelta(days=100)
    parts = []
    for number in range(50):
        profile = identity.client_profile(f"c{number}")
        directory = certificates.write(f"c{number}", profile, at=now, lifetime=life)
        renewer = Renewer(directory, desk.ask, desk.prove)
        assert renewer.renew_at() == Renewer(directory, desk.ask, desk.prove).renew_at()
        assert not renewer.is_due(now + 0.749 * life)
        assert renewer.is_due(now + 0.801 * life)
        parts.append((tls.certificate_expiry(directory) - renewer.renew_at()) / life)
    assert 0.199 < min(parts) < 0.21
    assert 0.24 < max(parts) < 0.251


async def test_before_its_time_nothing_is_asked(certificates, desk, now):
    directory = certificates.cluster("a")
    renewer = Renewer(directory, desk.ask, desk.prove)
    before = contents(directory)
    assert await renewer.renew_if_due(now) is None
    assert await renewer.renew(now) is None
    assert (desk.asked, contents(directory)) == ([], before)


async def test_it_can_be_forced(certificates, desk, now):
    renewer = Renewer(certificates.cluster("a"), desk.ask, desk.prove)
    assert await renewer.renew(now, force=True) is not None


# -- how


@pytest.mark.parametrize("algorithm", list(Algorithm), ids=str)
async def test_the_successor_has_a_new_key_of_the_same_kind_and_the_same_name(
    certificates, desk, now, algorithm
):
    life = timedelta(days=1)
    begun = now - 0.9 * life
    directory = certificates.write(
        "a", identity.client_profile("a"), at=begun, lifetime=life, algorithm=algorithm
    )
    old = files.load_credentials(directory)
    renewed = await Renewer(directory, desk.ask, desk.prove).renew_if_due(now)
    new = files.load_credentials(directory)
    assert renewed is not None
    assert new.certificate == renewed.certificate
    assert identity.caller_from_certificate(new.certificate) == identity.caller_from_certificate(
        old.certificate
    )
    assert type(new.key) is type(old.key)
    assert new.key.public_key() != old.key.public_key()
    assert new.certificate.not_valid_after_utc > now + timedelta(days=364)


@pytest.mark.parametrize("role", [Role.CLUSTER, Role.VIEWER, Role.ADMIN], ids=str)
async def test_every_role_renews(certificates, desk, now, role):
    directory = certificates.write("x", identity.client_profile("x", role))
    desk.name, desk.role = "x", role
    renewed = await Renewer(directory, desk.ask, desk.prove).renew(now, force=True)
    assert renewed is not None
    assert identity.caller_from_certificate(renewed.certificate).role is role


async def test_the_key_is_never_sent(directory, desk, renewer, now):
    await renewer.renew_if_due(now)
    (request,) = desk.asked
    assert "PRIVATE" not in request
    assert request.count("-----BEGIN ") == 1


async def test_modes_stay_as_they_were(directory, renewer, now):
    (directory / "tls.key").chmod(0o640)
    assert await renewer.renew_if_due(now)
    assert stat.S_IMODE((directory / "tls.key").stat().st_mode) == 0o640


async def test_the_authorities_are_taken_as_the_broker_says(certificates, directory, desk, now):
    desk.authority = certificates.authority.successor(now=now)
    renewed = await Renewer(directory, desk.ask, desk.prove).renew_if_due(now)
    new = files.load_credentials(directory)
    assert renewed is not None
    assert new.authorities == desk.authority.trusted
    assert len(new.authorities) == 2
    assert new.chain == desk.authority.chain != ()
    desk.authority = desk.authority.without_predecessor()
    await Renewer(directory, desk.ask, desk.prove).renew(now, force=True)
    assert files.load_credentials(directory).authorities == desk.authority.trusted
    assert len(desk.authority.trusted) == 1


async def test_the_broker_is_reached_with_the_new_files_before_anybody_else_sees_them(
    directory, desk, now
):
    before, seen = contents(directory), []

    async def prove(staged):
        seen.append((contents(directory) == before, files.load_credentials(staged).certificate))

    renewed = await Renewer(directory, desk.ask, prove).renew_if_due(now)
    assert renewed is not None
    assert seen == [(True, renewed.certificate)]


# -- what is not taken


def another_name(desk):
    desk.name = "mallory"


def another_role(desk):
    desk.role = Role.ADMIN


def another_authority(desk):
    other = Authority.create("other", now=desk.now)
    desk.authority = msgspec.structs.replace(other, trusted=desk.authority.trusted)


def one_that_has_ended(desk):
    desk.now, desk.lifetime = desk.now - timedelta(days=2), timedelta(days=1)


def answering(change):
    def spoil(desk):
        ask = desk.ask

        async def spoilt(request):
            return change(await ask(request), desk)

        desk.ask = spoilt

    return spoil


def for_another_key(answer, desk):
    other = desk.authority.issue(identity.client_profile("a"), now=desk.now)
    return IssuedCertificate(files.to_pem([other.certificate]).decode(), answer.authorities)


SPOILT = {
    "another name": (another_name, "is for cluster mallory, not for cluster a"),
    "another role": (another_role, "is for admin a, not for cluster a"),
    "another authority": (another_authority, "not signed by any of the broker's authorities"),
    "ended": (one_that_has_ended, "has already expired"),
    "another key": (answering(for_another_key), "is for another key"),
    "no certificate": (
        answering(lambda answer, _: IssuedCertificate("", answer.authorities)),
        "contains no certificate",
    ),
    "no authority": (
        answering(lambda answer, _: IssuedCertificate(answer.certificate, "nonsense")),
        "contains no certificate",
    ),
    "a certificate cut in half": (
        answering(lambda answer, _: IssuedCertificate(answer.certificate[:300], "")),
        "contains no certificate",
    ),
}


@pytest.mark.parametrize("spoil,complaint", SPOILT.values(), ids=SPOILT.keys())
async def test_an_answer_that_was_not_asked_for_changes_nothing(
    directory, desk, now, spoil, complaint
):
    spoil(desk)
    before = contents(directory)
    renewer = Renewer(directory, desk.ask, desk.prove)
    with pytest.raises(UnexpectedAnswer, match=complaint):
        await renewer.renew(now)
    assert await renewer.renew_if_due(now) is None
    assert contents(directory) == before
    assert desk.proven == []


async def test_files_with_which_the_broker_is_not_reached_are_dropped(directory, desk, now):
    async def prove(_):
        raise BrokerUnreachable("not with these")

    before = contents(directory)
    renewer = Renewer(directory, desk.ask, prove)
    with pytest.raises(BrokerUnreachable):
        await renewer.renew(now)
    assert contents(directory) == before
    assert sorted(path.name for path in directory.iterdir()) == sorted(NAMES)


async def test_a_renewal_that_is_given_up_leaves_no_trace(directory, desk, now):
    begun = asyncio.Event()

    async def prove(_):
        begun.set()
        await asyncio.Event().wait()

    renewing = asyncio.create_task(Renewer(directory, desk.ask, prove).renew(now))
    await begun.wait()
    renewing.cancel()
    await asyncio.wait([renewing])
    assert sorted(path.name for path in directory.iterdir()) == sorted(NAMES)
    assert await Renewer(directory, desk.ask, desk.prove).renew(now)


# -- again, and one at a time


class Broken:
    """A broker that does not answer, until it is mended."""

    error: KubelendError | None = NotFound("no such route")

    def __init__(self, desk):
        self.desk = desk
        self.asked = 0

    async def ask(self, request):
        self.asked += 1
        if self.error is not None:
            raise self.error
        return await self.desk.ask(request)


async def test_a_failure_is_logged_once_and_tried_again_later_and_later(directory, desk, now):
    broken = Broken(desk)
    renewer = Renewer(directory, broken.ask, desk.prove)
    tried = []
    with capture_logs() as logged:
        for second in range(3600):
            moment = now + timedelta(seconds=second)
            before = broken.asked
            assert await renewer.renew_if_due(moment) is None
            tried += [second] if broken.asked > before else []
        broken.error = BrokerUnreachable("gone")
        assert await renewer.renew_if_due(now + timedelta(hours=2)) is None
        broken.error = None
        assert await renewer.renew_if_due(now + timedelta(hours=3)) is not None
    pauses = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert 4 <= len(pauses) <= 12
    assert max(pauses[:2]) < 30
    assert pauses[-1] > 300
    assert events(logged) == [
        ("warning", "Certificate renewal failed, will retry"),
        ("warning", "Certificate renewal failed, will retry"),
        ("info", "Certificate renewed"),
    ]


async def test_a_short_life_is_not_slept_away(certificates, desk, now):
    life = timedelta(seconds=60)
    begun = now - 0.9 * life
    directory = certificates.write("a", identity.client_profile("a"), at=begun, lifetime=life)
    broken = Broken(desk)
    renewer = Renewer(directory, broken.ask, desk.prove)
    for tenth in range(50):
        await renewer.renew_if_due(now + timedelta(seconds=tenth / 10))
    assert broken.asked >= 4


async def test_of_two_at_once_one_renews_and_the_other_lets_it(directory, desk, now):
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(request):
        begun.set()
        await go_on.wait()
        return await desk.ask(request)

    first, second = (Renewer(directory, ask, desk.prove) for ask in (slowly, desk.ask))
    renewing = asyncio.create_task(first.renew_if_due(now))
    await begun.wait()
    with capture_logs() as logged:
        assert await second.renew_if_due(now) is None
    assert logged == []
    go_on.set()
    assert await renewing is not None
    # What it found when its turn came: nothing left to do.
    assert await second.renew_if_due(now + CHECK_INTERVAL) is None
    assert len(desk.asked) == 1


async def test_a_mounted_secret_is_left_alone_and_that_is_said_once(directory, desk, now, tmp_path):
    mount = tmp_path / "mount"
    mount.mkdir()
    (mount / "..data").symlink_to(directory)
    for name in NAMES:
        (mount / name).symlink_to(f"..data/{name}")
    renewer = Renewer(mount, desk.ask, desk.prove)
    with capture_logs() as logged:
        for hour in range(3):
            assert await renewer.renew_if_due(now + hour * CHECK_INTERVAL) is None
    assert events(logged) == [("info", "Certificate is managed externally, not renewing it")]
    assert desk.asked == []
    with pytest.raises(InvalidSettings, match="renew the files with the tool that manages them"):
        await renewer.renew(now)


@pytest.mark.parametrize("name", NAMES)
async def test_files_that_cannot_be_used_are_no_reason_to_stop(directory, renewer, now, name):
    (directory / name).write_bytes(b"nonsense")
    with capture_logs() as logged:
        assert await renewer.renew_if_due(now) is None
    assert events(logged) == [("warning", "Certificate renewal failed, will retry")]


async def test_a_process_that_lives_long_does_it_by_itself(directory, desk, now):
    proven = asyncio.Event()

    async def prove(_):
        proven.set()

    running = asyncio.create_task(Renewer(directory, desk.ask, prove, lambda: now).run())
    await asyncio.wait_for(proven.wait(), PATIENCE)
    running.cancel()
    await asyncio.wait([running])
    assert len(desk.asked) == 1
