"""Credentials of requests, while files change on disk, and of exec plugins, which run for real."""

import asyncio
import json
import os
import shutil
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace

import kubeconfigs
from certificates import Certificates
from kubelend.core.errors import InvalidSettings, Unavailable
from kubelend.kube import auth, config
from kubelend.kube.auth import CredentialSource, PluginRunner
from kubelend.kube.config import EXEC_VERSIONS, DataOrFile, ExecPlugin, KubeConfig

SERVER = "https://127.0.0.1:1"
V1, V1BETA1 = EXEC_VERSIONS


@pytest.fixture
def certificates(tmp_path):
    return Certificates(tmp_path / "certificates")


async def authorization(credentials):
    shown = await credentials.current()
    return dict(shown.headers).get("Authorization")


async def test_token_file_is_followed_and_the_last_token_used_while_it_is_missing(tmp_path):
    token = tmp_path / "token"
    token.write_text("first\n")
    credentials = CredentialSource(KubeConfig(server=SERVER, token=DataOrFile(path=token)))
    assert await authorization(credentials) == "Bearer first"
    token.unlink()
    assert await authorization(credentials) == "Bearer first"
    token.write_text("second")
    assert await authorization(credentials) == "Bearer second"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"token": DataOrFile(path=Path("/no/such/token"))}, "token is missing"),
        ({"token": DataOrFile(b"two\nlines")}, "invalid token"),
        ({"token": DataOrFile("schlüssel".encode())}, "invalid token"),
        ({"authorities": DataOrFile(b"nobody")}, "not a certificate in PEM form"),
    ],
    ids=["missing token", "two lines", "not ASCII", "authority"],
)
async def test_invalid_credentials_are_neither_sent_nor_printed(fields, message):
    credentials = CredentialSource(KubeConfig(server=SERVER, **fields))
    with pytest.raises(InvalidSettings, match=message) as caught:
        await credentials.current()
    assert not any(secret in str(caught.value) for secret in ("lines", "schlüssel", "nobody"))


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


async def test_last_valid_pair_is_used_until_the_new_one_is_complete(certificates, tmp_path):
    mine, newer = tmp_path / "mine", certificates.cluster("b")
    credentials = CredentialSource(copied(certificates.cluster("a"), mine))
    first = await credentials.current()
    assert (await credentials.current()).context is first.context, "nothing has changed"
    shutil.copy(newer / "tls.crt", mine / "tls.crt")
    assert (await credentials.current()).context is first.context
    shutil.copy(newer / "tls.key", mine / "tls.key")
    assert (await credentials.current()).context is not first.context


async def test_key_of_another_certificate_is_an_error(certificates, tmp_path):
    own = copied(certificates.cluster("a"), tmp_path / "mine")
    shutil.copy(certificates.cluster("b") / "tls.key", tmp_path / "mine" / "tls.key")
    with pytest.raises(InvalidSettings, match="do not match, are not in PEM form"):
        await CredentialSource(own).current()


async def test_rewritten_kubeconfig_is_read_again_and_stays_with_its_context(tmp_path):
    path = kubeconfigs.write(tmp_path / "config", user={"token": "first"})
    credentials = CredentialSource(config.config_from_kubeconfig(path))
    assert await authorization(credentials) == "Bearer first"
    kubeconfigs.write(path, user={"token": "second"}, current="another")
    assert await authorization(credentials) == "Bearer second"
    path.write_text("half: [")
    assert await authorization(credentials) == "Bearer second"


async def test_token_of_a_plugin_with_and_without_a_certificate_of_the_kubeconfig(
    certificates, tmp_path
):
    plugin = ExecPlugin(sys.executable, V1, ("-c", credential(token="t")))
    own = copied(certificates.cluster("a"), tmp_path / "mine")
    for known in (own, KubeConfig(server=SERVER)):
        credentials = CredentialSource(replace(known, plugin=plugin))
        assert await authorization(credentials) == "Bearer t"


# -- exec plugins

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


def program(tmp_path, body):
    path = tmp_path / "login"
    path.write_text(f"#!{sys.executable}\n{body}\n")
    path.chmod(0o755)
    return str(path)


def plugin_returning(tmp_path, *, version=V1, **status):
    """A program that prints this, and counts how often it was run."""
    count = tmp_path / "count"
    body = f"open({str(count)!r}, 'a').write('x')\n{credential(version, **status)}"
    return program(tmp_path, body), lambda: len(count.read_text())


def credential(version=V1, **status):
    output = {"apiVersion": version, "kind": "ExecCredential", "status": status}
    return f"print({json.dumps(output)!r})"


CERTIFICATE = {"clientCertificateData": "crt", "clientKeyData": "key"}


@pytest.mark.parametrize(
    "version, status, expected",
    [
        (V1, {"token": "t"}, ("t", b"", b"", None)),
        (V1BETA1, {"token": "t"}, ("t", b"", b"", None)),
        (V1, CERTIFICATE, ("", b"crt", b"key", None)),
    ],
)
async def test_credential_is_read(version, status, expected, tmp_path):
    command, _ = plugin_returning(tmp_path, version=version, **status)
    assert await auth.run_plugin(ExecPlugin(command, version)) == expected


async def test_plugin_gets_arguments_variables_and_cluster(tmp_path):
    received = tmp_path / "received"
    body = f"""
import json, os, sys
env = os.environ
received = [sys.argv[1:], env["A"], json.loads(env["KUBERNETES_EXEC_INFO"]), "HOME" in env, sys.stdin.read()]
open({str(received)!r}, "w").write(json.dumps(received))
print(json.dumps({{"apiVersion": "{V1}", "kind": "ExecCredential", "status": {{"token": "t"}}}}))
"""
    command = program(tmp_path, body)
    await auth.run_plugin(ExecPlugin(command, V1, ("get", "token"), {"A": "1"}, {"server": "s"}))
    arguments, variable, info, has_home, asked = json.loads(received.read_text())
    assert (arguments, variable, asked) == (["get", "token"], "1", "")
    assert has_home is ("HOME" in os.environ)
    assert info == {
        "apiVersion": V1,
        "kind": "ExecCredential",
        "spec": {"interactive": False, "cluster": {"server": "s"}},
    }


async def test_credentials_are_cached_until_they_expire(tmp_path):
    end = "2030-01-01T13:00:00Z"
    command, count = plugin_returning(tmp_path, token="t", expirationTimestamp=end)
    times = iter([NOON, NOON + timedelta(minutes=59), NOON + timedelta(hours=1)])
    runner = PluginRunner(ExecPlugin(command, V1), now=lambda: next(times))
    for runs in (1, 1, 1, 2):
        await runner.credentials()
        assert count() == runs


async def test_concurrent_requests_run_the_plugin_once(tmp_path):
    command, count = plugin_returning(tmp_path, token="t")
    runner = PluginRunner(ExecPlugin(command, V1))
    await asyncio.gather(*(runner.credentials() for _ in range(20)))
    assert count() == 1


async def test_rejected_credentials_cause_one_more_run(tmp_path):
    command, count = plugin_returning(tmp_path, token="t")
    runner = PluginRunner(ExecPlugin(command, V1))
    first = await runner.credentials()
    runner.invalidate(first)
    await runner.credentials()
    runner.invalidate(first)
    await runner.credentials()
    assert count() == 2


@pytest.mark.parametrize(
    "body, kind, message",
    [
        ("print('Please log in')", Unavailable, "returned no valid ExecCredential"),
        ("import sys; sys.exit('token=hunter2 has expired')", Unavailable, "failed: .redacted"),
        (credential(V1BETA1, token="hunter2"), InvalidSettings, "returned apiVersion"),
        (credential(), Unavailable, "neither"),
        (credential(clientKeyData="hunter2"), Unavailable, "without a key"),
        (credential(token="t", expirationTimestamp="2030-01-01T12:00:00"), Unavailable, "zone"),
    ],
    ids=["words", "failure", "other version", "nothing", "half", "no zone"],
)
async def test_plugin_failure_is_reported_without_secrets(body, kind, message, tmp_path):
    with pytest.raises(kind, match=message) as caught:
        await auth.run_plugin(ExecPlugin(program(tmp_path, body), V1))
    assert "hunter2" not in str(caught.value)


async def test_plugin_that_waits_for_input_times_out(tmp_path):
    command = program(tmp_path, "import time; time.sleep(600)")
    with pytest.raises(Unavailable, match="timed out after 200ms; log in manually"):
        await auth.run_plugin(ExecPlugin(command, V1), timedelta(milliseconds=200))


async def test_missing_plugin_is_reported_with_the_install_hint():
    with pytest.raises(InvalidSettings, match=r"no-such cannot be run: .*; get it from us"):
        await auth.run_plugin(ExecPlugin("no-such", V1, hint="get it from us"))


async def test_repr_has_no_secrets(tmp_path):
    credentials = CredentialSource(KubeConfig(server=SERVER, token=DataOrFile(b"hunter2")))
    assert "hunter2" not in repr(await credentials.current())
    command, _ = plugin_returning(tmp_path, token="hunter2")
    plugin = ExecPlugin(command, V1, ("--password=hunter2",), {"A": "hunter2"})
    assert "hunter2" not in f"{plugin!r} {await auth.run_plugin(plugin)!r}"
