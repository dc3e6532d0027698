"""The names of limits on the wire are API; and what administrators write is read to the letter."""

import msgspec
import pytest

from kubelend.wire import admin_bodies, bodies

FIELDS = {
    admin_bodies.PolicyRequest: "allow deny keepBack maxLent maxPerRequester hours",
    admin_bodies.PolicyStatus: "clusterID admin advertised effective",
    admin_bodies.QuotaRequest: "amounts reservations budget currency",
    admin_bodies.Quota: "amounts reservations budget currency",
    admin_bodies.QuotaUse: "held waitedFor reservations waiting spentToday",
    admin_bodies.QuotaStatus: "clusterID quota used",
    admin_bodies.QuotaList: "quotas next",
}


def kinds():
    found = [kind for kind in vars(admin_bodies).values() if isinstance(kind, type)]
    ours = [kind for kind in found if kind.__module__ == admin_bodies.__name__]
    return {kind for kind in ours if issubclass(kind, bodies.Body)}


def test_every_body_has_its_row():
    assert kinds() == set(FIELDS)


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_fields_have_their_names(kind):
    assert [field.encode_name for field in msgspec.structs.fields(kind)] == FIELDS[kind].split()


@pytest.mark.parametrize("kind", [admin_bodies.PolicyRequest, admin_bodies.QuotaRequest])
def test_a_limit_that_is_misspelt_is_refused_where_an_administrator_sets_it(kind):
    with pytest.raises(msgspec.ValidationError, match="unknown field `keepback`"):
        msgspec.json.decode(b'{"keepback": {"cpu": "4"}}', type=kind)


def test_a_newer_cluster_may_say_more_than_we_know():
    said = b'{"deny": ["x"], "weather": "fine"}'
    assert msgspec.json.decode(said, type=bodies.LendingPolicy) == bodies.LendingPolicy(deny=["x"])
