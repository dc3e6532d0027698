"""Rotation of an authority and the passphrase of its key: each gap usable, and no secret shown."""

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID

import openssl
from kubelend.core.errors import InvalidSettings
from kubelend.kits import files
from kubelend.pki import authority, identity, keys, passphrases
from kubelend.pki import files as pki_files
from kubelend.pki import x509 as pki_x509
from kubelend.pki.authority import AUTHORITY_LIFETIME, Authority
from kubelend.pki.keys import Algorithm
from kubelend.pki.passphrases import Passphrase

NOW = datetime.now(UTC).replace(microsecond=0)
DAY = timedelta(days=1)
SERVER, CLIENT = identity.server_profile(), identity.client_profile("agent-cluster-1")


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


def test_the_new_authority_signs_and_the_old_is_trusted_beside_it(directory):
    old = Authority.load(directory)
    before = (directory / "ca.key").read_bytes()
    new = authority.rotate_authority(directory, now=NOW)
    loaded = Authority.load(directory)
    assert loaded.certificate == new.certificate
    assert loaded.trusted == (new.certificate, old.certificate)
    assert names(loaded.trusted) == ["kubelend-2", "kubelend"]
    assert loaded.is_rotating
    assert set(contents(directory)) == {"ca.crt", "ca.key", "cross.crt"}
    assert before not in contents(directory).values()
    assert (directory / "ca.key").stat().st_mode & 0o777 == 0o600


def test_what_is_issued_carries_the_cross_certificate_and_both_authorities(directory, tmp_path):
    new = authority.rotate_authority(directory, now=NOW)
    made = Authority.load(directory).issue(CLIENT, now=NOW)
    pki_files.save_credentials(tmp_path / "a", made)
    assert pki_x509.is_issued_by(made.certificate, new.certificate)
    assert made.chain == new.chain == pki_files.load_certificates(directory / "cross.crt")
    assert pki_files.load_certificates(tmp_path / "a" / "tls.crt") == (made.certificate, *new.chain)
    assert pki_files.load_certificates(tmp_path / "a" / "ca.crt") == new.trusted


@openssl.needed
@pytest.mark.parametrize("before", Algorithm)
@pytest.mark.parametrize("after", Algorithm)
def test_openssl_follows_from_either_authority(tmp_path, before, after):
    ca = tmp_path / "ca"
    old = Authority.create("kubelend", now=NOW - DAY, algorithm=before)
    old.save(ca)
    new = authority.rotate_authority(ca, now=NOW, algorithm=after)
    only_old = bundle(tmp_path / "old", old.certificate)
    only_new = bundle(tmp_path / "new", new.certificate)
    for profile, purpose, other in [
        (CLIENT, "sslclient", "sslserver"),
        (SERVER, "sslserver", "sslclient"),
    ]:
        pki_files.save_credentials(tmp_path / purpose, Authority.load(ca).issue(profile, now=NOW))
        leaf = tmp_path / purpose / "tls.crt"
        for trusted in (only_old, only_new, ca / "ca.crt"):
            assert openssl.accepts(leaf, trusted, purpose=purpose)
            assert not openssl.accepts(leaf, trusted, purpose=other)
        # The cross certificate behind the leaf leads there from the old one.
        alone = bundle(tmp_path / "leaf", pki_files.load_certificates(leaf)[0])
        assert not openssl.accepts(alone, only_old, purpose=purpose)


@openssl.needed
def test_the_cross_certificate_is_an_authoritys_and_names_both_keys(directory):
    new = authority.rotate_authority(directory, now=NOW)
    text = openssl.described(directory / "cross.crt")
    assert "Subject: CN=kubelend-2 " in text
    assert "Issuer: CN=kubelend " in text
    assert "X509v3 Basic Constraints: critical CA:TRUE" in text
    assert "X509v3 Key Usage: critical Certificate Sign, CRL Sign " in text
    assert pki_x509.have_same_key(new.chain[0], new.certificate)


def test_the_cross_certificate_ends_with_the_old_authority_and_the_new_lives_on(tmp_path):
    Authority.create("kubelend", 10 * DAY, now=NOW).save(tmp_path)
    new = authority.rotate_authority(tmp_path, now=NOW + DAY)
    assert new.certificate.not_valid_after_utc == NOW + DAY + AUTHORITY_LIFETIME
    assert new.chain[0].not_valid_after_utc == NOW + 10 * DAY


@pytest.mark.parametrize("kind", Algorithm)
def test_the_new_key_is_of_the_old_kind_by_default(tmp_path, kind):
    Authority.create("kubelend", now=NOW, algorithm=kind).save(tmp_path)
    assert keys.algorithm_of_successor(authority.rotate_authority(tmp_path, now=NOW).key) is kind


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
def test_the_new_name_counts_on(old, new):
    assert names([Authority.create(old, now=NOW).successor(now=NOW).certificate]) == [new]


def test_a_name_can_be_chosen_even_the_same(directory):
    old = Authority.load(directory)
    new = authority.rotate_authority(directory, now=NOW, name="kubelend")
    assert Authority.load(directory).certificate == new.certificate
    finished, dropped = authority.finish_rotation(directory)
    assert (finished.trusted, dropped) == ((new.certificate,), (old.certificate,))


def test_a_second_rotation_is_refused_until_the_first_is_finished(directory):
    authority.rotate_authority(directory, now=NOW)
    before = contents(directory)
    with pytest.raises(InvalidSettings, match=r"in progress.*`kubelend ca rotate --finish --yes`"):
        authority.rotate_authority(directory, now=NOW)
    assert contents(directory) == before
    authority.finish_rotation(directory)
    again = authority.rotate_authority(directory, now=NOW)
    assert names(again.trusted) == ["kubelend-3", "kubelend-2"]


def test_to_finish_drops_the_old_authority_and_the_cross_certificate_and_nothing_else(directory):
    friend = Authority.create("friend", now=NOW).certificate
    old = Authority.load(directory)
    bundle(directory / "ca.crt", old.certificate, friend)
    new = authority.rotate_authority(directory, now=NOW)
    finished, dropped = authority.finish_rotation(directory)
    assert dropped == (old.certificate,)
    assert finished.trusted == (new.certificate, friend)
    assert set(contents(directory)) == {"ca.crt", "ca.key", "dropped.crt"}
    loaded = Authority.load(directory)
    assert loaded.certificate == new.certificate
    assert loaded.trusted == (new.certificate, friend)
    assert not loaded.is_rotating
    assert loaded.issue(CLIENT, now=NOW).chain == ()


def test_all_that_were_ever_dropped_are_kept_for_who_was_away(directory):
    for _ in range(2):
        authority.rotate_authority(directory, now=NOW)
        authority.finish_rotation(directory)
    assert names(pki_files.load_dropped(directory)) == ["kubelend", "kubelend-2"]
    assert (directory / "dropped.crt").stat().st_mode & 0o777 == 0o644


def test_there_is_nothing_to_finish_when_nothing_was_begun(directory):
    with pytest.raises(InvalidSettings, match="no rotation in progress"):
        authority.finish_rotation(directory)
    assert set(contents(directory)) == {"ca.crt", "ca.key"}


def test_the_passphrase_goes_over_to_the_new_key(tmp_path):
    secret = Passphrase("old")
    Authority.create("kubelend", now=NOW, passphrase=secret).save(tmp_path)
    with pytest.raises(InvalidSettings, match="there is no passphrase"):
        authority.rotate_authority(tmp_path, now=NOW)
    authority.rotate_authority(tmp_path, now=NOW, passphrase=secret)
    assert keys.is_encrypted((tmp_path / "ca.key").read_bytes())
    authority.finish_rotation(tmp_path, secret)
    assert names(Authority.load(tmp_path, secret).trusted) == ["kubelend-2"]


@pytest.mark.parametrize("before", [None, Passphrase("old")], ids=["plain", "encrypted"])
def test_a_rotation_can_bring_another_passphrase(tmp_path, before):
    Authority.create("kubelend", now=NOW, passphrase=before).save(tmp_path)
    secrets = {"passphrase": before, "new_passphrase": Passphrase("new")}
    authority.rotate_authority(tmp_path, now=NOW, **secrets)
    assert Authority.load(tmp_path, Passphrase("new")).is_rotating
    with pytest.raises(InvalidSettings):
        Authority.load(tmp_path, before)


def test_an_authority_that_has_ended_has_no_successor(tmp_path):
    Authority.create("kubelend", DAY, now=NOW - 2 * DAY).save(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(InvalidSettings, match=r"expired at .*`kubelend ca init`"):
        authority.rotate_authority(tmp_path, now=NOW)
    assert contents(tmp_path) == before


def test_an_intermediate_is_rotated_by_the_authority_above_it(tmp_path):
    root = Authority.create("root", now=NOW)
    below = root.successor(now=NOW, name="below")
    pki_files.save_authority(tmp_path, [*below.chain, root.certificate], below.key)
    with pytest.raises(InvalidSettings, match="is an intermediate"):
        authority.rotate_authority(tmp_path, now=NOW)


def test_cert_managers_files_are_left_to_cert_manager(tmp_path, directory):
    for ours, theirs in [("ca.crt", "tls.crt"), ("ca.key", "tls.key")]:
        (directory / ours).rename(directory / theirs)
    with pytest.raises(InvalidSettings, match="is managed by cert-manager"):
        authority.rotate_authority(directory, now=NOW)


def test_an_authority_that_may_sign_no_other_is_not_rotated(tmp_path):
    key = keys.generate(Algorithm.P256)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "strict")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, NOW, NOW + DAY)
    builder = builder.add_extension(x509.BasicConstraints(True, 0), critical=True)
    pki_files.save_authority(tmp_path, [builder.sign(key, keys.digest_for(key))], key)
    with pytest.raises(InvalidSettings, match="path length 0"):
        authority.rotate_authority(tmp_path, now=NOW)


def test_two_rotations_at_once_do_not_mix(directory):
    with files.lock_directory(directory):
        with pytest.raises(InvalidSettings, match="is locked by another process"):
            authority.rotate_authority(directory, now=NOW)
        with pytest.raises(InvalidSettings, match="is locked by another process"):
            authority.finish_rotation(directory)
    assert authority.rotate_authority(directory, now=NOW).is_rotating


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InvalidSettings, match="nowhere cannot be opened: No such file"):
        authority.rotate_authority(tmp_path / "nowhere", now=NOW)


# Rotates between two files that the very same load reads.
OVERTAKEN = """
import sys
from datetime import UTC, datetime
from pathlib import Path
from kubelend.pki.authority import Authority, rotate_authority

directory, left = Path(sys.argv[1]), int(sys.argv[2])

def overtake(event, arguments):
    global left
    if event == "open" and str(arguments[0]).startswith(str(directory)):
        left -= 1
        if left == 0:
            rotate_authority(directory, now=datetime.now(UTC))

sys.addaudithook(overtake)
print(Authority.load(directory).certificate.subject.rfc4514_string(), left <= 0)
"""


@pytest.mark.parametrize(
    "place, signer", [(1, "kubelend-2"), (2, "kubelend")], ids=["before", "between"]
)
def test_whoever_loads_during_a_rotation_gets_the_old_or_the_new(directory, place, signer):
    command = [sys.executable, "-c", OVERTAKEN, directory, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"CN={signer} True\n", "")
    assert Authority.load(directory).is_rotating


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
