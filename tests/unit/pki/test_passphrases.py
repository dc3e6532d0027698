"""The authority's key under a passphrase: encrypted on disk, and the passphrase nowhere else."""

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

import openssl
from kubelend.core.errors import InvalidSettings
from kubelend.pki import files, identity, passphrases, x509
from kubelend.pki.authority import Authority
from kubelend.pki.keys import Algorithm
from kubelend.pki.passphrases import Passphrase

NOW = datetime.now(UTC)
SECRET = "corre\u00e7t horse"


@pytest.fixture
def directory(tmp_path):
    Authority.create("test-ca", now=NOW, passphrase=Passphrase(SECRET)).save(tmp_path / "ca")
    return tmp_path / "ca"


def written(path, content, mode=0o600):
    path.write_bytes(content)
    path.chmod(mode)
    return path


def signs(authority):
    issued = authority.issue(identity.client_profile("a"), now=NOW)
    return x509.is_issued_by(issued.certificate, authority.certificate)


def test_the_key_is_encrypted_on_disk_and_comes_back(directory):
    assert b"-----BEGIN ENCRYPTED PRIVATE KEY-----" in (directory / "ca.key").read_bytes()
    assert signs(Authority.load(directory, Passphrase(SECRET)))


@openssl.needed
@pytest.mark.parametrize("algorithm", Algorithm)
def test_openssl_opens_the_key_with_the_same_file(tmp_path, algorithm):
    file = written(tmp_path / "passphrase", SECRET.encode() + b"\n")
    made = Authority.create(
        "test-ca", now=NOW, algorithm=algorithm, passphrase=passphrases.passphrase_from_file(file)
    )
    made.save(tmp_path)
    key = openssl.said(
        "pkey", "-in", tmp_path / "ca.key", "-passin", f"file:{file}", "-pubout"
    ).strip()
    certificate = openssl.said("x509", "-in", tmp_path / "ca.crt", "-noout", "-pubkey").strip()
    assert key == certificate
    wrong = openssl.run("pkey", "-in", tmp_path / "ca.key", "-passin", "pass:wrong", "-noout")
    assert wrong.returncode != 0


@openssl.needed
def test_an_older_form_of_encrypted_key_is_read_too(directory):
    old = openssl.said(
        *("ec", "-in", directory / "ca.key", "-passin", f"pass:{SECRET}"),
        *("-aes256", "-passout", f"pass:{SECRET}"),
    )
    assert "Proc-Type: 4,ENCRYPTED" in old
    (directory / "ca.key").write_text(old)
    assert signs(Authority.load(directory, Passphrase(SECRET)))
    with pytest.raises(InvalidSettings, match="there is no passphrase"):
        Authority.load(directory)


def test_what_is_loaded_with_a_passphrase_is_saved_with_it(directory, tmp_path):
    Authority.load(directory, Passphrase(SECRET)).save(tmp_path / "copy")
    assert b"ENCRYPTED" in (tmp_path / "copy" / "ca.key").read_bytes()
    assert signs(Authority.load(tmp_path / "copy", Passphrase(SECRET)))


def test_without_its_passphrase_the_key_cannot_be_used(directory):
    with pytest.raises(InvalidSettings) as raised:
        Authority.load(directory)
    assert str(raised.value) == (
        f"{directory}/ca.key: key is encrypted, but there is no passphrase;"
        " provide its passphrase in a file or in KUBELEND_CA_PASSPHRASE"
    )


@pytest.mark.parametrize("attempt", range(20))
def test_a_wrong_passphrase_is_said_to_be_wrong_and_not_repeated(directory, attempt):
    # Many: by chance a wrong one makes padding that looks right, and other errors inside.
    with pytest.raises(InvalidSettings, match="passphrase is wrong, or the key is corrupt") as seen:
        Authority.load(directory, Passphrase(f"hunter{attempt}"))
    assert "hunter" not in str(seen.value)


def test_a_passphrase_for_a_plain_key_is_an_error_for_somebody_thinks_it_is_encrypted(tmp_path):
    Authority.create("test-ca", now=NOW).save(tmp_path)
    with pytest.raises(
        InvalidSettings, match="key is not encrypted, but there is a passphrase"
    ) as e:
        Authority.load(tmp_path, Passphrase(SECRET))
    assert "--new-passphrase-file" in e.value.hint


def test_a_holders_encrypted_key_is_not_taken_for_a_plain_one(directory, tmp_path):
    encrypted = (directory / "ca.key").read_bytes()
    path = written(tmp_path / "tls.key", encrypted)
    with pytest.raises(InvalidSettings, match="key is encrypted"):
        files.load_key(path)


def test_a_passphrase_is_not_shown_by_what_prints_it(directory):
    authority = Authority.load(directory, Passphrase(SECRET))
    shown = f"{authority} {authority!r} {authority.passphrase} {authority.passphrase!r}"
    assert "horse" not in shown
    assert "Passphrase(...)" in shown


@pytest.mark.parametrize(
    "content, secret",
    [
        (b"a b", b"a b"),
        (b"a b\n", b"a b"),
        (b"a b\r\n", b"a b"),
        (b" a \n", b" a "),
        (b"\xff\n", b"\xff"),
        (b"x" * 1023, b"x" * 1023),
    ],
    ids=["bare", "line", "windows", "spaces", "no text", "longest"],
)
def test_a_file_holds_one_line(tmp_path, content, secret):
    assert passphrases.passphrase_from_file(written(tmp_path / "file", content)).reveal() == secret


@pytest.mark.parametrize(
    "content, complaint",
    [
        (b"", "file is empty"),
        (b"\n", "file is empty"),
        (b"hunter\nhunter2\n", "file: passphrase has more than one line"),
        (b"hunter\n\n", "file: passphrase has more than one line"),
        (b"hunter" * 200, "file: passphrase exceeds 1023 bytes"),
    ],
    ids=["empty", "white space", "two lines", "empty line", "long"],
)
def test_what_is_no_passphrase_is_refused_and_not_repeated(tmp_path, content, complaint):
    with pytest.raises(InvalidSettings, match=complaint) as raised:
        passphrases.passphrase_from_file(written(tmp_path / "file", content))
    assert "hunter" not in str(raised.value)


def test_a_file_that_others_can_read_is_refused(tmp_path):
    file = written(tmp_path / "file", b"hunter2", mode=0o644)
    with pytest.raises(InvalidSettings, match=r"holds a passphrase and has mode 0644.*chmod"):
        passphrases.passphrase_from_file(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidSettings, match="file is missing"):
        passphrases.passphrase_from_file(tmp_path / "file")


def test_a_pipe_can_hold_it_too():
    reading, writing = os.pipe()
    os.write(writing, b"from a password manager\n")
    os.close(writing)
    try:
        found = passphrases.passphrase_from_file(Path(f"/dev/fd/{reading}"))
    finally:
        os.close(reading)
    assert found.reveal() == b"from a password manager"


def test_the_file_comes_before_the_variable_and_either_may_be_missing(tmp_path):
    file = written(tmp_path / "file", b"from the file")
    variable = {"KUBELEND_CA_PASSPHRASE": "from the variable"}
    both, one = (
        passphrases.load_passphrase(file, variable),
        passphrases.load_passphrase(None, variable),
    )
    assert both is not None
    assert both.reveal() == b"from the file"
    assert one is not None
    assert one.reveal() == b"from the variable"
    assert passphrases.load_passphrase(None, {}) is None
    assert passphrases.load_passphrase(None, {"KUBELEND_CA_PASSPHRASE": ""}) is None


def test_a_variable_that_is_no_passphrase_is_named_and_not_repeated():
    with pytest.raises(InvalidSettings) as raised:
        passphrases.load_passphrase(None, {"KUBELEND_CA_PASSPHRASE": "hunter\n2"})
    assert str(raised.value) == "KUBELEND_CA_PASSPHRASE: passphrase has more than one line"
