"""Credentials: files that belong together, and who the holder of a certificate is."""

from datetime import UTC, datetime

import pytest
from cryptography.hazmat.primitives import serialization

from certificates import Certificates
from kubelend.core.errors import Forbidden, InvalidIdentity, InvalidSettings
from kubelend.core.lifecycle import Role
from kubelend.pki import files, identity
from kubelend.pki.authority import Authority
from kubelend.pki.identity import Caller

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


def test_credentials_come_back_as_they_were_saved(tmp_path, credentials):
    files.save_credentials(tmp_path, credentials)
    loaded = files.load_credentials(tmp_path)
    assert loaded.certificate == credentials.certificate
    assert loaded.authorities == credentials.authorities
    assert files.is_certificate_of(loaded.certificate, credentials.key)


@pytest.mark.parametrize("existing", ["tls.key", "tls.crt", "ca.crt"])
def test_no_file_is_written_where_another_identity_is(tmp_path, credentials, existing):
    (tmp_path / existing).write_bytes(b"precious")
    with pytest.raises(InvalidSettings, match=f"{existing} (would be overwritten|already exists)"):
        files.save_credentials(tmp_path, credentials)
    assert contents(tmp_path) == {existing: b"precious"}


@pytest.mark.parametrize("existing", ["ca.key", "ca.crt"])
def test_no_file_is_written_where_another_authority_is(tmp_path, authority, existing):
    (tmp_path / existing).write_bytes(b"precious")
    with pytest.raises(InvalidSettings, match=f"{existing} would be overwritten"):
        authority.save(tmp_path)
    assert contents(tmp_path) == {existing: b"precious"}


def test_files_are_replaced_if_asked(tmp_path, authority, credentials):
    files.save_credentials(tmp_path, authority.issue(identity.client_profile("b"), now=NOW))
    files.save_credentials(tmp_path, credentials, overwrite=True)
    assert files.load_credentials(tmp_path).certificate == credentials.certificate


def test_an_authoritys_own_directory_can_be_the_brokers_too(tmp_path, authority):
    authority.save(tmp_path)
    files.save_credentials(tmp_path, authority.issue(identity.server_profile(), now=NOW))
    assert set(contents(tmp_path)) == {"ca.crt", "ca.key", "tls.crt", "tls.key"}
    assert Authority.load(tmp_path).certificate == authority.certificate


def test_a_directory_that_cannot_be_made_is_named(tmp_path, credentials):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidSettings, match="file/a cannot be created: Not a directory"):
        files.save_credentials(tmp_path / "file" / "a", credentials)


@pytest.mark.parametrize("missing", ["tls.crt", "tls.key", "ca.crt"])
def test_a_missing_file_is_named_with_the_command_that_makes_it(tmp_path, credentials, missing):
    files.save_credentials(tmp_path, credentials)
    (tmp_path / missing).unlink()
    with pytest.raises(InvalidSettings, match=f"{missing} is missing; .*`kubelend ca issue`"):
        files.load_credentials(tmp_path)


@pytest.mark.parametrize("missing", ["ca.crt", "ca.key"])
def test_a_missing_authority_is_named_with_the_command_that_makes_it(tmp_path, authority, missing):
    authority.save(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(InvalidSettings, match=f"{missing} is missing; .*`kubelend ca init`"):
        Authority.load(tmp_path)


def test_a_certificate_and_a_key_of_two_pairs_do_not_match(tmp_path, authority, credentials):
    files.save_credentials(tmp_path / "a", credentials)
    files.save_credentials(tmp_path / "b", authority.issue(identity.client_profile("b"), now=NOW))
    (tmp_path / "a" / "tls.key").write_bytes((tmp_path / "b" / "tls.key").read_bytes())
    with pytest.raises(InvalidSettings, match=r"a/tls\.crt and .*a/tls\.key do not match"):
        files.load_credentials(tmp_path / "a")


def test_an_authority_and_another_ones_key_do_not_match(tmp_path, authority):
    Authority.create("test-ca", now=NOW).save(tmp_path / "other")
    authority.save(tmp_path / "ca")
    (tmp_path / "ca" / "ca.key").write_bytes((tmp_path / "other" / "ca.key").read_bytes())
    with pytest.raises(InvalidSettings, match=r"ca\.crt and ca\.key in .* do not match"):
        Authority.load(tmp_path / "ca")


def test_an_authoritys_key_that_others_can_read_is_refused(tmp_path, authority):
    authority.save(tmp_path)
    (tmp_path / "ca.key").chmod(0o644)
    with pytest.raises(
        InvalidSettings, match=r"mode 0644, so other users can access it; chmod 600 .*ca"
    ):
        Authority.load(tmp_path)


@pytest.mark.parametrize("cut", [0.3, 0.7, 0.99])
def test_a_certificate_cut_off_behind_a_whole_one_is_not_passed_over(tmp_path, authority, cut):
    authority.save(tmp_path)
    whole = (tmp_path / "ca.crt").read_bytes()
    (tmp_path / "ca.crt").write_bytes(whole + whole[: int(len(whole) * cut)])
    with pytest.raises(InvalidSettings, match=r"ca\.crt is truncated or corrupt"):
        Authority.load(tmp_path)


@pytest.mark.parametrize(
    "name, complaint",
    [
        ("tls.crt", r"tls\.crt contains no certificate in PEM form"),
        ("ca.crt", r"ca\.crt contains no certificate in PEM form"),
        ("tls.key", r"tls\.key: not a private key in PEM form"),
    ],
)
def test_garbage_is_named(tmp_path, credentials, name, complaint):
    files.save_credentials(tmp_path, credentials)
    (tmp_path / name).write_bytes(b"\x00garbage")
    with pytest.raises(InvalidSettings, match=complaint):
        files.load_credentials(tmp_path)


def test_an_encrypted_key_is_named_as_such(tmp_path, credentials):
    files.save_credentials(tmp_path, credentials)
    secret = serialization.BestAvailableEncryption(b"x")
    pkcs8 = serialization.PrivateFormat.PKCS8
    encrypted = credentials.key.private_bytes(serialization.Encoding.PEM, pkcs8, secret)
    (tmp_path / "tls.key").write_bytes(encrypted)
    with pytest.raises(InvalidSettings, match=r"tls\.key: key is encrypted"):
        files.load_credentials(tmp_path)


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


def test_the_order_of_the_attributes_does_not_matter():
    subject = peercert(("CN", "alice"), ("O", "kubelend:admin"))
    assert identity.caller_from_peercert(subject) == Caller("alice", Role.ADMIN)


def test_attributes_may_share_one_relative_name():
    subject = {"subject": ((("commonName", "alice"), ("organizationName", "kubelend:admin")),)}
    assert identity.caller_from_peercert(subject) == Caller("alice", Role.ADMIN)


def test_a_unit_makes_nobody_an_admin():
    subject = peercert(("OU", "kubelend:admin"), ("CN", "a"))
    assert identity.caller_from_peercert(subject).role is Role.CLUSTER


@pytest.mark.parametrize("name", ["agent-cluster-1", "No DNS_label!", "Zürich", "a" * 64])
def test_a_cluster_may_have_any_printable_name(name):
    assert identity.caller_from_peercert(peercert(("CN", name))).cluster == name


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
    with pytest.raises(InvalidIdentity, match="is the broker's own name"):
        identity.caller_from_peercert(
            peercert(("O", organisation), ("CN", "liqo-resource-broker")), broker_names=own
        )


def test_a_cluster_of_another_name_is_let_in_beside_the_broker():
    caller = identity.caller_from_peercert(
        peercert(("CN", "a")), broker_names={"liqo-resource-broker"}
    )
    assert caller.cluster == "a"


@pytest.mark.parametrize("role", [Role.ADMIN, Role.VIEWER])
def test_a_person_named_as_a_cluster_does_not_act_for_it(role):
    with pytest.raises(Forbidden, match=f"agent-cluster-1 is not a cluster but a {role}"):
        _ = Caller("agent-cluster-1", role).cluster


def test_roles_are_pinned():
    assert [str(role) for role in Role] == ["cluster", "viewer", "admin", "proxy"]
