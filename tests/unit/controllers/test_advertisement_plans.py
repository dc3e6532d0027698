"""What a ClusterAdvertisement says, when it is heard, and when it is put right."""

import pytest
from msgspec.structs import replace

import broker_samples as samples
import make
from kubelend.controllers import advertisement_plan
from kubelend.core.errors import InvalidInput
from kubelend.core.models import Cluster
from kubelend.wire.bodies import Amounts, Quantities

SAID = samples.advertisement()
OFFER = advertisement_plan.advertisement_from_object(SAID)


def record(offer=OFFER, **fields):
    return Cluster(offer, make.T0, make.T0 + make.STALE_AFTER, revision=4, **fields)


def plan(found, heard=None, known=None):
    return advertisement_plan.plan_advertisement(
        found, advertisement_plan.advertisement_from_object(found), heard, known
    )


def test_missing_allocatable_is_the_capacity_and_missing_time_the_creation():
    resources = replace(SAID.spec.resources, allocatable=None)
    offer = advertisement_plan.advertisement_from_object(
        samples.with_spec(SAID, resources=resources, timestamp=None)
    )
    assert offer.allocatable == offer.capacity == make.resources("cpu=4,memory=8Gi")
    assert offer.sent_at == SAID.metadata.creation_timestamp


def test_what_it_says_of_reserved_and_available_is_not_heard():
    claims = replace(
        SAID.spec.resources, available=Amounts("99", "1Ti"), reserved=Amounts("1", "0")
    )
    assert (
        advertisement_plan.advertisement_from_object(samples.with_spec(SAID, resources=claims))
        == OFFER
    )


def test_amounts_that_make_no_sense_are_refused():
    wrong = replace(SAID.spec.resources, capacity=Quantities("lots", "1Gi"))
    with pytest.raises(InvalidInput, match=r"resources\.capacity"):
        advertisement_plan.advertisement_from_object(samples.with_spec(SAID, resources=wrong))


LATER = samples.with_spec(SAID, timestamp=make.T0 + make.MINUTE)
LARGER = samples.advertisement(cpu="9")
ADOPTED = samples.shown(record(), is_own=False)


@pytest.mark.parametrize(
    "found, heard, known, action",
    [
        pytest.param(SAID, None, None, advertisement_plan.Advertise(OFFER), id="new"),
        pytest.param(
            SAID, OFFER, None, advertisement_plan.Advertise(OFFER), id="the ledger lost it"
        ),
        pytest.param(ADOPTED, OFFER, record(), None, id="heard already"),
        pytest.param(ADOPTED, None, record(), None, id="heard before a restart"),
        pytest.param(
            LATER,
            OFFER,
            record(),
            advertisement_plan.Advertise(advertisement_plan.advertisement_from_object(LATER)),
            id="another time alone",
        ),
        pytest.param(
            LARGER,
            OFFER,
            record(),
            advertisement_plan.Advertise(advertisement_plan.advertisement_from_object(LARGER)),
            id="another amount",
        ),
        pytest.param(
            samples.with_spec(ADOPTED, cluster_name=""),
            OFFER,
            record(advertisement_plan.advertisement_from_object(LARGER)),
            advertisement_plan.Repair(),
            id="the cluster said more elsewhere since",
        ),
        pytest.param(samples.leaving(SAID), None, None, None, id="deleted"),
        pytest.param(SAID, OFFER, record(), advertisement_plan.Repair(), id="record taken out"),
        pytest.param(
            samples.advertisement(name="any-name"), OFFER, record(), None, id="keeps no record"
        ),
    ],
)
def test_object_of_somebody_is_heard_once_for_each_change(found, heard, known, action):
    assert plan(found, heard, known) == action


def test_name_that_no_certificate_can_have_is_no_cluster():
    with pytest.raises(InvalidInput, match=r"clusterID: 'a\\x1b' contains a control character"):
        advertisement_plan.advertisement_from_object(samples.with_spec(SAID, cluster_id="a\x1b"))


def test_what_cannot_be_read_is_not_heard():
    assert advertisement_plan.plan_advertisement(SAID, None, None, None) is None


@pytest.mark.parametrize(
    "found, known, action",
    [
        pytest.param(samples.shown(record()), record(), None, id="as it should be"),
        pytest.param(samples.shown(record()), None, advertisement_plan.DeleteOrphan(), id="orphan"),
        pytest.param(
            samples.with_spec(samples.shown(record()), cluster_name="x"),
            record(),
            advertisement_plan.Repair(),
            id="edited",
        ),
        pytest.param(
            samples.shown(record()),
            record(cordon="why"),
            advertisement_plan.Repair(),
            id="older record",
        ),
    ],
)
def test_object_of_the_broker_says_nothing_and_is_put_right(found, known, action):
    assert advertisement_plan.plan_advertisement(found, None, None, known) == action


def test_available_on_an_object_of_the_broker_is_not_the_stores():
    found = samples.shown(record())
    shows = replace(found.spec.resources, available=Amounts("1", "1Gi"), reserved=Amounts("3", "0"))
    assert (
        advertisement_plan.plan_advertisement(
            samples.with_spec(found, resources=shows), None, None, record()
        )
        is None
    )


@pytest.mark.parametrize(
    "gone, heard, known, is_withdrawn",
    [
        pytest.param(SAID, OFFER, record(), True, id="its own word"),
        pytest.param(
            SAID,
            OFFER,
            record(advertisement_plan.advertisement_from_object(LARGER)),
            False,
            id="said elsewhere since",
        ),
        pytest.param(samples.shown(record()), None, record(), True, id="what the broker showed"),
        pytest.param(
            samples.shown(record()), None, record(cordon="x"), False, id="being written anew"
        ),
    ],
)
def test_offer_goes_with_the_object_that_said_it(gone, heard, known, is_withdrawn):
    assert advertisement_plan.is_withdrawn(gone, heard, known) is is_withdrawn


MANY = {f"l{number}": "x" for number in range(64)}


def test_record_that_fits_no_object_can_be_compared():
    """Taken in by a broker that did not count the region as a label."""
    known = record(replace(OFFER, labels={**MANY, "region": "eu"}))
    found = samples.shown(record(replace(OFFER, labels=MANY)))
    assert (
        advertisement_plan.plan_advertisement(found, None, None, known)
        == advertisement_plan.Repair()
    )


OF_AGENT = record(
    replace(advertisement_plan.advertisement_from_object(LARGER), sent_at=make.T0 + make.HOUR)
)
OBSERVED = samples.with_status(SAID, observed_generation=SAID.metadata.generation)
NAMED = samples.with_metadata(OBSERVED, name="any-name")
REFUSED = samples.with_status(NAMED, message=f"{advertisement_plan.REJECTED_PREFIX}it was revoked")
EDITED = samples.with_metadata(NAMED, generation=2)
SAME_TIME = record(advertisement_plan.advertisement_from_object(LARGER))


@pytest.mark.parametrize(
    "found, heard, known, action",
    [
        pytest.param(NAMED, None, OF_AGENT, None, id="heard before a restart, overruled since"),
        pytest.param(NAMED, None, SAME_TIME, None, id="heard before, of the same time"),
        pytest.param(
            OBSERVED, None, OF_AGENT, advertisement_plan.Repair(), id="keeps what was overruled"
        ),
        pytest.param(
            EDITED,
            None,
            OF_AGENT,
            advertisement_plan.IgnoreOutdated(),
            id="edited since, and older",
        ),
        pytest.param(
            EDITED, None, SAME_TIME, advertisement_plan.Advertise(OFFER), id="edited since"
        ),
        pytest.param(
            REFUSED, None, SAME_TIME, advertisement_plan.Advertise(OFFER), id="was refused before"
        ),
        pytest.param(EDITED, OFFER, OF_AGENT, None, id="nothing new"),
        pytest.param(
            EDITED,
            advertisement_plan.advertisement_from_object(LATER),
            OF_AGENT,
            advertisement_plan.IgnoreOutdated(),
            id="new, and older",
        ),
        pytest.param(
            EDITED,
            OF_AGENT.advertisement,
            OF_AGENT,
            advertisement_plan.Advertise(OFFER),
            id="takes its own word back",
        ),
        pytest.param(
            NAMED, None, None, advertisement_plan.Advertise(OFFER), id="the ledger lost it"
        ),
    ],
)
def test_word_from_before_does_not_overrule_a_newer_one(found, heard, known, action):
    assert plan(found, heard, known) == action
