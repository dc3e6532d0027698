"""How much and how often anybody may ask, so that nobody can take the broker from the others."""

import asyncio
import gzip
import json
import zlib

import pytest

import bare
import make
from callers import offer, wish
from kubelend.core.resources import Resources
from waiting import PATIENCE

LIMIT = 262144


@pytest.fixture
def r(broker):
    return broker.cluster("r")


def padded(body, size):
    """The body, with spaces up to exactly this size."""
    return json.dumps(body).encode().ljust(size)


async def test_body_at_the_limit_is_read_and_one_byte_more_is_not(broker):
    a = broker.cluster("a")
    exact = await a.post("advertisements", content=padded(offer("a"), LIMIT))
    assert exact.status == 200
    over = await a.post("advertisements", content=padded(offer("a", "99"), LIMIT + 1))
    assert over.refusal == (413, "BodyTooLarge")
    assert over.problem.retryable is False
    assert over.problem.hint == "send a smaller body"
    assert "Retry-After" not in over.headers
    assert (await a.read("advertisements", "a"))["resources"]["capacity"]["cpu"] == "4"


@pytest.mark.parametrize("path", ["advertisements", "reservations", "explain"])
async def test_megabyte_is_too_much_for_every_route_that_reads(r, path):
    answer = await r.post(path, content=padded(wish(), 2**20))
    assert answer.refusal == (413, "BodyTooLarge")
    assert (await r.get("version")).status == 200


async def test_body_that_says_it_is_too_long_is_not_waited_for(broker):
    """Nothing of it has come, and nothing need come."""
    async with bare.connected(broker.cluster("r")) as (reader, writer):
        writer.write(bare.POST + b"Content-Length: 99999999999\r\n\r\n")
        answer = await bare.answer_of(reader)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"99999999999 bytes are more than" in answer


async def test_body_without_a_length_is_measured_as_it_comes(r):
    async def endless():
        for _ in range(1000):
            yield b" " * 4096

    url = f"https://localhost:{r.port}/api/v1/reservations"
    async with r.session.post(url, data=endless()) as response:
        assert response.status == 413


async def test_bomb_is_measured_unpacked(r):
    """A few kilobytes that unpack to many megabytes."""
    bomb = gzip.compress(b" " * 50_000_000)
    assert len(bomb) < LIMIT
    headers = {"Content-Encoding": "gzip"}
    answer = await r.call("POST", "reservations", content=bomb, headers=headers)
    assert answer.refusal == (413, "BodyTooLarge")


async def test_packed_body_is_read(broker, r):
    await broker.cluster("a").advertise()
    content = zlib.compress(json.dumps(wish()).encode())
    headers = {"Content-Encoding": "deflate"}
    assert (await r.call("POST", "reservations", content=content, headers=headers)).status == 201


async def test_client_that_asks_before_it_sends_its_body_is_told_to(broker, r):
    """As curl does with larger ones (Expect: 100-continue)."""
    await broker.cluster("a").advertise()
    url = f"https://localhost:{r.port}/api/v1/reservations"
    async with (
        asyncio.timeout(PATIENCE),
        r.session.post(url, json=wish(), expect100=True) as response,
    ):
        assert response.status == 201


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_body_that_is_not_packed_as_it_says_is_refused(r, encoding):
    headers = {"Content-Encoding": encoding}
    answer = await r.call("POST", "reservations", content=b"no such thing", headers=headers)
    assert answer.status == 400


async def test_headers_have_a_limit(r):
    url = f"https://localhost:{r.port}/api/v1/version"
    async with r.session.get(url, headers={"X-Long": "x" * 20_000}) as response:
        assert response.status == 400
    assert (await r.get("version")).status == 200


async def test_caller_that_calls_too_often_is_told_when_to_come_back(start):
    broker = await start(rate_limit=1, rate_burst=5)
    r = broker.cluster("r")
    answers = [await r.get("version") for _ in range(6)]
    assert [answer.status for answer in answers] == [200] * 5 + [429]
    last = answers[-1]
    assert last.refusal == (429, "RateLimited")
    assert last.headers["Retry-After"] == "1"
    assert last.problem.retryable is True
    assert last.problem.detail == "cluster r exceeds 1 requests per second"


async def test_person_and_cluster_of_one_name_are_counted_apart(start):
    broker = await start(rate_limit=0.001, rate_burst=1)
    for caller in (broker.cluster("paris"), broker.admin("paris"), broker.viewer("paris")):
        answers = [await caller.get("version") for _ in range(2)]
        assert [answer.status for answer in answers] == [200, 429]


async def test_one_callers_calls_are_not_counted_against_another(start):
    broker = await start(rate_limit=1, rate_burst=2)
    loud, quiet = broker.cluster("loud"), broker.cluster("quiet")
    statuses = [answer.status for answer in await asyncio.gather(*map(version, [loud] * 20))]
    assert statuses.count(429) >= 17
    assert (await version(quiet)).status == 200
    # Nor are they made to wait in another's name: identity comes first.
    assert (await broker.admin().get("version")).status == 200


async def test_refused_calls_change_nothing(start):
    broker = await start(rate_limit=1, rate_burst=1)
    a = broker.cluster("a")
    assert (await version(a)).status == 200
    assert (await a.post("advertisements", offer("a"))).refusal == (429, "RateLimited")
    assert (await broker.admin().get("clusters", "a")).status == 404


async def version(caller):
    return await caller.get("version")


async def test_largest_amounts_are_exact_and_more_is_refused(broker, r):
    """What fits a 64-bit number of bytes or millis is taken to the last unit."""
    a = broker.cluster("a")
    most = 2**63 - 1
    resources = {"capacity": {"cpu": f"{most}m", "memory": str(most)}}
    answer = await a.post("advertisements", {"clusterID": "a", "resources": resources})
    assert answer.status == 200
    made = await r.post("reservations", wish(f"{most - 1}m", str(most - 1)))
    assert made.status == 201
    left = (await a.read("advertisements", "a"))["resources"]["available"]
    assert make.resources(f"cpu={left['cpu']},memory={left['memory']}") == Resources(1, 1)
    assert (await r.post("reservations", wish("2m", "1"))).refusal == (409, "NoCapacity")
    assert (await r.post("reservations", wish("1m", "1"))).status == 201
    over = await r.post("reservations", wish(f"{2**63}m", "1"))
    assert over.refusal == (400, "InvalidQuantity")
