"""The client with its codec, paths and patches, where a real API server cannot be made to respond so."""

import asyncio
import json
from datetime import timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import config_maps
import scripted_api
from certificates import Certificates
from config_maps import CONFIG_MAPS, ConfigMap
from kubelend.core import errors
from kubelend.core.errors import (
    Conflict,
    Forbidden,
    InvalidInput,
    NotFound,
    RateLimited,
    Unauthenticated,
    Unavailable,
    UnexpectedResponse,
)
from kubelend.kits.backoff import Backoff
from kubelend.kube import codec, resources, transport
from kubelend.kube.client import Client
from kubelend.kube.codec import UndecodableObject
from kubelend.kube.config import DataOrFile
from kubelend.kube.resources import Resource
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


async def test_undefined_kind_is_not_a_missing_object(server, client):
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


async def test_expired_list_starts_again_until_it_expires_repeatedly(server, client):
    server.answers += [page(one("gone"), following="more"), status(410), page(one("a"))]
    listing = await client.list(CONFIG_MAPS)
    assert [each.metadata.name for each in listing.objects] == ["a"]
    assert "continue" not in server.asked[2].query
    server.answers += [status(410) for _ in range(3)]
    with pytest.raises(Unavailable, match="expired repeatedly"):
        await client.list(CONFIG_MAPS)


async def test_rate_limited_requests_and_watches_are_retried(server, client):
    """Watches as of a kind that was defined a moment ago."""
    server.answers += [status(429, retry_after=1), found(one("a"))]
    assert await client.create(CONFIG_MAPS, config_maps.make("a"))
    server.answers += [status(429, retry_after=1), watch(event("ADDED", one("a", "11")))]
    assert [seen.resource_version for seen in await events(client)][-1] == "11"
    assert len(server.asked) == 4


@pytest.mark.parametrize("retry_after", [0, 60], ids=["at once", "too long"])
async def test_request_with_a_long_retry_after_fails(server, retry_after):
    none = Backoff(retries=0 if not retry_after else 2, longest=timedelta(seconds=2))
    server.answers.append(status(429, retry_after=retry_after))
    async with Client.open(server.access(), backoff=none) as client:
        with pytest.raises(RateLimited):
            await client.find(CONFIG_MAPS, "a", "default")


async def test_write_that_may_have_succeeded_is_not_retried(server, client):
    server.answers += [status(500, retry_after=1), found(one("a"))]
    with pytest.raises(Unavailable, match="responded with 500"):
        await client.create(CONFIG_MAPS, config_maps.make("a"))
    assert len(server.asked) == 1


async def test_other_errors_are_not_retried(server, client):
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


async def test_request_times_out(server):
    async def silent(request):
        await asyncio.Event().wait()

    server.answers.append(silent)
    async with Client.open(server.access(), timeout=timedelta(milliseconds=100)) as client:
        with pytest.raises(Unavailable, match="did not answer within 100ms"):
            await client.raw("GET", "/version")


async def test_time_in_the_queue_does_not_count_for_the_timeout(server):
    async def slow(request):
        await asyncio.sleep(0.1)
        return found({})

    server.answers += [slow for _ in range(15)]
    async with Client.open(
        server.access(), timeout=timedelta(seconds=1), max_concurrent=1
    ) as client:
        await asyncio.gather(*(client.raw("GET", "/version") for _ in range(15)))
    assert len(server.asked) == 15


async def test_unreachable_server_is_reported(server, unused_tcp_port):
    missing = server.access(server=f"https://127.0.0.1:{unused_tcp_port}")
    async with Client.open(missing) as client:
        with pytest.raises(Unavailable, match=r"cannot connect to the API server at .*: "):
            await client.raw("GET", "/version")


async def test_server_of_another_authority_is_not_trusted(server, tmp_path):
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


async def test_client_certificate_is_presented_and_reloaded(server, certificates, tmp_path):
    mine = tmp_path / "me.pem"
    pairs = [certificates.cluster("a"), certificates.cluster("b")]
    server.answers += [found({}), found({})]
    own = server.access(certificate=DataOrFile(path=mine), key=DataOrFile(path=mine))
    async with Client.open(own) as client:
        for pair in pairs:
            mine.write_bytes((pair / "tls.crt").read_bytes() + (pair / "tls.key").read_bytes())
            await client.raw("GET", "/version")
    assert server.callers == ["a", "b"]


async def test_rejected_token_is_reloaded_and_the_request_repeated(server, tmp_path):
    token = tmp_path / "token"
    token.write_text("first")

    async def replace(request):
        token.write_text("second")
        return status(401)

    server.answers += [replace, found(one("a"))]
    async with Client.open(server.access(token=DataOrFile(path=token))) as client:
        assert await client.find(CONFIG_MAPS, "a", "default")
    assert [each.headers["Authorization"][7:] for each in server.asked] == ["first", "second"]


async def test_unchanged_rejected_token_is_not_retried(server):
    server.answers.append(status(401, "Unauthorized"))
    async with Client.open(server.access(token=DataOrFile(b"hunter2"))) as client:
        with pytest.raises(Unauthenticated, match="check the token") as caught:
            await client.raw("GET", "/version")
    assert "hunter2" not in str(caught.value)


async def test_path_impersonation_and_trust_are_those_of_the_configuration(server):
    server.answers.append(found({}))
    headers = (("Impersonate-User", "jane"), ("Impersonate-Group", "a"), ("Impersonate-Group", "b"))
    url = f"{server.access().server}/k8s/c-1"
    access = server.access(
        server=url, impersonation=headers, authorities=DataOrFile(), insecure=True
    )
    async with Client.open(access) as client:
        await client.raw("GET", "/version")
    [request] = server.asked
    assert request.path == "/k8s/c-1/version"
    assert request.headers["Impersonate-User"] == "jane"
    assert request.headers.getall("Impersonate-Group") == ["a", "b"]


async def test_watch_begins_with_a_bookmark(server, client):
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


async def test_events_may_be_split_anywhere(server, client):
    text = event("ADDED", one("a", "11", x="é" * 100_000)) + event("ADDED", one("b", "12"))
    cuts = [text[at : at + 997] for at in range(0, len(text), 997)]
    server.answers += [watch(text), watch(*cuts)]
    assert await events(client) == await events(client)
    assert len(server.asked) == 2


async def test_size_of_an_event_is_limited(server, client, monkeypatch):
    monkeypatch.setattr(transport, "MAX_EVENT_BYTES", 1 << 17)
    server.answers += [
        watch(event("ADDED", one("a", "11", x="y" * 100_000))),
        watch(b"x" * 300_000),
    ]
    assert len(await events(client)) == 2
    with pytest.raises(UnexpectedResponse, match="exceeds 131072 bytes"):
        await events(client)


@pytest.mark.parametrize("cut", [True, False], ids=["connection broken", "answer ended"])
async def test_incomplete_event_is_an_error(server, client, cut):
    whole, half = event("ADDED", one("a", "11")), event("ADDED", one("b", "12"))[:40]
    server.answers.append(watch(whole, half, cut=cut))
    watching = client.watch(CONFIG_MAPS, since="10")
    assert [(await anext(watching)).resource_version for _ in range(2)] == ["10", "11"]
    with pytest.raises(Unavailable):
        await anext(watching)


async def test_silent_watch_times_out(server):
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


# -- codec

DECODER = codec.decoder_for(CONFIG_MAPS)
BROKEN = {"metadata": {"name": "b", "namespace": "n", "uid": "u"}, "data": {"x": 1}}


def status_body(code, **fields):
    return msgspec.json.encode({"kind": "Status", "code": code} | fields)


def delay(*answer):
    error = codec.error_from_response(*answer)
    assert isinstance(error, errors.LimitExceeded | errors.Unavailable)
    return error.retry_after


@pytest.mark.parametrize(
    "code, fields, kind",
    [
        (400, {}, errors.InvalidInput),
        (401, {}, errors.Unauthenticated),
        (403, {}, errors.Forbidden),
        (404, {"details": {"name": "x"}}, errors.NotFound),
        (405, {}, errors.MethodNotAllowed),
        (409, {"reason": "Conflict"}, errors.Conflict),
        (409, {"reason": "AlreadyExists"}, errors.AlreadyExists),
        (410, {"reason": "Expired"}, errors.Gone),
        (413, {}, errors.BodyTooLarge),
        (415, {}, errors.InvalidInput),
        (418, {}, errors.UnexpectedResponse),
        (422, {}, errors.InvalidInput),
        (429, {}, errors.RateLimited),
        (500, {}, errors.Unavailable),
        (503, {}, errors.Unavailable),
        (504, {}, errors.Unavailable),
    ],
)
def test_each_status_is_an_error_of_its_own_class(code, fields, kind):
    error = codec.error_from_response(code, status_body(code, message="the reason", **fields), None)
    assert type(error) is kind
    assert "the reason" in error.message


def test_delay_is_taken_from_the_header_before_the_body():
    body = status_body(429, details={"retryAfterSeconds": 3})
    assert delay(429, body, "7") == 7.0
    assert delay(429, body, None) == 3.0
    assert delay(503, b"", "7") == 7.0
    assert delay(503, b"", "Wed, 21 Oct 2015 07:28:00 GMT") == 0.0


def test_error_page_of_a_proxy_is_reported_in_one_line():
    error = codec.error_from_response(502, b"<html>\n<b>Bad</b>\n" + b"x" * 1000, None)
    assert type(error) is errors.Unavailable
    assert "502: <html> <b>Bad</b>" in error.message
    assert len(error.message) < 300


def test_undecodable_object_does_not_affect_its_page():
    body = {"metadata": {"resourceVersion": "9"}, "items": [scripted_api.one("a"), BROKEN]}
    page = DECODER.decode_page(msgspec.json.encode(body))
    assert [one.metadata.name for one in page.objects] == ["a"]
    [unread] = page.undecodable
    assert unread[:3] == ("n", "b", "u")
    assert "$.data" in unread.error
    assert page.resource_version == "9"


@pytest.mark.parametrize("kind, is_deleted", [("MODIFIED", False), ("DELETED", True)])
def test_undecodable_object_does_not_end_a_watch(kind, is_deleted):
    seen = DECODER.decode_event(scripted_api.event(kind, BROKEN))
    assert seen.found is None
    assert isinstance(seen.undecodable, UndecodableObject)
    assert seen.undecodable.is_deleted is is_deleted


def test_list_without_items_is_empty():
    page = DECODER.decode_page(b'{"metadata": {"resourceVersion": "3"}, "items": null}')
    assert page == ([], [], "3", "")


@pytest.mark.parametrize("read", [DECODER.decode_object, DECODER.decode_page, DECODER.decode_event])
def test_response_that_is_no_json_is_an_unexpected_answer(read):
    with pytest.raises(errors.UnexpectedResponse, match="configmaps"):
        read(b"<html>")


def test_object_is_sent_with_its_kind():
    sent = msgspec.json.decode(codec.encode_object(CONFIG_MAPS, config_maps.make("a", x="y")))
    assert sent == {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "a", "namespace": "default"},
        "data": {"x": "y"},
    }


def test_new_object_has_no_version_yet():
    old = DECODER.decode_object(msgspec.json.encode(scripted_api.one("a", "5")))
    sent = msgspec.json.decode(codec.encode_object(CONFIG_MAPS, old, is_new=True))
    assert sent["metadata"] == {"name": "a", "namespace": "default"}
    kept = msgspec.json.decode(codec.encode_object(CONFIG_MAPS, old))
    assert kept["metadata"]["resourceVersion"] == "5"


# -- resources

NODES = Resource("", "v1", "nodes", "Node", ConfigMap, namespaced=False)
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease", ConfigMap)


@pytest.mark.parametrize(
    "resource, arguments, path",
    [
        pytest.param(CONFIG_MAPS, (), "/api/v1/configmaps", id="all namespaces"),
        pytest.param(CONFIG_MAPS, ("a",), "/api/v1/namespaces/a/configmaps", id="one namespace"),
        pytest.param(CONFIG_MAPS, ("a", "b"), "/api/v1/namespaces/a/configmaps/b", id="one object"),
        pytest.param(NODES, ("a", "n"), "/api/v1/nodes/n", id="of the whole cluster"),
        pytest.param(NODES, ("", "n", "status"), "/api/v1/nodes/n/status", id="its status"),
        pytest.param(
            LEASES, ("a",), "/apis/coordination.k8s.io/v1/namespaces/a/leases", id="of a group"
        ),
        pytest.param(
            CONFIG_MAPS,
            ("a/b", "../c?d"),
            "/api/v1/namespaces/a%2Fb/configmaps/..%2Fc%3Fd",
            id="name is quoted",
        ),
    ],
)
def test_path(resource, arguments, path):
    assert resource.path(*arguments) == path


def test_path_of_an_object_needs_a_namespace():
    with pytest.raises(InvalidInput, match="namespace"):
        CONFIG_MAPS.path("", "b")


# -- merge patches


values = st.recursive(
    st.integers() | st.text() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=8,
)
json_objects = st.dictionaries(st.sampled_from("abcd"), values)


@given(json_objects, json_objects)
def test_applied_merge_patch_gives_the_other_object_and_names_only_what_differs(before, after):
    change = resources.merge_patch(before, after)
    assert applied(before, change) == after
    names = before.keys() | after.keys()
    assert change.keys() == {one for one in names if before.get(one) != after.get(one)}


def applied(target, change):
    """RFC 7386, section 2."""
    if not isinstance(change, dict):
        return change
    found = dict(target) if isinstance(target, dict) else {}
    for name, value in change.items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = applied(found.get(name), value)
    return found
