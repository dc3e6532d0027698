"""Programs that say who calls: real ones, run for real."""

import asyncio
import json
import os
import sys
from datetime import UTC, datetime, timedelta

import pytest

from kubelend.core.errors import InvalidSettings, Unavailable
from kubelend.kube import exec_plugins
from kubelend.kube.exec_plugins import ExecPlugin, PluginRunner

V1, V1BETA1 = exec_plugins.VERSIONS
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


def program(tmp_path, body):
    path = tmp_path / "login"
    path.write_text(f"#!{sys.executable}\n{body}\n")
    path.chmod(0o755)
    return str(path)


def saying(tmp_path, *, version=V1, **status):
    """A program that says this, and counts how often it was run."""
    count = tmp_path / "count"
    body = f"open({str(count)!r}, 'a').write('x')\n{credential(version, **status)}"
    return program(tmp_path, body), lambda: len(count.read_text())


def credential(version=V1, **status):
    said = {"apiVersion": version, "kind": "ExecCredential", "status": status}
    return f"print({json.dumps(said)!r})"


@pytest.mark.parametrize("version", exec_plugins.VERSIONS)
async def test_token_is_read(version, tmp_path):
    command, _ = saying(tmp_path, version=version, token="t")
    given = await exec_plugins.run_plugin(ExecPlugin(command, version))
    assert given == ("t", b"", b"", None)


async def test_certificate_is_read(tmp_path):
    command, _ = saying(tmp_path, clientCertificateData="crt", clientKeyData="key")
    given = await exec_plugins.run_plugin(ExecPlugin(command, V1))
    assert given[:3] == ("", b"crt", b"key")


async def test_program_hears_what_is_wanted_of_it(tmp_path):
    received = tmp_path / "received"
    body = f"""
import json, os, sys
env = os.environ
received = [sys.argv[1:], env["A"], json.loads(env["KUBERNETES_EXEC_INFO"]), "HOME" in env, sys.stdin.read()]
open({str(received)!r}, "w").write(json.dumps(received))
print(json.dumps({{"apiVersion": "{V1}", "kind": "ExecCredential", "status": {{"token": "t"}}}}))
"""
    command = program(tmp_path, body)
    await exec_plugins.run_plugin(
        ExecPlugin(command, V1, ("get", "token"), {"A": "1"}, {"server": "s"})
    )
    arguments, variable, info, has_home, asked = json.loads(received.read_text())
    assert (arguments, variable, asked) == (["get", "token"], "1", "")
    assert has_home is ("HOME" in os.environ)
    assert info == {
        "apiVersion": V1,
        "kind": "ExecCredential",
        "spec": {"interactive": False, "cluster": {"server": "s"}},
    }


async def test_answer_is_kept_until_it_expires(tmp_path):
    command, count = saying(tmp_path, token="t", expirationTimestamp="2030-01-01T13:00:00Z")
    times = iter([NOON, NOON + timedelta(minutes=59), NOON + timedelta(hours=1)])
    runner = PluginRunner(ExecPlugin(command, V1), now=lambda: next(times))
    await runner.credentials()
    await runner.credentials()
    await runner.credentials()
    assert count() == 1
    await runner.credentials()
    assert count() == 2


async def test_calls_at_once_run_it_once(tmp_path):
    command, count = saying(tmp_path, token="t")
    runner = PluginRunner(ExecPlugin(command, V1))
    await asyncio.gather(*(runner.credentials() for _ in range(20)))
    assert count() == 1


async def test_refused_answer_is_asked_for_anew_once(tmp_path):
    command, count = saying(tmp_path, token="t")
    runner = PluginRunner(ExecPlugin(command, V1))
    first = await runner.credentials()
    runner.invalidate(first)
    await runner.credentials()
    runner.invalidate(first)
    await runner.credentials()
    assert count() == 2


@pytest.mark.parametrize(
    "body, kind, said",
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
async def test_program_that_does_not_do_is_reported(body, kind, said, tmp_path):
    with pytest.raises(kind, match=said) as caught:
        await exec_plugins.run_plugin(ExecPlugin(program(tmp_path, body), V1))
    assert "hunter2" not in str(caught.value)


async def test_program_that_waits_for_a_person_is_ended(tmp_path):
    command = program(tmp_path, "import time; time.sleep(600)")
    with pytest.raises(Unavailable, match="timed out after 200ms; log in manually"):
        await exec_plugins.run_plugin(ExecPlugin(command, V1), timedelta(milliseconds=200))


async def test_missing_program_comes_with_the_hint_of_who_wrote_the_kubeconfig():
    with pytest.raises(InvalidSettings, match=r"no-such cannot be run: .*; get it from us"):
        await exec_plugins.run_plugin(ExecPlugin("no-such", V1, hint="get it from us"))


async def test_nothing_secret_is_printed(tmp_path):
    command, _ = saying(tmp_path, token="hunter2")
    plugin = ExecPlugin(command, V1, ("--password=hunter2",), {"A": "hunter2"})
    assert "hunter2" not in f"{plugin!r} {await exec_plugins.run_plugin(plugin)!r}"
