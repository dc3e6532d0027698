"""Certificates that change at run time: new handshakes use them, running calls and streams lose nothing."""

import asyncio
import contextlib
import shutil
import ssl
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
import uvloop
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

import brokers
import make
import tls_peers
import waiting
from certificates import Certificates
from kubelend.core.errors import BrokerUnreachable, Forbidden, InvalidSettings
from kubelend.kits import backoff
from kubelend.kits.files import AtomicDirectory
from kubelend.pki import files, identity
from kubelend.pki.identity import BROKER_NAME, Profile
from kubelend.transports import tls
from kubelend.transports.client import BrokerClient
from kubelend.wire import bodies
from scripted_broker import ScriptedBroker, body, events, hang_up, problem

HOSTS = pytest.mark.parametrize("host", ["localhost", "127.0.0.1"], ids=["with SNI", "without SNI"])
NAMES = ("tls.crt", "tls.key", "ca.crt")


def put(directory, source, *names):
    """Bring files in as a writer does who does not rename: in place."""
    for name in names or NAMES:
        (directory / name).write_bytes((source / name).read_bytes())


class Scene:
    """A broker's directory, the context that follows it, and two authorities with a client each."""

    def __init__(self, root):
        self.old = Certificates(root / "old", authority="same-name")
        self.new = Certificates(root / "new", authority="same-name")
        self.directory = root / "live"
        shutil.copytree(self.old.server(), self.directory)
        self.reports: list[InvalidSettings] = []
        self.reloading = tls.ReloadingServerContext(self.directory, report=self.reports.append)
        self.old_client = trusting_both(self.old.cluster("old-cluster"), self)
        self.new_client = trusting_both(self.new.cluster("new-cluster"), self)

    def put(self, source, *names):
        put(self.directory, source, *names)


def trusting_both(directory, scene):
    """A client that takes either server, so that a refusal can only be the server's."""
    context = tls.client_context(directory)
    context.load_verify_locations(scene.old.server() / "ca.crt")
    context.load_verify_locations(scene.new.server() / "ca.crt")
    return context


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request):
    """Run a coroutine to its end on one loop or the other."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run


@HOSTS
def test_new_handshakes_see_the_new_certificate_and_authority_while_a_connection_goes_on(
    scene, run, host
):
    async def story():
        async with contextlib.AsyncExitStack() as stack:
            port = await stack.enter_async_context(tls_peers.serving(scene.reloading.context))
            opened = tls_peers.connected(port, scene.old_client, host)
            before = await stack.enter_async_context(opened)
            assert await before.ask() == "old-cluster"
            assert before.serial == tls_peers.serial_in(scene.old.server())
            assert await tls_peers.name_of(port, scene.new_client, host) == ""

            scene.put(scene.new.server())
            assert await tls_peers.name_of(port, scene.old_client, host) == "old-cluster"
            assert scene.reloading.refresh() is True

            assert await tls_peers.name_of(port, scene.old_client, host) == ""
            opened = tls_peers.connected(port, scene.new_client, host)
            after = await stack.enter_async_context(opened)
            assert await after.ask() == "new-cluster"
            assert after.serial == tls_peers.serial_in(scene.new.server())
            assert await before.ask() == "old-cluster"

    run(story())
    assert scene.reports == []


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=str)
def test_a_session_of_an_authority_no_longer_trusted_is_not_resumed(scene, version):
    scene.old_client.minimum_version = scene.old_client.maximum_version = version
    first = tls_peers.shake_hands(scene.reloading.context, scene.old_client)
    assert first.caller == "old-cluster"

    scene.put(scene.new.server())
    assert scene.reloading.refresh()
    again = tls_peers.shake_hands(scene.reloading.context, scene.old_client, session=first.session)
    assert again.caller == ""
    assert "certificate verify failed" in again.server_error


def half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


NO_PAIR = "not a certificate and unencrypted key"
DAMAGES = {
    "half a certificate": (lambda scene: half(scene.directory / "tls.crt"), NO_PAIR),
    "half a key": (lambda scene: half(scene.directory / "tls.key"), NO_PAIR),
    "half an authority": (lambda scene: half(scene.directory / "ca.crt"), "not a complete"),
    "empty key": (lambda scene: (scene.directory / "tls.key").write_bytes(b""), "key is empty"),
    "no authority": (lambda scene: (scene.directory / "ca.crt").unlink(), "ca.crt is missing"),
    "new certificate": (lambda scene: scene.put(scene.new.server(), "tls.crt"), "do not match"),
    "new key": (lambda scene: scene.put(scene.new.server(), "tls.key"), "do not match"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_files_that_make_no_whole_keep_the_old_certificate_and_are_reported_once(scene, kind):
    damage, complaint = DAMAGES[kind]

    def caller(client):
        return tls_peers.shake_hands(scene.reloading.context, client).caller

    damage(scene)
    assert [scene.reloading.refresh() for _ in range(3)] == [False, False, False]
    assert len(scene.reports) == 1
    assert complaint in scene.reports[0].message
    assert str(scene.directory) in scene.reports[0].message
    assert caller(scene.old_client) == "old-cluster"

    # The same fault is reported again after it was mended.
    scene.put(scene.old.server())
    assert [scene.reloading.refresh() for _ in range(3)] == [True, False, False]
    damage(scene)
    assert not scene.reloading.refresh()
    assert len(scene.reports) == 2
    scene.put(scene.new.server())
    assert scene.reloading.refresh() is True
    assert caller(scene.new_client) == "new-cluster"


def test_a_file_that_grows_in_steps_is_reported_once(scene):
    whole = (scene.new.server() / "tls.crt").read_bytes()
    for length in (100, 200, 300):
        (scene.directory / "tls.crt").write_bytes(whole[:length])
        assert not scene.reloading.refresh()
    assert len(scene.reports) == 1


def test_kubernetes_exchanging_the_link_behind_a_mounted_secret_is_seen(scene, tmp_path):
    mount = tmp_path / "mount"
    mount.mkdir()
    shutil.copytree(scene.old.server(), mount / "..2025_first")
    shutil.copytree(scene.new.server(), mount / "..2025_second")
    (mount / "..data").symlink_to("..2025_first")
    for name in NAMES:
        (mount / name).symlink_to(f"..data/{name}")
    reloading = tls.ReloadingServerContext(mount, report=scene.reports.append)
    assert reloading.refresh() is False

    (mount / "..data_tmp").symlink_to("..2025_second")
    (mount / "..data_tmp").rename(mount / "..data")

    assert reloading.refresh() is True
    assert tls_peers.shake_hands(reloading.context, scene.new_client).caller == "new-cluster"
    assert scene.reports == []


# -- a broker


class Live:
    """A broker's directory whose certificate a test exchanges."""

    def __init__(self, root):
        self.certificates = Certificates(root / "certificates")
        self.directory = shutil.copytree(self.certificates.server(), root / "live")

    def rename(self, name):
        """A certificate of the same authority, with this common name."""
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = (x509.DNSName("localhost"),)
        profile = Profile(subject, ExtendedKeyUsageOID.SERVER_AUTH, names)
        put(self.directory, self.certificates.write(f"server-{name}", profile))


@pytest.fixture
def live(tmp_path):
    return Live(tmp_path)


@pytest.fixture
async def following(live):
    """A broker that follows the files of its directory."""
    files = {"http_cert_path": live.directory, "certificate_check_interval": make.SECOND / 100}
    async with brokers.running(live.certificates, **files) as broker:
        yield broker


async def serial_shown(caller):
    """The serial number of the certificate that a new connection sees."""
    async with tls_peers.connected(caller.port, caller.context, "localhost") as connection:
        return connection.serial


async def reloaded(log, times=1):
    await waiting.until(lambda: len(log.lines("Certificates reloaded")) >= times)


async def test_new_connections_see_the_new_certificate_and_open_ones_go_on(following, live, log):
    a = following.cluster("a")
    async with a.stream() as stream:
        await stream.event()
        before = await serial_shown(a)
        live.rename("another-broker")
        await reloaded(log)
        assert await serial_shown(a) == tls_peers.serial_in(live.directory) != before
        await a.advertise()
        made = await following.cluster("r").reserve()
        assert (await stream.event()).instruction == ("provider", "Hold", made["id"])


async def test_names_of_the_broker_follow_its_certificate(following, live, log):
    """Whoever holds the present certificate's name is no cluster; who held the old one may be."""
    applicant = following.cluster("another-broker")
    assert (await applicant.get("version")).status == 200
    live.rename("another-broker")
    await reloaded(log)
    assert (await applicant.get("version")).refusal == (403, "InvalidIdentity")
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, BROKER_NAME)])
    profile = Profile(subject, ExtendedKeyUsageOID.CLIENT_AUTH)
    old = following.holder(live.certificates.write("old-name", profile))
    assert (await old.get("version")).status == 200


async def test_files_that_do_not_fit_are_reported_once_and_the_old_ones_stay(following, live, log):
    broken = live.directory / "ca.crt"
    good = broken.read_bytes()
    broken.write_bytes(b"nonsense")
    problem = "Certificate reload failed, keeping the previous ones"
    await waiting.until(lambda: bool(log.lines(problem)))
    assert (await following.cluster("a").get("version")).status == 200
    assert "ca.crt" in log.lines(problem)[0]["error"]
    broken.write_bytes(good)
    await reloaded(log)
    assert len(log.lines(problem)) == 1
    assert (await following.cluster("b").get("version")).status == 200


# -- a client

VERSION = body(bodies.Version("1"))
SOON, LATER = timedelta(milliseconds=5), timedelta(hours=1)


class Holder:
    """A cluster's directory whose certificate a test exchanges while the client lives."""

    def __init__(self, root, certificates, name="a"):
        self.certificates = certificates
        self.name = name
        self.directory = shutil.copytree(certificates.cluster(name), root / f"live-{name}")
        self.reports: list[InvalidSettings] = []

    @property
    def serial(self):
        return tls_peers.serial_in(self.directory)

    def issue(self):
        """A new certificate of the same authority, nowhere yet."""
        profile = identity.client_profile(self.name)
        return self.certificates.authority.issue(profile, now=self.certificates.now)

    def renew(self):
        """As `kubelend ca issue --overwrite` does it: one file after the other."""
        files.save_credentials(self.directory, self.issue(), overwrite=True)

    def client(self, url, check_every=SOON):
        looks = {"check_every": check_every, "report": self.reports.append}
        return BrokerClient(url, self.directory, backoff=backoff.NO_RETRIES, **looks)


@pytest.fixture
def holder(tmp_path):
    return Holder(tmp_path, Certificates(tmp_path / "certificates"))


@pytest.fixture
async def scripted(holder):
    async with ScriptedBroker(holder.certificates.server()) as broker:
        yield broker


@pytest.fixture
def answering(scripted):
    scripted.responses.append(VERSION)
    return scripted


async def test_calls_that_have_begun_finish_over_the_connection_they_have(holder, answering):
    finish = asyncio.Event()

    async def slowly(request):
        await finish.wait()
        return await VERSION(request)

    answering.responses[:] = [slowly, VERSION]
    old = holder.serial
    async with holder.client(answering.url) as client:
        begun = asyncio.create_task(client.version())
        await waiting.until(lambda: len(answering.seen) == 1)
        holder.renew()
        await asyncio.sleep(SOON.total_seconds())
        await client.version()
        assert not begun.done()
        assert answering.open_connections == 2
        finish.set()
        assert await begun == bodies.Version("1")
        assert [seen.serial for seen in answering.seen] == [old, holder.serial]
        await waiting.until(lambda: answering.open_connections == 1)


async def test_files_are_not_looked_at_for_each_call_and_then_idle_connections_are_closed(
    holder, answering
):
    old = holder.serial
    async with holder.client(answering.url, LATER) as client:
        await client.version()
        holder.renew()
        await client.version()
        assert {seen.serial for seen in answering.seen} == {old}
        assert await client.refresh() is True
        await waiting.until(lambda: answering.open_connections == 0)
        await client.version()
        assert answering.seen[-1].serial == holder.serial
        assert len(answering.connections) == 2
        assert await client.refresh() is False


@pytest.mark.parametrize(
    "failures",
    [[hang_up, hang_up], [problem(Forbidden("has ended"))]],
    ids=["cut off, twice as the HTTP library itself tries again", "refused"],
)
async def test_a_call_that_fails_looks_at_them_and_goes_on_with_the_new(
    holder, answering, failures
):
    async with holder.client(answering.url, LATER) as client:
        await client.version()
        holder.renew()
        answering.responses[:] = [*failures, VERSION]
        await client.version()
    assert answering.seen[-1].serial == holder.serial


async def test_a_call_that_must_not_be_repeated_is_not(holder, answering):
    async with holder.client(answering.url, LATER) as client:
        holder.renew()
        answering.responses[:] = [hang_up, VERSION]
        with pytest.raises(BrokerUnreachable):
            await client.drain("x")
        assert len(answering.seen) == 1
        await client.version()
    assert answering.seen[-1].serial == holder.serial


@pytest.mark.parametrize("first", ["tls.crt", "tls.key"])
async def test_a_pair_caught_in_the_middle_leaves_the_old_one_in_use(
    holder, answering, tmp_path, first
):
    old = holder.serial
    files.save_credentials(tmp_path / "next", holder.issue())
    (second,) = {"tls.crt", "tls.key"} - {first}
    async with holder.client(answering.url) as client:
        put(holder.directory, tmp_path / "next", first)
        for _ in range(3):
            assert await client.refresh() is False
            await client.version()
        assert {seen.serial for seen in answering.seen} == {old}
        assert ["do not match" in str(report) for report in holder.reports] == [True]
        put(holder.directory, tmp_path / "next", second)
        assert await client.refresh() is True
        await client.version()
    assert answering.seen[-1].serial == tls_peers.serial_in(tmp_path / "next")


async def test_new_files_that_do_not_fit_the_broker_are_said_to_be_the_reason(
    holder, answering, tmp_path
):
    other = Certificates(tmp_path / "other", authority="other")
    async with holder.client(answering.url) as client:
        await client.version()
        for source, names, reason in (
            (holder.certificates.stranger("a"), NAMES[:2], r"it may not accept .*tls\.crt"),
            (other.cluster("a"), NAMES[2:], "not signed by a CA"),
        ):
            put(holder.directory, source, *names)
            assert await client.refresh()
            with pytest.raises(BrokerUnreachable, match=reason):
                await client.version()


async def test_a_broker_of_a_new_authority_is_trusted_once_its_certificate_is_there(
    holder, tmp_path
):
    other = Certificates(tmp_path / "other", authority="other")
    server = shutil.copytree(other.server(), tmp_path / "server")
    both = [*other.authority.trusted, *holder.certificates.authority.trusted]
    (server / "ca.crt").write_bytes(files.to_pem(both))
    async with ScriptedBroker(server) as answering, holder.client(answering.url, LATER) as client:
        answering.responses.append(VERSION)
        with pytest.raises(BrokerUnreachable, match="not signed by a CA"):
            await client.version()
        (holder.directory / "ca.crt").write_bytes(files.to_pem(both))
        # The failure itself makes it look: nobody waits an hour.
        await client.version()


async def test_a_client_that_starts_in_the_middle_of_an_exchange_reads_again(
    holder, answering, tmp_path
):
    """Starts beside a writer that never rests, but exchanges all files at once."""
    generations, stop = AtomicDirectory(holder.directory, NAMES), asyncio.Event()
    files.save_credentials(tmp_path / "next", holder.issue())
    pairs = [
        {name: (directory / name).read_bytes() for name in NAMES}
        for directory in (holder.directory, tmp_path / "next")
    ]

    def exchange():
        while not stop.is_set():
            for pair in pairs:
                generations.switch_to(generations.stage(pair))

    writing = asyncio.create_task(asyncio.to_thread(exchange))
    try:
        for _ in range(100):
            async with holder.client(answering.url):
                await asyncio.sleep(0)
    finally:
        stop.set()
        await writing


RESERVATION = bodies.Reservation(
    "rsv-a-1",
    "a",
    "b",
    bodies.Quantities("1", "1Gi"),
    bodies.ReservationStatus("Reserved", "Locked"),
    datetime(2026, 1, 1, tzinfo=UTC),
)


def event(revision):
    instruction = bodies.Instruction(revision, "provider", "Hold", "Hold it", RESERVATION)
    data = msgspec.json.encode(instruction)
    return b"id: %d\nevent: instruction\ndata: %s\n\n" % (revision, data)


@pytest.mark.parametrize(
    "sent, read, rest, resumed_after",
    [
        pytest.param(event(1) + event(2), 2, [3], "2", id="silent"),
        pytest.param(event(1) + event(2), 1, [2, 3], "2", id="received and not yet read"),
        pytest.param(event(1) + event(2)[:-10], 1, [2], "1", id="half an event"),
    ],
)
async def test_a_stream_moves_to_the_new_certificate_and_neither_loses_nor_repeats(
    holder, scripted, sent, read, rest, resumed_after
):
    """Without a single retry: a new certificate is no failure."""
    old = holder.serial
    scripted.responses += [events(sent, stay=True), events(event(rest[-1]), stay=True)]
    async with (
        holder.client(scripted.url) as client,
        contextlib.aclosing(client.stream()) as stream,
    ):
        assert [(await anext(stream)).revision for _ in range(read)] == [1, 2][:read]
        holder.renew()
        if len(rest) > 1:
            await client.refresh()
        assert [(await anext(stream)).revision for _ in rest] == rest
        assert [seen.serial for seen in scripted.seen] == [old, holder.serial]
        assert scripted.seen[1].headers["Last-Event-ID"] == resumed_after
        await waiting.until(lambda: scripted.open_connections == 1)


async def test_a_stream_that_is_left_gives_its_old_connection_back(holder, scripted):
    scripted.responses.append(events(event(1), stay=True))
    async with holder.client(scripted.url, LATER) as client:
        async with contextlib.aclosing(client.stream()) as stream:
            await anext(stream)
            holder.renew()
            assert await client.refresh()
        await waiting.until(lambda: scripted.open_connections == 0)
