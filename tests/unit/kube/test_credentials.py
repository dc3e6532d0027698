"""Who calls, while tokens and certificates change on disk."""

import base64
import json
import shutil
import sys

import pytest

import kubeconfigs
from certificates import Certificates
from kubelend.core.errors import InvalidSettings
from kubelend.kube import config
from kubelend.kube.auth import CredentialSource
from kubelend.kube.config import DataOrFile, KubeConfig
from kubelend.kube.exec_plugins import VERSIONS, ExecPlugin

SERVER = "https://127.0.0.1:1"


@pytest.fixture
def certificates(tmp_path):
    return Certificates(tmp_path / "certificates")


def encoded(path):
    return base64.b64encode(path.read_bytes()).decode()


async def authorization(credentials):
    shown = await credentials.current()
    return dict(shown.headers).get("Authorization")


async def test_replaced_token_is_used(tmp_path):
    token = tmp_path / "token"
    token.write_text("first\n")
    credentials = CredentialSource(KubeConfig(server=SERVER, token=DataOrFile(path=token)))
    assert await authorization(credentials) == "Bearer first"
    token.write_text("second")
    assert await authorization(credentials) == "Bearer second"


async def test_token_that_is_gone_for_a_moment_is_kept(tmp_path):
    token = tmp_path / "token"
    token.write_text("first")
    credentials = CredentialSource(KubeConfig(server=SERVER, token=DataOrFile(path=token)))
    await credentials.current()
    token.unlink()
    assert await authorization(credentials) == "Bearer first"
    token.write_text("second")
    assert await authorization(credentials) == "Bearer second"


async def test_token_that_never_was_is_a_mistake(tmp_path):
    credentials = CredentialSource(
        KubeConfig(server=SERVER, token=DataOrFile(path=tmp_path / "token"))
    )
    with pytest.raises(InvalidSettings, match="token is missing"):
        await credentials.current()


@pytest.mark.parametrize("token", ["two\nlines", "schlüssel"])
async def test_what_is_no_token_is_neither_sent_nor_printed(token):
    credentials = CredentialSource(KubeConfig(server=SERVER, token=DataOrFile(token.encode())))
    with pytest.raises(InvalidSettings, match="invalid token") as caught:
        await credentials.current()
    assert token not in str(caught.value)


def copied(source, target):
    """A certificate and its key, as a mounted secret has them."""
    target.mkdir(exist_ok=True)
    for name in ("tls.crt", "tls.key"):
        shutil.copy(source / name, target / name)
    return KubeConfig(
        server=SERVER,
        certificate=DataOrFile(path=target / "tls.crt"),
        key=DataOrFile(path=target / "tls.key"),
    )


async def test_same_files_give_the_same_context(certificates, tmp_path):
    credentials = CredentialSource(copied(certificates.cluster("a"), tmp_path / "mine"))
    first = await credentials.current()
    assert (await credentials.current()).context is first.context


async def test_replaced_certificate_is_used(certificates, tmp_path):
    mine = tmp_path / "mine"
    credentials = CredentialSource(copied(certificates.cluster("a"), mine))
    first = await credentials.current()
    copied(certificates.cluster("b"), mine)
    assert (await credentials.current()).context is not first.context


async def test_half_a_pair_is_waited_for(certificates, tmp_path):
    mine, newer = tmp_path / "mine", certificates.cluster("b")
    credentials = CredentialSource(copied(certificates.cluster("a"), mine))
    first = await credentials.current()
    shutil.copy(newer / "tls.crt", mine / "tls.crt")
    assert (await credentials.current()).context is first.context
    shutil.copy(newer / "tls.key", mine / "tls.key")
    assert (await credentials.current()).context is not first.context


async def test_what_is_no_pair_is_a_mistake(certificates, tmp_path):
    own = copied(certificates.cluster("a"), tmp_path / "mine")
    shutil.copy(certificates.cluster("b") / "tls.key", tmp_path / "mine" / "tls.key")
    with pytest.raises(InvalidSettings, match="do not match, are not in PEM form"):
        await CredentialSource(own).current()


async def test_what_is_no_authority_is_a_mistake():
    own = KubeConfig(server=SERVER, authorities=DataOrFile(b"nobody"))
    with pytest.raises(InvalidSettings, match="not a certificate in PEM form"):
        await CredentialSource(own).current()


async def test_rewritten_kubeconfig_is_read_again_and_stays_with_its_context(tmp_path):
    path = kubeconfigs.write(tmp_path / "config", user={"token": "first"})
    credentials = CredentialSource(config.config_from_kubeconfig(path))
    assert await authorization(credentials) == "Bearer first"
    kubeconfigs.write(path, user={"token": "second"}, current="another")
    assert await authorization(credentials) == "Bearer second"
    path.write_text("half: [")
    assert await authorization(credentials) == "Bearer second"


async def test_plugin_may_give_the_token_beside_a_certificate(certificates, tmp_path):
    said = {"apiVersion": VERSIONS[0], "kind": "ExecCredential", "status": {"token": "t"}}
    own = certificates.cluster("a")
    credentials = CredentialSource(
        KubeConfig(
            server=SERVER,
            plugin=ExecPlugin(sys.executable, VERSIONS[0], ("-c", f"print({json.dumps(said)!r})")),
            certificate=DataOrFile(path=own / "tls.crt"),
            key=DataOrFile(path=own / "tls.key"),
        )
    )
    assert await authorization(credentials) == "Bearer t"


async def test_refused_token_is_read_again_though_its_file_looks_the_same(tmp_path):
    token = tmp_path / "token"
    token.write_text("first")
    credentials = CredentialSource(KubeConfig(server=SERVER, token=DataOrFile(path=token)))
    shown = await credentials.current()
    credentials.invalidate(shown)
    assert await credentials.current() == shown


async def test_nothing_secret_is_printed():
    credentials = CredentialSource(KubeConfig(server=SERVER, token=DataOrFile(b"hunter2")))
    assert "hunter2" not in repr(await credentials.current())
