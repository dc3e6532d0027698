"""Who calls: from the subject of a verified certificate to a caller and a role."""

import pytest

from certificates import Certificates
from kubelend.core.errors import Forbidden, InvalidIdentity
from kubelend.core.lifecycle import Role
from kubelend.pki import identity
from kubelend.pki.identity import Caller


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
    own = identity.certificate_names(Certificates(tmp_path).server())
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
