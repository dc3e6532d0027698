"""The client against a server that does what a real one cannot be made to do at will."""

import asyncio
import json
from datetime import timedelta

import pytest

import config_maps
import scripted_api
from certificates import Certificates
from config_maps import CONFIG_MAPS
from kubelend.core.errors import (
    Conflict,
    Forbidden,
    NotFound,
    RateLimited,
    Unauthenticated,
    Unavailable,
    UnexpectedAnswer,
)
from kubelend.kits.backoff import Backoff
from kubelend.kube import transport
from kubelend.kube.client import Client
from kubelend.kube.config import DataOrFile
from scripted_api import event, found, one, page, status, watch

QUICK = Backoff(retries=2, first=timedelta(milliseconds=1), longest=timedelta(seconds=2))


@pytest.fixture
def certificates(tmp_path):
    return Certificates(tmp_path / "certificates")


@pytest.fixture
async def server(certificates):
    async with scripted_api.running(certificates.server()) as running:
        yield running


@pytest.fixture
async def client(server):
    async with Client.open(server.access(), backoff=QUICK) as opened:
        yield opened


async def events(client, **options):
    return [seen async for seen in client.watch(CONFIG_MAPS, since="10", **options)]


async def test_connection_is_used_again(server, client):
    server.answers += [found(one("a")) for _ in range(5)]
    for _ in range(5):
        await client.find(CONFIG_MAPS, "a", "default")
    assert len(server.connections) == 1


async def test_object_of_no_kind_is_not_just_missing(server, client):
    server.answers += [status(404, name="a"), status(404), status(404)]
    assert await client.find(CONFIG_MAPS, "a", "default") is None
    with pytest.raises(NotFound, match="apply the CRDs"):
        await client.find(CONFIG_MAPS, "a", "default")
    with pytest.raises(NotFound, match="apply the CRDs"):
        await client.delete(CONFIG_MAPS, "a", "default")


async def test_list_is_read_in_pages(server, client):
    server.answers += [page(one("a"), following="more"), page(one("b"), version="12")]
    listing = await client.list(CONFIG_MAPS, labels="x=y", fields="metadata.name=a")
    assert [each.metadata.name for each in listing.objects] == ["a", "b"]
    assert listing.resource_version == "12"
    first, second = (dict(request.query) for request in server.asked)
    assert first == {"labelSelector": "x=y", "fieldSelector": "metadata.name=a", "limit": "500"}
    assert second == first | {"continue": "more"}


async def test_list_that_grew_too_old_begins_anew(server, client):
    server.answers += [page(one("gone"), following="more"), status(410), page(one("a"))]
    listing = await client.list(CONFIG_MAPS)
    assert [each.metadata.name for each in listing.objects] == ["a"]
    assert "continue" not in server.asked[2].query


async def test_list_that_is_always_too_old_is_given_up(server, client):
    server.answers += [status(410) for _ in range(3)]
    with pytest.raises(Unavailable, match="expired repeatedly"):
        await client.list(CONFIG_MAPS)


async def test_what_is_put_off_is_sent_again(server, client):
    server.answers += [status(429, retry_after=1), found(one("a"))]
    assert await client.create(CONFIG_MAPS, config_maps.make("a"))
    assert len(server.asked) == 2


async def test_watch_that_is_put_off_is_begun_again(server, client):
    """As of a kind that was defined a moment ago."""
    server.answers += [status(429, retry_after=1), watch(event("ADDED", one("a", "11")))]
    assert [seen.resource_version for seen in await events(client)][-1] == "11"
    assert len(server.asked) == 2


@pytest.mark.parametrize("retry_after", [0, 60], ids=["at once", "too long"])
async def test_what_is_put_off_for_too_long_is_given_up(server, retry_after):
    none = Backoff(retries=0 if not retry_after else 2, longest=timedelta(seconds=2))
    server.answers.append(status(429, retry_after=retry_after))
    async with Client.open(server.access(), backoff=none) as client:
        with pytest.raises(RateLimited):
            await client.find(CONFIG_MAPS, "a", "default")


async def test_write_that_may_have_happened_is_not_repeated(server, client):
    server.answers += [status(500, retry_after=1), found(one("a"))]
    with pytest.raises(Unavailable, match="responded with 500"):
        await client.create(CONFIG_MAPS, config_maps.make("a"))
    assert len(server.asked) == 1


async def test_other_errors_are_not_repeated(server, client):
    server.answers += [status(403, "not you"), status(409, "changed")]
    with pytest.raises(Forbidden, match="not you"):
        await client.find(CONFIG_MAPS, "a", "default")
    with pytest.raises(Conflict, match="changed"):
        await client.update(CONFIG_MAPS, config_maps.make("a"))
    assert len(server.asked) == 2


async def test_patch_is_a_merge_patch(server, client):
    server.answers.append(found(one("a")))
    await client.patch(CONFIG_MAPS, "a", "n", {"status": {"x": None}}, subresource="status")
    [request] = server.asked
    assert (request.method, request.path) == ("PATCH", "/api/v1/namespaces/n/configmaps/a/status")
    assert request.content_type == "application/merge-patch+json"
    assert json.loads(await request.read()) == {"status": {"x": None}}


async def test_server_that_does_not_answer_is_not_waited_for(server):
    async def silent(request):
        await asyncio.Event().wait()

    server.answers.append(silent)
    async with Client.open(server.access(), timeout=timedelta(milliseconds=100)) as client:
        with pytest.raises(Unavailable, match="did not answer within 100ms"):
            await client.raw("GET", "/version")


async def test_calls_that_wait_for_their_turn_have_all_their_time_still(server):
    async def slow(request):
        await asyncio.sleep(0.1)
        return found({})

    server.answers += [slow for _ in range(15)]
    async with Client.open(
        server.access(), timeout=timedelta(seconds=1), max_concurrent=1
    ) as client:
        await asyncio.gather(*(client.raw("GET", "/version") for _ in range(15)))
    assert len(server.asked) == 15


async def test_server_that_is_not_there_is_reported(server, unused_tcp_port):
    missing = server.access(server=f"https://127.0.0.1:{unused_tcp_port}")
    async with Client.open(missing) as client:
        with pytest.raises(Unavailable, match=r"cannot connect to the API server at .*: "):
            await client.raw("GET", "/version")


async def test_server_of_another_authority_is_not_believed(server, tmp_path):
    other = Certificates(tmp_path / "other").server() / "ca.crt"
    async with Client.open(server.access(authorities=DataOrFile(path=other))) as client:
        with pytest.raises(Unavailable, match=r"is not trusted: .*certificate-authority"):
            await client.raw("GET", "/version")
    assert not server.asked


async def test_server_may_have_another_name(server):
    server.answers += [found({}), found({})]
    async with Client.open(server.access(tls_server_name="localhost")) as client:
        await client.raw("GET", "/version")
    async with Client.open(server.access(tls_server_name="elsewhere")) as client:
        with pytest.raises(Unavailable, match=r"is not trusted: .*elsewhere"):
            await client.raw("GET", "/version")


async def test_insecure_access_believes_anybody(server):
    server.answers.append(found({}))
    async with Client.open(server.access(authorities=DataOrFile(), insecure=True)) as client:
        await client.raw("GET", "/version")
    assert len(server.asked) == 1


async def test_certificate_is_shown_and_a_newer_one_without_a_restart(
    server, certificates, tmp_path
):
    mine = tmp_path / "me.pem"
    pairs = [certificates.cluster("a"), certificates.cluster("b")]
    server.answers += [found({}), found({})]
    own = server.access(certificate=DataOrFile(path=mine), key=DataOrFile(path=mine))
    async with Client.open(own) as client:
        for pair in pairs:
            mine.write_bytes((pair / "tls.crt").read_bytes() + (pair / "tls.key").read_bytes())
            await client.raw("GET", "/version")
    assert server.callers == ["a", "b"]


async def test_refused_token_is_read_again_and_the_call_repeated(server, tmp_path):
    token = tmp_path / "token"
    token.write_text("first")

    async def replace(request):
        token.write_text("second")
        return status(401)

    server.answers += [replace, found(one("a"))]
    async with Client.open(server.access(token=DataOrFile(path=token))) as client:
        assert await client.find(CONFIG_MAPS, "a", "default")
    assert [each.headers["Authorization"][7:] for each in server.asked] == ["first", "second"]


async def test_token_that_stays_refused_is_not_tried_again(server):
    server.answers.append(status(401, "Unauthorized"))
    async with Client.open(server.access(token=DataOrFile(b"hunter2"))) as client:
        with pytest.raises(Unauthenticated, match="check the token") as caught:
            await client.raw("GET", "/version")
    assert "hunter2" not in str(caught.value)


async def test_caller_may_act_for_somebody(server):
    server.answers.append(found({}))
    headers = (("Impersonate-User", "jane"), ("Impersonate-Group", "a"), ("Impersonate-Group", "b"))
    async with Client.open(server.access(impersonation=headers)) as client:
        await client.raw("GET", "/version")
    [request] = server.asked
    assert request.headers["Impersonate-User"] == "jane"
    assert request.headers.getall("Impersonate-Group") == ["a", "b"]


async def test_api_may_begin_behind_a_path(server):
    server.answers.append(found({}))
    async with Client.open(server.access(server=f"{server.access().server}/k8s/c-1")) as client:
        await client.raw("GET", "/version")
    assert server.asked[0].path == "/k8s/c-1/version"


async def test_watch_begins_with_where_it_is(server, client):
    server.answers.append(watch(event("ADDED", one("a", "11")), event("DELETED", one("a", "12"))))
    seen = await events(client, labels="x=y")
    assert [(each.type, each.resource_version) for each in seen] == [
        ("BOOKMARK", "10"),
        ("ADDED", "11"),
        ("DELETED", "12"),
    ]
    query = dict(server.asked[0].query)
    assert 300 <= int(query.pop("timeoutSeconds")) <= 600
    assert query == {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": "10",
        "labelSelector": "x=y",
    }


async def test_events_are_found_however_they_are_cut(server, client):
    text = event("ADDED", one("a", "11", x="é" * 100_000)) + event("ADDED", one("b", "12"))
    cuts = [text[at : at + 997] for at in range(0, len(text), 997)]
    server.answers += [watch(text), watch(*cuts)]
    assert await events(client) == await events(client)
    assert len(server.asked) == 2


async def test_event_without_an_end_is_not_gathered(server, client, monkeypatch):
    monkeypatch.setattr(transport, "MAX_EVENT_BYTES", 1 << 17)
    server.answers += [
        watch(event("ADDED", one("a", "11", x="y" * 100_000))),
        watch(b"x" * 300_000),
    ]
    assert len(await events(client)) == 2
    with pytest.raises(UnexpectedAnswer, match="exceeds 131072 bytes"):
        await events(client)


@pytest.mark.parametrize("cut", [True, False], ids=["connection broken", "answer ended"])
async def test_half_an_event_is_none(server, client, cut):
    whole, half = event("ADDED", one("a", "11")), event("ADDED", one("b", "12"))[:40]
    server.answers.append(watch(whole, half, cut=cut))
    watching = client.watch(CONFIG_MAPS, since="10")
    assert [(await anext(watching)).resource_version for _ in range(2)] == ["10", "11"]
    with pytest.raises(Unavailable):
        await anext(watching)


async def test_watch_that_falls_silent_is_given_up(server):
    async def silent(request):
        response = await watch()(request)
        await asyncio.Event().wait()
        return response

    server.answers.append(silent)
    # Servers are asked for whole seconds: the least is one of them.
    watch_for, grace = timedelta(0), timedelta(milliseconds=-900)
    async with Client.open(server.access(), watch_duration=watch_for, grace=grace) as client:
        with pytest.raises(Unavailable, match="did not answer within 100ms"):
            await events(client)
