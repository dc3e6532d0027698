"""What an API server says, made ours."""

import msgspec
import pytest

import config_maps
import scripted_api
from config_maps import CONFIG_MAPS
from kubelend.core import errors
from kubelend.kube import codec
from kubelend.kube.codec import UndecodableObject

DECODER = codec.decoder_for(CONFIG_MAPS)
BROKEN = {"metadata": {"name": "b", "namespace": "n", "uid": "u"}, "data": {"x": 1}}


def status(code, **fields):
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
        (418, {}, errors.UnexpectedAnswer),
        (422, {}, errors.InvalidInput),
        (429, {}, errors.RateLimited),
        (500, {}, errors.Unavailable),
        (503, {}, errors.Unavailable),
        (504, {}, errors.Unavailable),
    ],
)
def test_each_status_is_an_error_of_its_own_class(code, fields, kind):
    error = codec.error_from_response(code, status(code, message="the reason", **fields), None)
    assert type(error) is kind
    assert "the reason" in error.message


def test_delay_is_taken_from_the_header_before_the_body():
    body = status(429, details={"retryAfterSeconds": 3})
    assert delay(429, body, "7") == 7.0
    assert delay(429, body, None) == 3.0
    assert delay(503, b"", "7") == 7.0
    assert delay(503, b"", "Wed, 21 Oct 2015 07:28:00 GMT") == 0.0


def test_page_of_a_proxy_is_reported_in_one_line():
    error = codec.error_from_response(502, b"<html>\n<b>Bad</b>\n" + b"x" * 1000, None)
    assert type(error) is errors.Unavailable
    assert "502: <html> <b>Bad</b>" in error.message
    assert len(error.message) < 300


def test_missing_kind_is_not_a_missing_object():
    assert codec.is_object_not_found(
        codec.error_from_response(404, status(404, details={"name": "x"}), None)
    )
    assert not codec.is_object_not_found(
        codec.error_from_response(404, b"404 page not found", None)
    )


def test_object_that_does_not_fit_does_not_spoil_its_page():
    body = {"metadata": {"resourceVersion": "9"}, "items": [scripted_api.one("a"), BROKEN]}
    page = DECODER.decode_page(msgspec.json.encode(body))
    assert [one.metadata.name for one in page.objects] == ["a"]
    [unread] = page.undecodable
    assert unread[:3] == ("n", "b", "u")
    assert "$.data" in unread.error
    assert page.resource_version == "9"


@pytest.mark.parametrize("kind, is_deleted", [("MODIFIED", False), ("DELETED", True)])
def test_object_that_does_not_fit_does_not_end_a_watch(kind, is_deleted):
    seen = DECODER.decode_event(scripted_api.event(kind, BROKEN))
    assert seen.found is None
    assert isinstance(seen.undecodable, UndecodableObject)
    assert seen.undecodable.is_deleted is is_deleted


def test_list_without_items_is_empty():
    page = DECODER.decode_page(b'{"metadata": {"resourceVersion": "3"}, "items": null}')
    assert page == ([], [], "3", "")


def test_bookmark_has_a_version_and_no_object():
    line = scripted_api.event("BOOKMARK", {"metadata": {"resourceVersion": "77"}})
    assert DECODER.decode_event(line) == ("BOOKMARK", None, "77", None)


def test_watch_that_is_too_old_ends_with_gone():
    with pytest.raises(errors.Gone, match="too old"):
        DECODER.decode_event(scripted_api.event("ERROR", {"code": 410, "message": "too old"}))


@pytest.mark.parametrize("read", [DECODER.decode_object, DECODER.decode_page, DECODER.decode_event])
def test_nonsense_is_an_unexpected_answer(read):
    with pytest.raises(errors.UnexpectedAnswer, match="configmaps"):
        read(b"<html>")


def test_one_decoder_serves_a_resource():
    assert codec.decoder_for(CONFIG_MAPS) is DECODER


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
