"""Long lists: filtered, in pages, complete and without repetition."""

import itertools

import pytest

import brokers
import make
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.models import ClusterId
from kubelend.stores.memory import MemoryStore

COUNT = 2345


def held(number):
    requester = "even" if number % 2 == 0 else "odd"
    return make.reservation(
        f"rsv-{number:04d}",
        make.request("cpu=1m,memory=1Mi", requester, duration=24 * make.HOUR),
        phase=Phase.RESERVED,
        reason=Reason.LOCKED,
        target=ClusterId("a"),
        reserved_at=make.T0,
        expires_at=make.T0 + 24 * make.HOUR,
        ticket=number + 1,
        revision=number + 1,
    )


@pytest.fixture
async def long(start):
    """A broker with more reservations and clusters than fit a page."""
    store = MemoryStore()
    clusters = [make.cluster(f"c-{number:04d}") for number in range(COUNT)]
    store.commit(
        [make.cluster("a", "cpu=99,memory=99Gi"), *clusters, *map(held, range(COUNT))], COUNT
    )
    return await start(open_store=brokers.reopening(store))


async def pages(caller, noun, **query):
    """All pages of a list, following `next`."""
    found: list[list[str]] = []
    while True:
        page = await caller.read(noun, **query)
        found.append([one.get("id") or one["advertisement"]["clusterID"] for one in page[noun]])
        if "next" not in page:
            return found
        query["continue"] = page["next"]


def joined(found):
    return list(itertools.chain.from_iterable(found))


async def test_following_next_gives_all_reservations_once_and_in_order(long):
    found = await pages(long.viewer(), "reservations", limit="1000")
    assert [len(page) for page in found] == [1000, 1000, COUNT - 2000]
    assert joined(found) == [f"rsv-{number:04d}" for number in range(COUNT)]


async def test_page_has_a_hundred_unless_told_otherwise(long):
    page = await long.viewer().read("reservations")
    assert len(page["reservations"]) == 100


@pytest.mark.parametrize("role, name", [("requester", "odd"), ("provider", "a")])
async def test_client_that_knows_no_pages_is_shown_all_that_is_open(long, role, name):
    """The published agents ask so, and take the answer for everything."""
    page = await long.cluster(name).read("reservations", role=role)
    numbers = range(1, COUNT, 2) if name == "odd" else range(COUNT)
    assert [one["id"] for one in page["reservations"]] == [f"rsv-{n:04d}" for n in numbers]
    assert "next" not in page


async def test_such_a_client_is_shown_the_newest_that_are_over(broker):
    a, r = broker.cluster("a"), broker.cluster("r")
    await a.advertise("64", "64Gi")
    kept = await r.reserve("1m", "1Mi")
    over = [(await r.reserve("1m", "1Mi"))["id"] for _ in range(103)]
    for name in over:
        await r.delete("reservations", name)
    page = await r.read("reservations", role="requester")
    assert [one["id"] for one in page["reservations"]] == [kept["id"], *over[3:]]
    page = await r.read("reservations", role="requester", phase="Released", limit="2")
    assert [one["id"] for one in page["reservations"]] == over[:2]


async def test_pages_of_one_cluster_hold_only_its_own(long):
    odd = long.cluster("odd")
    found = joined(await pages(odd, "reservations", limit="500"))
    assert found == [f"rsv-{number:04d}" for number in range(1, COUNT, 2)]
    a = long.cluster("a")
    assert len(joined(await pages(a, "reservations", limit="1000", role="provider"))) == COUNT
    assert await pages(a, "reservations", role="requester") == [[]]


async def test_page_that_ends_exactly_at_the_end_has_no_next(long):
    viewer = long.viewer()
    last = await viewer.read("reservations", limit="345", **{"continue": "2000"})
    assert len(last["reservations"]) == 345
    assert "next" not in last
    assert await viewer.read("reservations", **{"continue": str(COUNT)}) == {"reservations": []}


async def test_what_changes_between_pages_is_neither_lost_nor_repeated(long):
    viewer, even = long.viewer(), long.cluster("even")
    first = await viewer.read("reservations", limit="1000")
    for number in (0, 1500):
        await even.delete("reservations", f"rsv-{number:04d}")
    made = await even.reserve("1m", "1Mi")
    rest = await pages(viewer, "reservations", limit="1000", **{"continue": first["next"]})
    ids = [found["id"] for found in first["reservations"]] + joined(rest)
    assert ids == [*(f"rsv-{number:04d}" for number in range(COUNT)), made["id"]]


async def test_following_next_gives_all_clusters_once_and_in_order(long):
    found = await pages(long.admin(), "clusters", limit="1000")
    assert [len(page) for page in found] == [1000, 1000, COUNT + 1 - 2000]
    assert joined(found) == ["a", *(f"c-{number:04d}" for number in range(COUNT))]


@pytest.fixture
async def mixed(broker):
    """One reservation in each phase but Failed, all of r's; and one that r lends."""
    a, r = broker.cluster("a"), broker.cluster("r")
    await a.advertise("8", "16Gi")
    await r.advertise("8", "16Gi")
    ids = {"Reserved": (await r.reserve())["id"]}
    ids["Active"] = (await r.reserve())["id"]
    await r.post("reservations", ids["Active"], "activate")
    ids["Released"] = (await r.reserve())["id"]
    await r.delete("reservations", ids["Released"])
    ids["Pending"] = (await r.queue("99", wait="1h"))["id"]
    ids["lent"] = (await a.reserve())["id"]
    return broker, {found: name for name, found in ids.items()}


@pytest.mark.parametrize(
    "query, expected",
    [
        ({}, ["Reserved", "Active", "Released", "Pending", "lent"]),
        ({"role": "requester"}, ["Reserved", "Active", "Released", "Pending"]),
        ({"role": "provider"}, ["lent"]),
        ({"phase": "Active"}, ["Active"]),
        ({"phase": "Pending,Released"}, ["Released", "Pending"]),
        ({"phase": "Reserved", "role": "requester"}, ["Reserved"]),
        ({"phase": "Failed"}, []),
        ({"phase": ""}, ["Reserved", "Active", "Released", "Pending", "lent"]),
        ({"cluster": "r", "role": "provider"}, ["lent"]),
    ],
    ids=str,
)
async def test_list_holds_what_the_filters_say(mixed, query, expected):
    broker, names = mixed
    for caller, more in ((broker.cluster("r"), {}), (broker.viewer(), {"cluster": "r"})):
        listed = await caller.read("reservations", **{**more, **query})
        assert [names[found["id"]] for found in listed["reservations"]] == expected


@pytest.mark.parametrize(
    "query, detail",
    [
        ({"role": "boss"}, "role: 'boss' is neither requester nor provider"),
        ({"phase": "Active,Lost"}, "phase: ['Active', 'Lost'] contains an unknown phase"),
        ({"limit": "many"}, "limit: 'many' is not an integer from 0 to 1000"),
        ({"limit": "1001"}, "limit: '1001' is not an integer from 0 to 1000"),
        ({"limit": "-1"}, "limit: '-1' is not an integer from 0 to 1000"),
        ({"limit": "٣"}, "limit: '٣' is not an integer from 0 to 1000"),
        ({"continue": "x"}, "continue: 'x' is not an integer"),
        ({"continue": "9" * 30}, "continue: '" + "9" * 24),
    ],
    ids=str,
)
async def test_filter_that_cannot_be_is_refused_by_name(broker, query, detail):
    answer = await broker.cluster("r").get("reservations", **query)
    assert answer.refusal == (400, "InvalidInput")
    assert answer.problem.detail.startswith(detail)


async def test_person_who_filters_by_role_has_to_say_whose(broker):
    answer = await broker.viewer().get("reservations", role="provider")
    assert answer.refusal == (400, "InvalidInput")
    assert answer.problem.error == "role: needs a cluster; add cluster=NAME"


async def test_limit_of_zero_is_one(mixed):
    broker, _ = mixed
    page = await broker.cluster("r").read("reservations", limit="0")
    assert len(page["reservations"]) == 1
