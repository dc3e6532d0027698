"""Joining over real sockets: who is let in, who waits, who is refused, and that a lost answer is no loss."""

import json
import ssl

import aiohttp
import pytest
from cryptography import x509

import brokers
import newcomers
from kubelend.core.lifecycle import Role
from kubelend.pki import identity
from newcomers import Newcomer
from troubled import TroubledStore, outage

pytestmark = pytest.mark.broker("enrolling", auto_accept="edge-*")


def certificate_in(directory):
    return x509.load_pem_x509_certificate((directory / "tls.crt").read_bytes())


async def members(broker):
    return {one["name"]: one for one in (await broker.admin().read("members"))["members"]}


async def test_bound_token_gives_a_certificate_with_which_the_cluster_lends_and_borrows(
    broker, tmp_path
):
    berlin = Newcomer("berlin")
    answer = await berlin.ask(broker, await newcomers.token(broker, name="berlin"))
    assert answer.json["port"] == broker.port
    caller = broker.holder(berlin.save(answer, tmp_path / "berlin"), "berlin")
    await caller.advertise()
    held = await broker.cluster("other").reserve()
    assert held["targetClusterID"] == "berlin"
    member = (await members(broker))["berlin"]
    issued = certificate_in(tmp_path / "berlin")
    assert (member["standing"], member["role"], member["decidedBy"]) == (
        "Accepted",
        "cluster",
        "alice",
    )
    assert member["certificate"]["serial"] == f"{issued.serial_number:x}"
    assert identity.caller_from_certificate(issued) == identity.Caller("berlin")


@pytest.mark.parametrize("role", [Role.VIEWER, Role.ADMIN])
async def test_people_join_in_their_roles(broker, tmp_path, role):
    token = await newcomers.token(broker, role=role.value, name="bob")
    directory = await Newcomer("bob", role).join(broker, token, tmp_path / "bob")
    bob = broker.holder(directory, "bob")
    assert (await bob.get("clusters")).status == 200
    status = 200 if role is Role.ADMIN else 403
    assert (await bob.get("tokens")).status == status


async def test_expected_cluster_needs_no_administrator(broker, tmp_path):
    token = await newcomers.token(broker)
    directory = await Newcomer("edge-7").join(broker, token, tmp_path / "edge")
    assert (await broker.holder(directory, "edge-7").get("version")).status == 200


async def test_unexpected_cluster_waits_until_it_is_accepted(broker, tmp_path):
    paris, token = Newcomer("paris"), await newcomers.token(broker)
    answers = [await paris.ask(broker, token) for _ in range(3)]
    assert [answer.status for answer in answers] == [202] * 3
    waiting = (await members(broker))["paris"]
    assert (waiting["standing"], waiting["asks"]) == ("Pending", answers[0].json["key"])
    accepted = await broker.admin().post(
        "members", "cluster", "paris", "accept", {"key": waiting["asks"]}
    )
    assert accepted.json["standing"] == "Accepted"
    directory = await paris.join(broker, token, tmp_path / "paris")
    await broker.holder(directory, "paris").advertise()


async def test_rejected_one_hears_that_its_token_is_used(broker):
    paris, token = Newcomer("paris"), await newcomers.token(broker)
    await paris.ask(broker, token)
    assert (await broker.admin().post("members", "cluster", "paris", "reject")).status == 204
    answer = await paris.ask(broker, token)
    assert answer.refusal == (403, "TokenRefused")
    assert answer.problem.detail == "the token has no uses left"


async def test_lost_answer_is_given_again_and_costs_no_second_use(broker, tmp_path):
    berlin, token = Newcomer("berlin"), await newcomers.token(broker, name="berlin")
    lost = await berlin.ask(broker, token)
    assert lost.status == 200
    directory = await berlin.join(broker, token, tmp_path / "berlin")
    await broker.holder(directory, "berlin").advertise()
    (listed,) = (await broker.admin().read("tokens"))["tokens"]
    assert (listed["state"], listed["usesLeft"]) == ("Used", 0)


async def test_name_that_has_joined_is_not_given_to_another_key(broker, tmp_path):
    await Newcomer("berlin").join(
        broker, await newcomers.token(broker, name="berlin"), tmp_path / "first"
    )
    second, token = Newcomer("berlin"), await newcomers.token(broker, name="berlin")
    assert (await second.ask(broker, token)).status == 202
    await broker.holder(tmp_path / "first", "berlin").advertise()  # the first is in as before
    await broker.admin().post("members", "cluster", "berlin", "accept")
    await second.join(broker, token, tmp_path / "second")


async def test_name_of_a_cluster_with_a_certificate_from_elsewhere_is_not_given_away(broker):
    await broker.cluster("edge-1").advertise()
    answer = await Newcomer("edge-1").ask(broker, await newcomers.token(broker))
    assert answer.status == 202


# -- refusals


async def refusal(answer):
    return (*answer.refusal, answer.problem.detail)


async def test_used_token_lets_nobody_else_in(broker, tmp_path):
    token = await newcomers.token(broker)
    await Newcomer("edge-1").join(broker, token, tmp_path / "1")
    answer = await Newcomer("edge-2").ask(broker, token)
    assert await refusal(answer) == (403, "TokenRefused", "the token has no uses left")


async def test_token_of_two_uses_lets_two_in(broker, tmp_path):
    token = await newcomers.token(broker, uses=2)
    for name in ("edge-1", "edge-2"):
        await Newcomer(name).join(broker, token, tmp_path / name)
    assert (await Newcomer("edge-3").ask(broker, token)).status == 403


async def test_expired_token_is_refused_and_listed_for_a_day(broker):
    token = await newcomers.token(broker, ttl="10m")
    broker.clock.pass_time(newcomers.hours(1 / 6))
    answer = await Newcomer("edge-1").ask(broker, token)
    assert answer.refusal == (403, "TokenRefused")
    assert answer.problem.detail.startswith("the token expired at")
    (listed,) = (await broker.admin().read("tokens"))["tokens"]
    assert listed["state"] == "Expired"
    broker.clock.pass_time(newcomers.hours(24))
    await broker.expire()
    assert (await broker.admin().read("tokens"))["tokens"] == []


async def test_deleted_token_is_as_good_as_none(broker):
    token = await newcomers.token(broker)
    assert (await broker.admin().delete("tokens", token.split(".")[1])).status == 204
    answer = await Newcomer("edge-1").ask(broker, token)
    assert await refusal(answer) == (403, "TokenRefused", "unknown token or wrong secret")


async def test_unknown_token_and_wrong_secret_are_answered_alike(broker):
    version, name, secret = (await newcomers.token(broker)).split(".")
    wrong = "a" * len(secret)
    unknown = await Newcomer("edge-1").ask(broker, f"{version}.{'b' * len(name)}.{secret}")
    mistaken = await Newcomer("edge-1").ask(broker, f"{version}.{name}.{wrong}")
    assert unknown.content == mistaken.content
    assert await refusal(unknown) == (403, "TokenRefused", "unknown token or wrong secret")


@pytest.mark.parametrize(
    "made, who, status, why",
    [
        ({"name": "paris"}, Newcomer("edge-1"), 403, "the token is bound to 'paris'"),
        (
            {"role": "viewer"},
            Newcomer("edge-1"),
            403,
            "the token is for role viewer, not for role cluster",
        ),
        ({}, Newcomer("bob", Role.ADMIN), 403, "the token is for role cluster, not for role admin"),
    ],
    ids=["bound", "other-role", "higher-role"],
)
async def test_token_for_another_is_refused(broker, made, who, status, why):
    answer = await who.ask(broker, await newcomers.token(broker, **made))
    assert (answer.status, answer.problem.detail) == (status, why)


async def test_body_and_request_must_name_the_same(broker):
    token = await newcomers.token(broker)
    answer = await Newcomer("edge-1").ask(broker, token, name="edge-2")
    assert answer.refusal == (400, "InvalidInput")
    answer = await Newcomer("edge-1").ask(broker, token, role="admin")
    assert answer.refusal == (400, "InvalidInput")
    assert (await members(broker)) == {}


async def test_only_allowed_clusters_may_join_whatever_they_show(certificates, tmp_path):
    async with newcomers.enrolling(certificates, tmp_path, allow_join="edge-*, lab-?") as broker:
        token = await newcomers.token(broker)
        answer = await Newcomer("berlin").ask(broker, token)
        assert await refusal(answer) == (
            403,
            "Forbidden",
            "cluster 'berlin' is not allowed to join",
        )
        assert (await broker.admin().post("tokens", {"name": "berlin"})).status == 403
        assert (await Newcomer("lab-1").ask(broker, token)).status == 202


async def test_the_brokers_own_name_is_nobodys(broker):
    answer = await broker.admin().post("tokens", {"name": "liqo-resource-broker"})
    assert answer.refusal == (400, "InvalidInput")


# -- the listener


async def test_anybody_may_ask_for_the_authorities(broker, certificates):
    answer = await newcomers.call(broker, "GET", "/enrol/v1/authorities")
    assert answer.status == 200
    (shown,) = x509.load_pem_x509_certificates(answer.content)
    assert shown == certificates.authority.certificate


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/api/v1/version", 404),
        ("GET", "/api/v1/clusters", 404),
        ("POST", "/api/v1/tokens", 404),
        ("GET", "/openapi.json", 404),
        ("GET", "/healthz", 404),
        ("GET", "/enrol/v1/../../api/v1/clusters", 404),
        ("GET", "/enrol/v1/join", 405),
        ("DELETE", "/enrol/v1/authorities", 405),
    ],
)
async def test_nothing_of_the_interface_is_reached_without_a_certificate(
    broker, method, path, status
):
    assert (await newcomers.call(broker, method, path, b"{}")).status == status


async def test_a_certificate_is_not_asked_for_and_gives_no_right_there(broker):
    admin = broker.admin()
    connector = aiohttp.TCPConnector(ssl=admin.context)
    url = f"https://localhost:{broker.process.ports['enrol']}/api/v1/clusters"
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.get(url) as response,
    ):
        assert response.status == 404


async def test_the_other_listener_goes_on_asking_for_one(broker, certificates):
    context = ssl.create_default_context(cafile=str(certificates.server() / "ca.crt"))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"https://localhost:{broker.port}/enrol/v1/authorities")
    answer = await broker.admin().get("/enrol/v1/authorities")
    assert answer.refusal == (404, "NotFound")


async def test_large_bodies_are_not_read(broker):
    answer = await newcomers.call(broker, "POST", "/enrol/v1/join", b"x" * 30_000)
    assert answer.refusal == (413, "BodyTooLarge")


async def test_broker_without_an_authority_has_no_such_listener_and_says_so(start):
    broker = await start()
    assert "enrol" not in broker.process.ports
    answer = await broker.admin().post("tokens", {})
    assert answer.refusal == (409, "Conflict")
    assert answer.problem.detail == "this broker issues no certificates"
    body = {"request": Newcomer("a").request}
    answer = await broker.cluster("a").post("certificates", body)
    assert answer.refusal == (409, "Conflict")


async def test_join_is_refused_while_the_store_is_not_read(certificates, tmp_path):
    store = TroubledStore()
    enrolling = newcomers.enrolling(
        certificates, tmp_path, auto_accept="edge-*", open_store=brokers.reopening(store)
    )
    async with enrolling as broker:
        token = await newcomers.token(broker)
        async with outage(broker, store):
            answer = await Newcomer("edge-1").ask(broker, token)
            assert answer.refusal == (503, "NotReady")
        assert (await Newcomer("edge-1").ask(broker, token)).status == 200


async def test_answer_to_a_body_that_is_none_says_so(broker):
    answer = await newcomers.call(broker, "POST", "/enrol/v1/join", b"nonsense")
    assert answer.refusal == (400, "InvalidInput")
    answer = await newcomers.call(
        broker, "POST", "/enrol/v1/join", json.dumps({"token": "kl1"}).encode()
    )
    assert answer.refusal == (400, "InvalidInput")


async def test_members_are_listed_in_pages_by_role_and_name(broker, tmp_path):
    for name in ("rome", "berlin", "paris"):
        await Newcomer(name).join(broker, await newcomers.token(broker, name=name), tmp_path / name)
    first = await broker.admin().read("members", limit="2")
    assert [one["name"] for one in first["members"]] == ["berlin", "paris"]
    rest = await broker.admin().read("members", **{"limit": "2", "continue": first["next"]})
    assert [one["name"] for one in rest["members"]] == ["rome"]
    assert "next" not in rest


async def test_failure_inside_the_broker_is_logged_and_told_to_a_newcomer_without_details(
    broker, log
):
    """A clock that gives no time stands for whatever we did not foresee."""
    token = await newcomers.token(broker, name="berlin")
    broker.clock.now = "not a time"
    answer = await Newcomer("berlin").ask(broker, token)
    assert answer.refusal == (500, "Internal")
    assert answer.problem.error == "internal error; see the log of the broker"
    (line,) = log.lines("Request failed")
    assert line["route"] == "join"
