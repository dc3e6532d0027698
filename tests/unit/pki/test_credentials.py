"""Credentials: files that belong together, and who the holder of a certificate is."""

from datetime import UTC, datetime
from functools import partial

import pytest

from certificates import Certificates
from kubelend.core.errors import Forbidden, InvalidIdentity, InvalidSettings
from kubelend.core.lifecycle import Role
from kubelend.pki import files, identity, keys
from kubelend.pki.authority import Authority
from kubelend.pki.identity import Caller
from kubelend.pki.keys import Algorithm
from kubelend.pki.passphrases import Passphrase

NOW = datetime.now(UTC)


@pytest.fixture
def authority():
    return Authority.create("test-ca", now=NOW)


@pytest.fixture
def credentials(authority):
    return authority.issue(identity.client_profile("agent-cluster-1"), now=NOW)


def modes(directory):
    return {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_keys_are_for_their_owner_and_certificates_for_all(tmp_path, authority, credentials):
    authority.save(tmp_path / "ca")
    files.save_credentials(tmp_path / "deep" / "a", credentials)
    assert modes(tmp_path / "ca") == {"ca.crt": 0o644, "ca.key": 0o600}
    assert modes(tmp_path / "deep" / "a") == {"tls.crt": 0o644, "tls.key": 0o600, "ca.crt": 0o644}
    assert (tmp_path / "deep" / "a").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "save, existing",
    [
        *(("credentials", name) for name in ("tls.key", "tls.crt", "ca.crt")),
        *(("authority", name) for name in ("ca.key", "ca.crt")),
    ],
)
def test_no_file_is_written_where_another_identity_is(
    tmp_path, authority, credentials, save, existing
):
    (tmp_path / existing).write_bytes(b"precious")
    save_credentials = partial(files.save_credentials, credentials=credentials)
    function = authority.save if save == "authority" else save_credentials
    with pytest.raises(InvalidSettings, match=f"{existing} (would be overwritten|already exists)"):
        function(tmp_path)
    assert contents(tmp_path) == {existing: b"precious"}


def test_credentials_come_back_as_they_were_saved_and_are_replaced_if_asked(
    tmp_path, authority, credentials
):
    files.save_credentials(tmp_path, authority.issue(identity.client_profile("b"), now=NOW))
    files.save_credentials(tmp_path, credentials, overwrite=True)
    loaded = files.load_credentials(tmp_path)
    assert loaded.certificate == credentials.certificate
    assert loaded.authorities == credentials.authorities
    assert files.is_certificate_of(loaded.certificate, credentials.key)


def test_an_authoritys_own_directory_can_be_the_brokers_too(tmp_path, authority):
    authority.save(tmp_path)
    files.save_credentials(tmp_path, authority.issue(identity.server_profile(), now=NOW))
    assert set(contents(tmp_path)) == {"ca.crt", "ca.key", "tls.crt", "tls.key"}
    assert Authority.load(tmp_path).certificate == authority.certificate


def test_a_directory_that_cannot_be_made_is_named(tmp_path, credentials):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidSettings, match="file/a cannot be created: Not a directory"):
        files.save_credentials(tmp_path / "file" / "a", credentials)


OTHER_KEY = keys.generate(Algorithm.P256)


@pytest.mark.parametrize(
    "path, content, problem",
    [
        ("a/tls.crt", None, "tls.crt is missing; .*`kubelend ca issue`"),
        ("a/tls.key", None, "tls.key is missing; .*`kubelend ca issue`"),
        ("a/ca.crt", None, "ca.crt is missing; .*`kubelend ca issue`"),
        ("ca/ca.crt", None, "ca.crt is missing; .*`kubelend ca init`"),
        ("ca/ca.key", None, "ca.key is missing; .*`kubelend ca init`"),
        ("a/tls.crt", b"\x00garbage", r"tls\.crt contains no certificate in PEM form"),
        ("a/ca.crt", b"\x00garbage", r"ca\.crt contains no certificate in PEM form"),
        ("a/tls.key", b"\x00garbage", r"tls\.key: not a private key in PEM form"),
        ("a/tls.key", keys.to_pem(OTHER_KEY), r"a/tls\.crt and .*a/tls\.key do not match"),
        ("ca/ca.key", keys.to_pem(OTHER_KEY), r"ca\.crt and ca\.key in .* do not match"),
        ("a/tls.key", keys.to_pem(OTHER_KEY, Passphrase("x")), r"tls\.key: key is encrypted"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_file_that_is_missing_or_does_not_fit_is_named(
    tmp_path, authority, credentials, path, content, problem
):
    files.save_credentials(tmp_path / "a", credentials)
    authority.save(tmp_path / "ca")
    if content is None:
        (tmp_path / path).unlink()
    else:
        (tmp_path / path).write_bytes(content)
    load = files.load_credentials if path.startswith("a/") else Authority.load
    with pytest.raises(InvalidSettings, match=problem):
        load((tmp_path / path).parent)


def test_an_authoritys_key_that_others_can_read_is_refused(tmp_path, authority):
    authority.save(tmp_path)
    (tmp_path / "ca.key").chmod(0o644)
    problem = r"mode 0644, so other users can access it; chmod 600 .*ca"
    with pytest.raises(InvalidSettings, match=problem):
        Authority.load(tmp_path)


@pytest.mark.parametrize("cut", [0.3, 0.7, 0.99])
def test_a_certificate_cut_off_behind_a_whole_one_is_not_passed_over(tmp_path, authority, cut):
    authority.save(tmp_path)
    whole = (tmp_path / "ca.crt").read_bytes()
    (tmp_path / "ca.crt").write_bytes(whole + whole[: int(len(whole) * cut)])
    with pytest.raises(InvalidSettings, match=r"ca\.crt is truncated or corrupt"):
        Authority.load(tmp_path)


def test_no_key_is_shown_by_what_prints_credentials(authority, credentials):
    shown = f"{credentials!r} {credentials} {authority!r} {authority}"
    assert "agent-cluster-1" in shown
    assert "PRIVATE" not in shown
    assert str(credentials.key.private_numbers().private_value) not in shown


def peercert(*attributes):
    """What `getpeercert()` tells of a subject with these (attribute, value) pairs."""
    names = {"CN": "commonName", "O": "organizationName", "OU": "organizationalUnitName"}
    return {"subject": tuple(((names[key], value),) for key, value in attributes)}


@pytest.mark.parametrize(
    "organisations, role",
    [
        ([], Role.CLUSTER),
        (["LiqoResourceBroker"], Role.CLUSTER),
        (["LiqoResourceAgent"], Role.CLUSTER),
        (["kubelend:admin"], Role.ADMIN),
        (["kubelend:viewer"], Role.VIEWER),
        (["Example Ltd", "kubelend:viewer"], Role.VIEWER),
        (["kubelend:viewer", "kubelend:admin"], Role.ADMIN),
        (["kubelend:admin", "kubelend:viewer"], Role.ADMIN),
        (["kubelend:Admin"], Role.CLUSTER),
        (["kubelend:admin "], Role.CLUSTER),
        (["kubelend:cluster"], Role.CLUSTER),
    ],
    ids=str,
)
def test_the_organisation_gives_the_role(organisations, role):
    subject = peercert(*(("O", each) for each in organisations), ("CN", "someone"))
    assert identity.caller_from_peercert(subject) == Caller("someone", role)


ONE_NAME = {"subject": ((("commonName", "alice"), ("organizationName", "kubelend:admin")),)}


@pytest.mark.parametrize(
    "subject, caller",
    [
        (peercert(("CN", "alice"), ("O", "kubelend:admin")), Caller("alice", Role.ADMIN)),
        (ONE_NAME, Caller("alice", Role.ADMIN)),
        (peercert(("OU", "kubelend:admin"), ("CN", "a")), Caller("a")),
        (peercert(("CN", "No DNS_label!")), Caller("No DNS_label!")),
        (peercert(("CN", "Zürich")), Caller("Zürich")),
        (peercert(("CN", "a" * 64)), Caller("a" * 64)),
    ],
    ids=["name first", "one relative name", "unit is no role", "no label", "umlaut", "longest"],
)
def test_a_subject_with_one_printable_name_is_a_caller(subject, caller):
    assert identity.caller_from_peercert(subject, broker_names={"liqo-resource-broker"}) == caller


@pytest.mark.parametrize(
    "subject, complaint",
    [
        ({}, "no common name"),
        (peercert(), "no common name"),
        (peercert(("O", "kubelend:admin")), "no common name"),
        (peercert(("CN", "")), "empty"),
        (peercert(("CN", " ")), "empty"),
        (peercert(("CN", "a"), ("CN", "b")), "several common names"),
        (peercert(("CN", "a"), ("CN", "a")), "several common names"),
        (peercert(("CN", ""), ("CN", "a")), "several common names"),
        (peercert(("CN", "a\r\nb")), r"'a\\r\\nb' contains control or invisible"),
        (peercert(("CN", "a\x00b")), "control or invisible"),
        (peercert(("CN", "a\u202eb")), "control or invisible"),
        (peercert(("CN", "a ")), "begins or ends with a space"),
        (peercert(("CN", "a" * 65)), "65 characters; at most 64"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_subject_without_one_usable_name_is_refused(subject, complaint):
    with pytest.raises(InvalidIdentity, match=complaint):
        identity.caller_from_peercert(subject)


@pytest.mark.parametrize("organisation", ["LiqoResourceBroker", "kubelend:admin", "x"])
def test_the_brokers_own_certificate_is_no_caller(tmp_path, organisation):
    own = files.common_names(Certificates(tmp_path).server())
    subject = peercert(("O", organisation), ("CN", "liqo-resource-broker"))
    with pytest.raises(InvalidIdentity, match="is the broker's own name"):
        identity.caller_from_peercert(subject, broker_names=own)


@pytest.mark.parametrize("role", [Role.ADMIN, Role.VIEWER])
def test_a_person_named_as_a_cluster_does_not_act_for_it(role):
    with pytest.raises(Forbidden, match=f"agent-cluster-1 is not a cluster but a {role}"):
        _ = Caller("agent-cluster-1", role).cluster
