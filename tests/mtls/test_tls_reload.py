"""Certificates that change under a running server: new handshakes see them, open ones go on."""

import asyncio
import contextlib
import shutil
import ssl

import pytest
import uvloop

import tls_peers
from certificates import Certificates
from kubelend.core.errors import InvalidSettings
from kubelend.pki import files
from kubelend.transports import tls

HOSTS = pytest.mark.parametrize("host", ["localhost", "127.0.0.1"], ids=["with SNI", "without SNI"])


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
        """Bring files into the live directory as a writer does who does not rename: in place."""
        for name in names or ("tls.crt", "tls.key", "ca.crt"):
            (self.directory / name).write_bytes((source / name).read_bytes())


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


def test_with_both_authorities_in_the_file_both_are_let_in(scene, run):
    bundle = [*scene.old.authority.trusted, *scene.new.authority.trusted]
    issued = files.load_credentials(scene.new.server())
    credentials = files.Credentials(issued.certificate, issued.key, tuple(bundle))
    files.save_credentials(scene.directory, credentials, overwrite=True)
    assert scene.reloading.refresh() is True

    async def names():
        async with tls_peers.serving(scene.reloading.context) as port:
            clients = (scene.old_client, scene.new_client)
            return [await tls_peers.name_of(port, client) for client in clients]

    assert run(names()) == ["old-cluster", "new-cluster"]


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


def test_nothing_happens_while_the_files_stay_as_they_are(scene):
    assert [scene.reloading.refresh() for _ in range(3)] == [False, False, False]
    scene.put(scene.new.server())
    assert [scene.reloading.refresh() for _ in range(3)] == [True, False, False]


def half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "damage, complaint",
    [
        (lambda scene: half(scene.directory / "tls.crt"), "not a certificate and unencrypted key"),
        (lambda scene: half(scene.directory / "tls.key"), "not a certificate and unencrypted key"),
        (lambda scene: half(scene.directory / "ca.crt"), "ca.crt: not a complete certificate"),
        (lambda scene: (scene.directory / "tls.key").write_bytes(b""), "tls.key is empty"),
        (lambda scene: (scene.directory / "ca.crt").unlink(), "ca.crt is missing"),
        (lambda scene: scene.put(scene.new.server(), "tls.crt"), "do not match"),
        (lambda scene: scene.put(scene.new.server(), "tls.key"), "do not match"),
    ],
    ids=[
        "half a certificate",
        "half a key",
        "half an authority",
        "an empty key",
        "no authority",
        "a new certificate and the old key",
        "a new key and the old certificate",
    ],
)
def test_files_that_make_no_whole_keep_the_old_certificate_and_are_reported_once(
    scene, damage, complaint
):
    def caller(client):
        return tls_peers.shake_hands(scene.reloading.context, client).caller

    damage(scene)
    assert [scene.reloading.refresh() for _ in range(3)] == [False, False, False]
    assert len(scene.reports) == 1
    assert complaint in scene.reports[0].message
    assert str(scene.directory) in scene.reports[0].message
    assert caller(scene.old_client) == "old-cluster"

    scene.put(scene.new.server())
    assert scene.reloading.refresh() is True
    assert caller(scene.new_client) == "new-cluster"


def test_the_same_fault_is_reported_again_after_it_was_mended(scene):
    for _ in range(2):
        half(scene.directory / "tls.crt")
        assert not scene.reloading.refresh()
        scene.put(scene.old.server())
        assert scene.reloading.refresh()
    first, second = scene.reports
    assert str(first) == str(second)


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
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (mount / name).symlink_to(f"..data/{name}")
    reloading = tls.ReloadingServerContext(mount, report=scene.reports.append)
    assert reloading.refresh() is False

    (mount / "..data_tmp").symlink_to("..2025_second")
    (mount / "..data_tmp").rename(mount / "..data")

    assert reloading.refresh() is True
    assert tls_peers.shake_hands(reloading.context, scene.new_client).caller == "new-cluster"
    assert scene.reports == []


def test_connections_opened_all_the_while_are_all_let_in(scene, run):
    """Ten renewals by the same authority, a handshake under way at each."""

    async def story():
        async with tls_peers.serving(scene.reloading.context) as port:
            calls = []
            for turn in range(10):
                calls += [
                    asyncio.create_task(tls_peers.name_of(port, scene.old_client)) for _ in range(3)
                ]
                await asyncio.sleep(0)
                renewed = files.load_credentials(scene.old.server(directory=f"renewed-{turn}"))
                files.save_credentials(scene.directory, renewed, overwrite=True)
                assert scene.reloading.refresh()
            return await asyncio.gather(*calls)

    assert run(story()) == ["old-cluster"] * 30
