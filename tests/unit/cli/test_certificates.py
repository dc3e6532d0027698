"""`kubelend ca`, `certificate` and `grant`: what they write, show and verify."""

import io
import json
import shutil
import stat
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
import yaml

import openssl
from issuers import due
from kubelend.apps.settings import ClientSettings
from kubelend.cli import certificates as certificate_commands
from kubelend.cli import output
from kubelend.core.errors import Conflict, NotFound
from kubelend.core.grants import GRANT_ISSUER, Grant
from kubelend.kits import backoff
from kubelend.pki import files, identity, tokens
from kubelend.pki.grants import GrantKeys
from kubelend.transports import tls
from kubelend.transports.client import BrokerClient
from scripted_broker import body, hang_up, problem, raw, say_nothing
from tls_peers import serial_in

pytestmark = pytest.mark.broker("scripted")
SECRET = "corre\u00e7t horse"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def authority(here, kubelend):
    assert kubelend("ca init")[0] == 0
    return here / "ca"


@pytest.fixture
def secret(here):
    """A file with a passphrase."""
    (here / "secret").write_text(SECRET + "\n")
    (here / "secret").chmod(0o600)
    return here / "secret"


def is_encrypted(path):
    return b"BEGIN ENCRYPTED PRIVATE KEY" in path.read_bytes()


# -- an authority, and what it issues


def test_a_new_authority_has_a_private_key_and_is_not_replaced_by_accident(here, kubelend):
    assert kubelend("ca init") == (
        0,
        "created an authority in ca; keep ca/ca.key secret: it can issue a certificate for any name\n",
        "Next: kubelend ca issue broker --role broker\n",
    )
    key = here / "ca" / "ca.key"
    before = key.read_bytes()
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    code, _, err = kubelend("ca init")
    assert (code, "would be overwritten" in err) == (2, True)
    assert key.read_bytes() == before


@pytest.mark.parametrize("role", ["cluster", "viewer", "admin", "proxy"])
def test_a_certificate_is_for_a_name_and_a_role(authority, here, role, kubelend):
    assert kubelend(f"ca issue alice --role {role}")[0] == 0
    found = json.loads(kubelend("certificate show --cert-path certs/alice -o json")[1])
    assert (found["name"], found["role"]) == ("alice", role)
    tls.client_context(here / "certs" / "alice")


@openssl.needed
def test_a_broker_gets_the_names_of_its_hosts(authority, here, kubelend):
    flags = "--role broker --dns broker.example.org --ip 192.0.2.7 --out b"
    code, _, err = kubelend(f"ca issue broker {flags}")
    assert code == 0
    assert "Next: kubelend broker --http-cert-path b" in err
    names = openssl.said("x509", "-in", here / "b" / "tls.crt", "-noout", "-ext", "subjectAltName")
    assert all(name in names for name in ("localhost", "broker.example.org", "192.0.2.7"))


@pytest.mark.parametrize(
    "name, flags, error",
    [
        ("a", "--dns x", "error: --dns and --ip are for a broker; add --role broker"),
        ("", "", "error: NAME: "),
        ("liqo-resource-broker", "", "error: NAME: "),
        ("x" * 65, "", "error: NAME: "),
        ("a\nb", "", "error: NAME: "),
    ],
)
def test_what_the_broker_would_reject_is_not_issued(authority, kubelend, name, flags, error):
    code, _, err = kubelend("ca", "issue", name, *flags.split())
    assert (code, err[: len(error)]) == (2, error)


def test_lifetime_and_replacement_are_as_requested(authority, here, kubelend):
    assert kubelend("ca issue a --lifetime 90m")[0] == 0
    left = tls.own_certificate(here / "certs" / "a").not_valid_after_utc - datetime.now(UTC)
    assert timedelta(minutes=89) < left < timedelta(minutes=91)
    code, _, err = kubelend("ca issue a")
    assert (code, "or replace them with --overwrite" in err) == (2, True)
    assert kubelend("ca issue a --overwrite")[0] == 0


def test_names_cannot_lead_out_of_the_directory_and_are_quoted(authority, here, kubelend):
    assert kubelend("ca issue ../../evil")[0] == 0
    assert files.common_names(here / "certs" / "..%2F..%2Fevil") == ["../../evil"]
    assert kubelend("ca issue 'has space'")[2] == (
        "Next: export KUBELEND_CERT_PATH='certs/has space'\n"
    )
    assert kubelend("ca issue b --role broker --out 'the broker'")[2].endswith(
        "--http-cert-path 'the broker'\n"
    )
    assert kubelend("ca init --ca 'another one'")[2].endswith("--ca 'another one'\n")


# -- passphrases


@pytest.mark.parametrize("source", ["flag", "variable", "file variable"])
def test_a_passphrase_encrypts_the_key_and_decrypts_it(source, kubelend, here, secret, monkeypatch):
    flags = " --passphrase-file secret" if source == "flag" else ""
    if source == "variable":
        monkeypatch.setenv("KUBELEND_CA_PASSPHRASE", SECRET)
    if source == "file variable":
        monkeypatch.setenv("KUBELEND_CA_PASSPHRASE_FILE", str(secret))
    assert kubelend(f"ca init{flags}")[:2] == (
        0,
        "created an authority in ca; keep ca/ca.key and its passphrase secret:"
        " it can issue a certificate for any name\n",
    )
    assert is_encrypted(here / "ca" / "ca.key")
    assert kubelend(f"ca issue a{flags}")[0] == 0
    assert not is_encrypted(here / "certs" / "a" / "tls.key")


@pytest.mark.parametrize(
    "command", ["ca issue a", "ca rotate", f"ca rotate --drop sha256:{64 * '0'}"]
)
def test_nothing_is_signed_without_the_passphrase(kubelend, secret, command, monkeypatch):
    kubelend("ca init --passphrase-file secret")
    code, out, err = kubelend(command)
    assert (code, out) == (2, "")
    assert "ca/ca.key: key is encrypted, but there is no passphrase" in err
    monkeypatch.setenv("KUBELEND_CA_PASSPHRASE", "hunter2")
    code, out, err = kubelend(f"--debug {command}")
    assert (code, out) == (2, "")
    assert "passphrase is wrong" in err
    assert "hunter2" not in err
    assert SECRET not in err


@pytest.mark.parametrize(
    "flags, problem",
    [
        ("--passphrase-prompt", "no terminal to ask for a passphrase on; use --passphrase-file"),
        ("--passphrase hunter2", "no such option"),
        ("--passphrase-prompt=hunter2 hunter2", ""),
    ],
)
def test_a_passphrase_is_read_from_a_terminal_and_never_from_a_flag(kubelend, here, flags, problem):
    code, _, err = kubelend(f"ca init {flags}")
    assert code == 2
    assert problem in err.lower()
    assert not (here / "ca").exists()


# -- rotation


@pytest.fixture
def shown(kubelend):
    def run(flags=""):
        code, out, _ = kubelend(f"ca show -o json {flags}")
        assert code == 0
        return json.loads(out)

    return run


def test_a_rotation_is_started_shown_and_finished(kubelend, authority, shown):
    (old,) = shown()["authorities"]
    code, out, err = kubelend("ca rotate")
    rotating = shown()
    _, new = rotating["authorities"]
    assert (code, rotating["next"]) == (0, new["pin"])
    assert out == f"CN=kubelend-2 ({new['pin']}) is trusted from now on and does not sign yet\n"
    assert "`kubelend get members --outdated` lists nobody, then kubelend ca rotate --sign\n" in err
    assert f"the one with hash {new['pin']} signs" in kubelend("ca show")[1]
    code, out, err = kubelend("ca rotate --sign")
    assert (code, out) == (0, f"CN=kubelend-2 ({new['pin']}) signs from now on\n")
    assert "then kubelend ca rotate --drop HASH, with the hash of the old one\n" in err
    assert [each["signs"] for each in shown()["authorities"]] == [True, False]
    code, out, _ = kubelend(f"ca rotate --drop {old['pin']}")
    assert code == 0
    assert out == f"CN=kubelend ({old['pin']}) removed: certificates that it signed are rejected\n"
    rest = {"directory": "ca", "keyEncrypted": False, "next": ""}
    assert shown() == {**rest, "authorities": [{**new, "signs": True}]}


def test_a_rotation_takes_name_algorithm_lifetime_and_another_passphrase(kubelend, here, secret):
    kubelend("ca init --ca x")
    flags = "--name other --algorithm rsa --lifetime 48h --new-passphrase-file secret"
    code, _, err = kubelend(f"ca rotate --ca x {flags}")
    assert code == 0
    assert "kubelend ca rotate --sign --ca x" in err
    assert kubelend("ca rotate --sign --ca x")[0] == 0
    assert is_encrypted(here / "x" / "ca.key")
    new = files.load_certificates(here / "x" / "ca.crt")[1]
    assert new.subject.rfc4514_string() == "CN=other"
    assert (new.not_valid_after_utc - new.not_valid_before_utc).days == 2
    assert type(new.public_key()).__name__ == "RSAPublicKey"
    assert kubelend("ca issue a --ca x --passphrase-file secret")[0] == 0


def test_an_authority_is_shown_for_people_and_programs(kubelend, here):
    _, _, err = kubelend("ca show")
    assert "ca/ca.key is missing; create an authority with `kubelend ca init`" in err
    kubelend("ca init --name mine")
    (certificate,) = files.load_certificates(here / "ca" / "ca.crt")
    code, out, _ = kubelend("ca show")
    header, row, _, last = out.splitlines()
    assert code == 0
    assert header.split() == ["SUBJECT", "SIGNS", "END", "HASH"]
    assert row.split()[:2] == ["CN=mine", "yes"]
    assert row.endswith(tokens.ca_pin(certificate))
    assert last == "The key is not encrypted."
    assert kubelend("ca show -o name")[1] == "authority/CN=mine\n"
    assert yaml.safe_load(kubelend("ca show -o yaml")[1])["authorities"][0]["subject"] == "CN=mine"


def test_which_authority_an_encrypted_key_belongs_to_needs_its_passphrase(kubelend, secret, shown):
    kubelend("ca init --passphrase-file secret")
    assert shown()["keyEncrypted"]
    assert shown()["authorities"][0]["signs"] is True
    assert "The key is encrypted." in kubelend("ca show")[1]
    kubelend("ca rotate --passphrase-file secret")
    assert [each["signs"] for each in shown()["authorities"]] == [None, None]
    opened = shown("--passphrase-file secret")
    assert [each["signs"] for each in opened["authorities"]] == [True, False]
    assert shown()["next"] == opened["next"] == opened["authorities"][1]["pin"]
    text = kubelend("ca show")[1]
    assert "Its passphrase is needed to tell which authority it belongs to." in text


# -- the caller's own certificate


def test_a_certificate_is_shown_with_its_holder_and_end(certificates, kubelend):
    profile = identity.client_profile("cluster-1")
    directory = certificates.write("c", profile, lifetime=timedelta(days=100))
    code, out, _ = kubelend(f"certificate show --cert-path {directory}")
    assert code == 0
    pairs = (line.split(":", 1) for line in out.splitlines() if ":  " in line)
    shown = {name: value.strip() for name, value in pairs}
    assert (shown["Name"], shown["Role"], shown["Days left"]) == ("cluster-1", "cluster", "99")
    assert shown["Signed by"] == "CN=test-ca"
    assert "(in 100d)" in shown["Valid until"]
    assert tokens.ca_pin(certificates.authority.certificate) in out
    expired = kubelend(f"certificate show --cert-path {certificates.expired('a')}")[1]
    assert "ago)" in next(line for line in expired.splitlines() if line.startswith("Valid until"))
    assert "Days left:     0" in expired


@pytest.mark.parametrize("role", ["viewer", "admin", "cluster", "broker"])
def test_a_program_reads_the_same_without_the_private_key(certificates, kubelend, role):
    is_broker = role == "broker"
    directory = certificates.server() if is_broker else getattr(certificates, role)("alice")
    key = (directory / "tls.key").read_text().splitlines()[1]
    texts = [
        kubelend(f"certificate show --cert-path {directory} -o {known}")[1]
        for known in ("table", "json", "yaml")
    ]
    assert [key in text for text in texts] == [False] * 3
    found = yaml.safe_load(texts[-1])
    assert json.loads(texts[1]) == found
    assert found["role"] == role
    end, renew_at = (datetime.fromisoformat(found[name]) for name in ("notAfter", "renewAt"))
    left = end - datetime.now(UTC)
    assert timedelta(days=364) < left < timedelta(days=366)
    assert 0.19 < (end - renew_at) / left < 0.26
    (trusted,) = found["authorities"]
    assert trusted["pin"] == tokens.ca_pin(certificates.authority.certificate)


@pytest.mark.parametrize(
    "answer",
    [
        say_nothing,
        hang_up,
        problem(NotFound("no such route")),
        problem(Conflict("this broker issues no certificates")),
        raw(b"<html>", 502),
        body({"certificate": "nonsense", "authorities": "nonsense"}),
    ],
    ids=["silence", "cut off", "an older broker", "no authority", "a gateway", "nonsense"],
)
async def test_a_renewal_that_fails_does_not_fail_the_command(
    broker, certificates, tmp_path, monkeypatch, capsys, answer
):
    directory = shutil.copytree(due(certificates), tmp_path / "live")
    monkeypatch.setattr(certificate_commands, "RENEWAL_TIMEOUT", 0.3)
    broker.responses.append(answer)
    old = serial_in(directory)
    settings = ClientSettings(broker_url=broker.url, cert_path=directory)
    async with BrokerClient(broker.url, directory, backoff=backoff.NO_RETRIES) as client:
        await certificate_commands.renew_if_due(settings, client)
    assert broker.seen[0].path == "/api/v1/certificates"
    assert serial_in(directory) == old
    assert sorted(path.name for path in directory.iterdir()) == ["ca.crt", "tls.crt", "tls.key"]
    assert capsys.readouterr() == ("", "")


async def test_a_certificate_that_is_not_due_costs_no_call(broker, certificates):
    directory = certificates.cluster("a")
    settings = ClientSettings(broker_url=broker.url, cert_path=directory)
    async with BrokerClient(broker.url, directory) as client:
        await certificate_commands.renew_if_due(settings, client)
    assert broker.seen == []


# -- grants


@pytest.fixture
def grant_keys():
    return GrantKeys.create()


@pytest.fixture
def verify(tmp_path, grant_keys, kubelend):
    """Runs `grant verify` with the public keys in a file."""

    def run(grant, flags="", provider="berlin", keys=None):
        path = tmp_path / "keys.json"
        path.write_bytes(msgspec.json.encode(grant_keys.public) if keys is None else keys)
        return kubelend(f"grant verify {grant} --keys {path} --provider {provider} {flags}")

    return run


@pytest.fixture
def grant(grant_keys):
    now = int(output.now().timestamp())
    amounts = {"cpu": "4", "memory": "8Gi"}
    return grant_keys.sign(
        Grant(GRANT_ISSUER, "rsv-1", "paris", "berlin", now, now + 7200, amounts)
    )


def test_a_signed_grant_is_verified_without_a_broker(grant, verify, monkeypatch):
    code, out, _ = verify(grant)
    assert code == 0
    assert out.startswith("paris may use 4 cpu, 8Gi memory of berlin for rsv-1 until ")
    assert json.loads(verify(grant, "-o json")[1])["sub"] == "paris"
    monkeypatch.setattr("sys.stdin", io.StringIO(grant + "\n"))
    assert verify("-")[0] == 0


def test_other_grants_and_keys_are_rejected(grant, verify):
    code, _, err = verify(grant, provider="rome")
    assert (code, "for provider 'berlin', not 'rome'" in err) == (2, True)
    code, _, err = verify(grant, keys=msgspec.json.encode(GrantKeys.create().public))
    assert (code, "grant is not signed by a key of this broker" in err) == (2, True)
    code, _, err = verify(grant, keys=b"[]")
    assert (code, "has no keys; write it with `kubelend grant keys`" in err) == (2, True)
