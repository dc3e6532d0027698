"""Rotation of an authority and the passphrase of its key: each gap usable, and no secret shown."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.x509.oid import NameOID

import openssl
from certificates import intermediate
from kubelend.core.errors import InvalidSettings
from kubelend.kits import files
from kubelend.pki import authority, identity, keys, passphrases, tokens
from kubelend.pki import files as pki_files
from kubelend.pki import x509 as pki_x509
from kubelend.pki.authority import Authority
from kubelend.pki.keys import Algorithm
from kubelend.pki.passphrases import Passphrase

NOW = datetime.now(UTC).replace(microsecond=0)
DAY = timedelta(days=1)
CLIENT = identity.client_profile("agent-cluster-1")


@pytest.fixture
def directory(tmp_path):
    Authority.create("kubelend", now=NOW - DAY).save(tmp_path / "ca")
    return tmp_path / "ca"


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def names(certificates):
    return [
        each.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value for each in certificates
    ]


def bundle(path, *certificates):
    path.write_bytes(pki_files.to_pem(certificates))
    return path


def rotated(directory, **parameters):
    """The first two steps."""
    authority.start_rotation(directory, now=NOW, **parameters)
    return authority.finish_rotation(directory)


def drop(directory, certificate, *passphrase):
    return authority.drop_authority(directory, tokens.ca_pin(certificate), *passphrase)


def test_the_new_authority_is_trusted_then_signs_and_then_the_old_one_is_dropped(directory):
    friend = Authority.create("friend", now=NOW).certificate
    old = Authority.load(directory)
    bundle(directory / "ca.crt", old.certificate, friend)
    before = (directory / "ca.key").read_bytes()
    new = authority.start_rotation(directory, now=NOW)
    assert authority.next_authority(directory) == new
    loaded = Authority.load(directory)
    assert loaded.certificate == old.certificate
    assert names(loaded.issue(CLIENT, now=NOW).authorities) == ["kubelend", "friend", "kubelend-2"]
    assert (directory / "next.key").stat().st_mode & 0o777 == 0o600
    assert authority.finish_rotation(directory) == new
    assert before not in contents(directory).values()
    issued = Authority.load(directory).issue(CLIENT, now=NOW)
    assert pki_x509.is_issued_by(issued.certificate, new)
    assert (names(issued.authorities), issued.chain) == (["kubelend-2", "kubelend", "friend"], ())
    assert drop(directory, old.certificate) == old.certificate
    assert Authority.load(directory).trusted == (new, friend)
    assert set(contents(directory)) == {"ca.crt", "ca.key"}
    assert (directory / "ca.key").stat().st_mode & 0o777 == 0o600


@openssl.needed
@pytest.mark.parametrize(
    "before, after",
    [
        (Algorithm.P256, None),
        (Algorithm.RSA, None),
        (Algorithm.P256, Algorithm.RSA),
        (Algorithm.RSA, Algorithm.P256),
    ],
)
def test_openssl_follows_with_the_bundle_and_the_new_key_is_of_the_old_kind_by_default(
    tmp_path, before, after
):
    ca = tmp_path / "ca"
    Authority.create("kubelend", now=NOW - DAY, algorithm=before).save(ca)
    authority.start_rotation(ca, now=NOW, algorithm=after)
    trusted = bundle(tmp_path / "both", *Authority.load(ca).trusted)
    for step in ("old", "new"):
        issued = Authority.load(ca).issue(CLIENT, now=NOW)
        pki_files.save_credentials(tmp_path / step, issued)
        assert openssl.accepts(tmp_path / step / "tls.crt", trusted, purpose="sslclient")
        if step == "old":
            authority.finish_rotation(ca)
    assert keys.algorithm_of_successor(Authority.load(ca).key) is (after or before)


@pytest.mark.parametrize(
    "old, new",
    [
        ("kubelend", "kubelend-2"),
        ("kubelend-9", "kubelend-10"),
        ("x" * 64, "x" * 62 + "-2"),
        ("é" * 32, "é" * 31 + "-2"),
        ("-1", "-1-2"),
        ("n-1234567", "n-1234567-2"),
    ],
)
def test_the_new_name_counts_on(tmp_path, old, new):
    Authority.create(old, now=NOW).save(tmp_path)
    assert names([authority.start_rotation(tmp_path, now=NOW)]) == [new]


def test_a_name_can_be_chosen_even_the_same(directory):
    old, new = Authority.load(directory), rotated(directory, name="kubelend")
    assert Authority.load(directory).certificate == new
    assert drop(directory, old.certificate) == old.certificate


def test_a_second_rotation_is_refused_until_the_first_one_signs(directory):
    authority.start_rotation(directory, now=NOW)
    before = contents(directory)
    with pytest.raises(InvalidSettings, match=r"in progress.*`kubelend ca rotate --sign`"):
        authority.start_rotation(directory, now=NOW)
    assert contents(directory) == before
    authority.finish_rotation(directory)
    assert names([authority.start_rotation(directory, now=NOW)]) == ["kubelend-3"]


def test_the_one_that_signs_now_or_next_is_not_dropped_and_others_are_unknown(directory):
    old, new = Authority.load(directory).certificate, authority.start_rotation(directory, now=NOW)
    before = contents(directory)
    for certificate in (old, new):
        with pytest.raises(InvalidSettings, match="signs, or will sign next"):
            drop(directory, certificate)
    with pytest.raises(InvalidSettings, match="has no authority with hash sha256:"):
        drop(directory, Authority.create("other", now=NOW).certificate)
    assert contents(directory) == before


def test_there_is_nothing_to_sign_with_when_nothing_was_begun(directory):
    with pytest.raises(InvalidSettings, match="no next authority"):
        authority.finish_rotation(directory)


def test_a_start_that_was_interrupted_is_continued_and_signs_nothing_before(directory):
    new = authority.start_rotation(directory, now=NOW)
    old = Authority.load(directory).certificate
    bundle(directory / "ca.crt", old)  # as before the bundle was written
    with pytest.raises(InvalidSettings, match="no next authority"):
        authority.finish_rotation(directory)
    assert authority.start_rotation(directory, now=NOW) == new
    assert authority.next_authority(directory) == new


@pytest.mark.parametrize("before", [None, Passphrase("old")], ids=["plain", "encrypted"])
@pytest.mark.parametrize("after", [None, Passphrase("new")], ids=["as before", "another"])
def test_the_passphrase_goes_over_to_the_new_key_or_is_another(tmp_path, before, after):
    Authority.create("kubelend", now=NOW, passphrase=before).save(tmp_path)
    old = Authority.load(tmp_path, before).certificate
    rotated(tmp_path, passphrase=before, new_passphrase=after)
    assert keys.is_encrypted((tmp_path / "ca.key").read_bytes()) is bool(after or before)
    assert names(Authority.load(tmp_path, after or before).trusted) == ["kubelend-2", "kubelend"]
    assert drop(tmp_path, old, after or before) == old
    if after:
        with pytest.raises(InvalidSettings):
            Authority.load(tmp_path, before)


def test_an_intermediate_is_rotated_by_the_authority_above_it(tmp_path):
    below = intermediate(Authority.create("root", now=NOW), "below", NOW)
    pki_files.save_authority(tmp_path, below.trusted, below.key)
    with pytest.raises(InvalidSettings, match="is an intermediate"):
        authority.start_rotation(tmp_path, now=NOW)


def test_cert_managers_files_are_left_to_cert_manager(directory):
    for ours, theirs in [("ca.crt", "tls.crt"), ("ca.key", "tls.key")]:
        (directory / ours).rename(directory / theirs)
    with pytest.raises(InvalidSettings, match="is managed by cert-manager"):
        authority.start_rotation(directory, now=NOW)


def test_two_rotations_at_once_do_not_mix(directory):
    pin = tokens.ca_pin(Authority.load(directory).certificate)
    with files.lock_directory(directory):
        for step in (
            lambda: authority.start_rotation(directory, now=NOW),
            lambda: authority.finish_rotation(directory),
            lambda: authority.drop_authority(directory, pin),
        ):
            with pytest.raises(InvalidSettings, match="is locked by another process"):
                step()


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InvalidSettings, match="nowhere cannot be opened: No such file"):
        authority.start_rotation(tmp_path / "nowhere", now=NOW)


# -- passphrases

SECRET = "corre\u00e7t horse"


@pytest.fixture
def locked(tmp_path):
    Authority.create("test-ca", now=NOW, passphrase=Passphrase(SECRET)).save(tmp_path / "ca")
    return tmp_path / "ca"


def written(path, content, mode=0o600):
    path.write_bytes(content)
    path.chmod(mode)
    return path


def signs(authority):
    issued = authority.issue(identity.client_profile("a"), now=NOW)
    return pki_x509.is_issued_by(issued.certificate, authority.certificate)


def test_the_key_is_encrypted_on_disk_comes_back_and_stays_encrypted(locked, tmp_path):
    assert b"-----BEGIN ENCRYPTED PRIVATE KEY-----" in (locked / "ca.key").read_bytes()
    Authority.load(locked, Passphrase(SECRET)).save(tmp_path / "copy")
    assert b"ENCRYPTED" in (tmp_path / "copy" / "ca.key").read_bytes()
    assert signs(Authority.load(tmp_path / "copy", Passphrase(SECRET)))


@openssl.needed
@pytest.mark.parametrize("algorithm", Algorithm)
def test_openssl_opens_the_key_with_the_same_file(tmp_path, algorithm):
    file = written(tmp_path / "passphrase", SECRET.encode() + b"\n")
    secret = passphrases.passphrase_from_file(file)
    Authority.create("test-ca", now=NOW, algorithm=algorithm, passphrase=secret).save(tmp_path)
    opened = ("pkey", "-in", tmp_path / "ca.key", "-passin")
    key = openssl.said(*opened, f"file:{file}", "-pubout").strip()
    certificate = openssl.said("x509", "-in", tmp_path / "ca.crt", "-noout", "-pubkey").strip()
    assert key == certificate
    assert openssl.run(*opened, "pass:wrong", "-noout").returncode != 0


@openssl.needed
def test_an_older_form_of_encrypted_key_is_read_too(locked):
    old = openssl.said(
        *("ec", "-in", locked / "ca.key", "-passin", f"pass:{SECRET}"),
        *("-aes256", "-passout", f"pass:{SECRET}"),
    )
    assert "Proc-Type: 4,ENCRYPTED" in old
    (locked / "ca.key").write_text(old)
    assert signs(Authority.load(locked, Passphrase(SECRET)))
    with pytest.raises(InvalidSettings, match="there is no passphrase"):
        Authority.load(locked)


def test_without_its_passphrase_the_key_cannot_be_used(locked):
    with pytest.raises(InvalidSettings) as raised:
        Authority.load(locked)
    assert str(raised.value) == (
        f"{locked}/ca.key: key is encrypted, but there is no passphrase;"
        " provide its passphrase in a file or in KUBELEND_CA_PASSPHRASE"
    )


def test_a_wrong_passphrase_is_said_to_be_wrong_and_not_repeated(locked):
    # Many: by chance a wrong one makes padding that looks right, and other errors inside.
    problem = "passphrase is wrong, or the key is corrupt"
    for attempt in range(20):
        with pytest.raises(InvalidSettings, match=problem) as seen:
            Authority.load(locked, Passphrase(f"hunter{attempt}"))
        assert "hunter" not in str(seen.value)


def test_a_passphrase_for_a_plain_key_is_an_error_for_somebody_thinks_it_is_encrypted(tmp_path):
    Authority.create("test-ca", now=NOW).save(tmp_path)
    problem = "key is not encrypted, but there is a passphrase"
    with pytest.raises(InvalidSettings, match=problem) as raised:
        Authority.load(tmp_path, Passphrase(SECRET))
    assert "--new-passphrase-file" in raised.value.hint


def test_a_passphrase_is_not_shown_by_what_prints_it(locked):
    authority = Authority.load(locked, Passphrase(SECRET))
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
    for path, expected in ((file, b"from the file"), (None, b"from the variable")):
        found = passphrases.load_passphrase(path, variable)
        assert found is not None
        assert found.reveal() == expected
    assert passphrases.load_passphrase(None, {}) is None
    assert passphrases.load_passphrase(None, {"KUBELEND_CA_PASSPHRASE": ""}) is None


def test_a_variable_that_is_no_passphrase_is_named_and_not_repeated():
    with pytest.raises(InvalidSettings) as raised:
        passphrases.load_passphrase(None, {"KUBELEND_CA_PASSPHRASE": "hunter\n2"})
    assert str(raised.value) == "KUBELEND_CA_PASSPHRASE: passphrase has more than one line"
