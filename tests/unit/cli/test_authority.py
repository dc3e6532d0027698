"""`kubelend ca` with a passphrase, its rotation, and what it shows."""

import json

import pytest
import yaml

import openssl
from kubelend.cli import main
from kubelend.pki import files, tokens

SECRET = "corre\u00e7t horse"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KUBELEND_CA_PASSPHRASE", raising=False)
    monkeypatch.delenv("KUBELEND_CA_PASSPHRASE_FILE", raising=False)
    return tmp_path


@pytest.fixture
def secret(here):
    (here / "secret").write_text(SECRET + "\n")
    (here / "secret").chmod(0o600)
    return here / "secret"


@pytest.fixture
def kubelend(here, capsys):
    """Runs a command; gives exit code, output and errors."""

    def run(line):
        capsys.readouterr()
        code = main.run(line.split())
        out, err = capsys.readouterr()
        return code, out, err

    return run


def encrypted(path):
    return b"BEGIN ENCRYPTED PRIVATE KEY" in path.read_bytes()


def test_a_passphrase_from_a_file_encrypts_the_key_and_opens_it(kubelend, here, secret):
    assert kubelend("ca init --passphrase-file secret")[0] == 0
    assert encrypted(here / "ca" / "ca.key")
    assert kubelend("ca issue a --passphrase-file secret")[0] == 0
    assert not encrypted(here / "certs" / "a" / "tls.key")


def test_it_is_said_what_the_key_is_worth(kubelend, secret):
    _, out, _ = kubelend("ca init --passphrase-file secret")
    assert out == (
        "created an authority in ca; keep ca/ca.key and its passphrase secret:"
        " it can issue a certificate for any name\n"
    )


def test_a_passphrase_from_the_variable_does_the_same(kubelend, here, monkeypatch):
    monkeypatch.setenv("KUBELEND_CA_PASSPHRASE", SECRET)
    assert kubelend("ca init")[0] == 0
    assert encrypted(here / "ca" / "ca.key")
    assert kubelend("ca issue a")[0] == 0


def test_the_file_can_be_named_by_a_variable(kubelend, here, secret, monkeypatch):
    monkeypatch.setenv("KUBELEND_CA_PASSPHRASE_FILE", str(secret))
    assert kubelend("ca init")[0] == 0
    assert encrypted(here / "ca" / "ca.key")


@pytest.mark.parametrize("command", ["ca issue a", "ca rotate", "ca rotate --finish --yes"])
def test_without_the_passphrase_nothing_is_signed(kubelend, here, secret, command):
    kubelend("ca init --passphrase-file secret")
    code, out, err = kubelend(command)
    assert (code, out) == (2, "")
    assert "ca/ca.key: key is encrypted, but there is no passphrase" in err


def test_a_wrong_passphrase_is_not_repeated(kubelend, here, secret, monkeypatch):
    kubelend("ca init --passphrase-file secret")
    monkeypatch.setenv("KUBELEND_CA_PASSPHRASE", "hunter2")
    code, out, err = kubelend("--debug ca issue a")
    assert (code, out) == (2, "")
    assert "passphrase is wrong" in err
    assert "hunter2" not in err
    assert SECRET not in err


def test_without_a_terminal_there_is_nobody_to_ask(kubelend, here):
    code, _, err = kubelend("ca init --passphrase-prompt")
    assert code == 2
    assert "no terminal to ask for a passphrase on; use --passphrase-file" in err
    assert not (here / "ca").exists()


@pytest.mark.parametrize("flag", ["--passphrase", "--passphrase-prompt=hunter2"])
def test_a_passphrase_cannot_be_a_flags_value(kubelend, here, flag):
    code, _, _ = kubelend(f"ca init {flag} hunter2")
    assert code == 2
    assert not (here / "ca").exists()


def shown(kubelend, flags=""):
    code, out, _ = kubelend(f"ca show -o json {flags}")
    assert code == 0
    return json.loads(out)


@openssl.needed
def test_a_rotation_is_made_shown_and_finished(kubelend, here):
    kubelend("ca init")
    kubelend("ca issue old")
    old = shown(kubelend)["authorities"][0]
    code, out, err = kubelend("ca rotate")
    assert code == 0
    found = shown(kubelend)
    new = found["authorities"][0]
    assert found["rotating"]
    assert [(each["subject"], each["signs"]) for each in found["authorities"]] == [
        ("CN=kubelend-2", True),
        ("CN=kubelend", False),
    ]
    assert out == (
        f"CN=kubelend-2 ({new['pin']}) signs from now on\n"
        f"CN=kubelend ({old['pin']}) stays trusted\n"
    )
    assert "then kubelend ca rotate --finish --yes\n" in err

    kubelend("ca issue new")
    trusted = here / "ca" / "ca.crt"
    assert openssl.accepts(here / "certs" / "old" / "tls.crt", trusted)
    assert openssl.accepts(here / "certs" / "new" / "tls.crt", here / "certs" / "old" / "ca.crt")

    code, out, _ = kubelend("ca rotate --finish --yes")
    assert code == 0
    assert out == (
        f"CN=kubelend ({old['pin']}) removed:"
        " certificates that it signed are rejected from now on\n"
        f"CN=kubelend-2 ({new['pin']}) signs and is trusted\n"
    )
    assert openssl.accepts(here / "certs" / "new" / "tls.crt", trusted)
    assert not openssl.accepts(here / "certs" / "old" / "tls.crt", trusted)
    assert shown(kubelend) == {
        "directory": "ca",
        "keyEncrypted": False,
        "rotating": False,
        "authorities": [new],
    }


def test_to_finish_needs_a_yes_and_says_what_it_means(kubelend, here):
    kubelend("ca init")
    kubelend("ca rotate")
    before = (here / "ca" / "ca.crt").read_bytes()
    code, _, err = kubelend("ca rotate --finish")
    assert code == 2
    assert "certificates that it signed are rejected from then on" in err
    assert "add --yes" in err
    assert (here / "ca" / "ca.crt").read_bytes() == before


def test_a_second_rotation_is_refused_with_what_to_do(kubelend, here):
    kubelend("ca init")
    kubelend("ca rotate")
    code, _, err = kubelend("ca rotate")
    assert code == 2
    assert "a rotation is already in progress in ca" in err
    assert "`kubelend ca rotate --finish --yes`" in err


def test_a_rotation_takes_name_kind_lifetime_and_another_passphrase(kubelend, here, secret):
    kubelend("ca init --ca x")
    flags = "--name other --algorithm rsa --lifetime 48h --new-passphrase-file secret"
    code, _, err = kubelend(f"ca rotate --ca x {flags}")
    assert code == 0
    assert "kubelend ca rotate --finish --yes --ca x" in err
    assert encrypted(here / "x" / "ca.key")
    new = files.load_certificates(here / "x" / "ca.crt")[0]
    assert new.subject.rfc4514_string() == "CN=other"
    assert (new.not_valid_after_utc - new.not_valid_before_utc).days == 2
    assert type(new.public_key()).__name__ == "RSAPublicKey"
    assert kubelend("ca issue a --ca x --passphrase-file secret")[0] == 0


def test_what_is_shown_can_be_read(kubelend, here):
    kubelend("ca init")
    code, out, _ = kubelend("ca show")
    (certificate,) = files.load_certificates(here / "ca" / "ca.crt")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split() == ["SUBJECT", "SIGNS", "END", "HASH"]
    assert lines[1].split()[:2] == ["CN=kubelend", "yes"]
    assert lines[1].endswith(tokens.ca_pin(certificate))
    assert lines[-1] == "The key is not encrypted."


def test_an_encrypted_key_is_shown_as_such_without_its_passphrase(kubelend, secret):
    kubelend("ca init --passphrase-file secret")
    found = shown(kubelend)
    assert found["keyEncrypted"]
    assert found["authorities"][0]["signs"] is True
    assert "The key is encrypted." in kubelend("ca show")[1]


def test_which_of_two_signs_an_encrypted_key_tells_only_with_its_passphrase(kubelend, secret):
    kubelend("ca init --passphrase-file secret")
    kubelend("ca rotate --passphrase-file secret")
    assert [each["signs"] for each in shown(kubelend)["authorities"]] == [None, None]
    opened = shown(kubelend, "--passphrase-file secret")
    assert [each["signs"] for each in opened["authorities"]] == [True, False]
    assert shown(kubelend)["rotating"] is opened["rotating"] is True
    text = kubelend("ca show")[1]
    assert "Its passphrase is needed to tell which authority it belongs to." in text
    assert "A rotation is in progress" in text


def test_it_is_shown_as_yaml_and_by_name_too(kubelend):
    kubelend("ca init --name mine")
    assert kubelend("ca show -o name")[1] == "authority/CN=mine\n"
    body = yaml.safe_load(kubelend("ca show -o yaml")[1])
    assert body["authorities"][0]["subject"] == "CN=mine"


def test_where_there_is_no_authority_none_is_shown(kubelend, here):
    code, out, err = kubelend("ca show")
    assert (code, out) == (2, "")
    assert "ca/ca.key is missing; create an authority with `kubelend ca init`" in err
