"""What a cluster writes cannot steer the terminal of whoever reads it: refused, or put into one line."""

import pytest
import pytest_asyncio

from callers import offer, wish

BAD = "eu\x1b]0;owned\x07\x1b[2J\r\nfake   Active"


@pytest_asyncio.fixture
async def a(broker):
    caller = broker.cluster("a")
    await caller.advertise()
    return caller


@pytest.mark.parametrize(
    "fields, where",
    [
        ({"region": BAD}, "region"),
        ({"clusterName": BAD}, "clusterName"),
        ({"endpointURL": "\x1b[5m"}, "endpointURL"),
        ({"labels": {"k": "v\x1b[1m"}}, "labels.k"),
        ({"labels": {"k\u2028": "v"}}, "labels"),
        ({"policy": {"deny": ["x\x9b2J"]}}, "policy.deny"),
    ],
)
async def test_offer_with_such_a_text_is_refused_and_changes_nothing(broker, a, fields, where):
    answer = await a.post("advertisements", offer("a", **fields))
    assert answer.refusal == (400, "InvalidInput")
    assert answer.problem.detail.startswith(f"{where}: ")
    assert answer.problem.error.isprintable()
    assert "region" not in await broker.admin().read("advertisements", "a")


async def test_texts_in_any_language_are_taken(a):
    labels = {"ort": "São Paulo", "leer": ""}
    body = offer("a", clusterName="Zürich 東京", region="", labels=labels)
    answer = await a.post("advertisements", body)
    assert answer.status == 200
    assert answer.json["advertisement"]["labels"] == labels


@pytest.mark.parametrize(
    "fields, where",
    [
        ({"targetClusterID": BAD}, "targetClusterID"),
        ({"constraints": {"region": BAD}}, "constraints.region"),
        ({"constraints": {"exclude": [BAD]}}, "constraints.exclude"),
        ({"constraints": {"labels": {"k": BAD}}}, "constraints.labels.k"),
        ({"policy": BAD}, "policy"),
    ],
)
async def test_wish_with_such_a_text_is_refused(broker, a, fields, where):
    answer = await broker.cluster("r").post("reservations", wish(**fields))
    assert answer.refusal == (400, "InvalidInput")
    assert answer.problem.detail.startswith(where)
    assert answer.problem.error.isprintable()


@pytest.mark.parametrize(
    "path",
    [
        ("clusters", "a", "cordon"),
        ("clusters", "a", "drain"),
        ("members", "cluster", "a", "revoke"),
    ],
    ids=lambda path: path[-1],
)
async def test_reason_of_an_administrator_is_refused(broker, a, path):
    answer = await broker.admin().post(*path, {"reason": BAD})
    assert answer.refusal == (400, "InvalidInput")
    assert answer.problem.detail.startswith("reason: ")
    assert not (await broker.admin().read("clusters", "a"))["status"].get("cordoned", False)


async def test_refusal_counts_however_its_reason_is_written(broker, a):
    """An existing provider may send what some program has printed, lines and all."""
    made = await broker.cluster("r").reserve()
    reason = "disk is full:\r\n\x1b[31mno space left\x1b[0m\n"
    answer = await a.post("instructions", made["id"], "refuse", {"reason": reason})
    assert answer.status == 200
    assert answer.json["status"]["message"].startswith(
        "Refused by a: disk is full: [31mno space left [0m; then "
    )


async def test_name_in_a_path_that_nobody_can_have_is_no_route_and_not_in_the_journal(broker, a):
    """The audit log says what a refused call was about, and people read it."""
    answer = await a.get("clusters", BAD)
    assert answer.refusal == (404, "NotFound")
    assert answer.problem.error.isprintable()
    assert (await a.get("clusters", "b")).status == 403
    lines = (await broker.admin().read("audit", refused="true"))["lines"]
    assert [line["subject"] for line in lines] == ["cluster/b"]
