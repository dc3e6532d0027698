"""Errors on the wire: status and code of every class, and the same class after decoding."""

import inspect

import msgspec
import pytest

import make
from kubelend.core import errors, explanations
from kubelend.core.errors import KubelendError
from kubelend.wire import bodies, problems

CLASSES = [
    found
    for _, found in inspect.getmembers(errors, inspect.isclass)
    if issubclass(found, KubelendError)
]

STATUSES = {
    "Internal": 500,
    "InvalidInput": 400,
    "InvalidQuantity": 400,
    "InvalidDuration": 400,
    "InvalidIdentity": 403,
    "InvalidGrant": 400,
    "TooSlow": 408,
    "KeyReused": 422,
    "Forbidden": 403,
    "Revoked": 403,
    "TokenRefused": 403,
    "QuotaExceeded": 403,
    "Unauthenticated": 403,
    "NotFound": 404,
    "MethodNotAllowed": 405,
    "Conflict": 409,
    "NoCapacity": 409,
    "WrongPhase": 409,
    "IdentityInUse": 409,
    "AlreadyExists": 409,
    "Gone": 409,
    "LimitExceeded": 429,
    "RateLimited": 429,
    "QueueFull": 429,
    "BodyTooLarge": 413,
    "Unavailable": 503,
    "StoreFailed": 503,
    "NotReady": 503,
    "NotLeader": 503,
    "BrokerUnreachable": 503,
    "CertificateRefused": 503,
    "UnexpectedResponse": 502,
    "MissingRoute": 502,
    "InvalidSettings": 500,
}
"""API: programs decide by these."""


def test_every_class_has_its_row():
    assert {found.code for found in CLASSES} == set(STATUSES)
    assert len({found.code for found in CLASSES}) == len(CLASSES) - 1  # Hidden is NotFound to all


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_error_becomes_a_problem_and_the_same_error_again(kind):
    error = kind("it went wrong", hint="do this")
    problem = problems.to_problem(error)
    assert problem.status == int(problems.http_status(error)) == STATUSES[kind.code]
    assert problem.code == kind.code
    assert problem.type == f"urn:kubelend:problem:{kind.code}"
    assert (problem.detail, problem.hint) == ("it went wrong", "do this")
    assert problem.error == "it went wrong; do this"
    assert problem.retryable is kind.retryable
    again = problems.error_from_response(problem.status, msgspec.json.encode(problem))
    # A hidden object must look like a missing one.
    assert type(again) is (errors.NotFound if kind is errors.Hidden else kind)
    assert (again.message, again.hint) == ("it went wrong", "do this")
    assert str(again) == str(error)


def test_hint_is_optional():
    body = msgspec.json.decode(msgspec.json.encode(problems.to_problem(errors.NotFound("gone"))))
    assert body["error"] == body["detail"] == "gone"
    assert "hint" not in body


def test_explanation_is_part_of_the_problem():
    explanation = explanations.explain_placement(
        make.question("cpu=9,memory=1Gi"), make.ledger(a="cpu=4,memory=8Gi").fleet, 10
    )
    problem = problems.to_problem(errors.NoCapacity("no", explanation=explanation))
    assert problem.explanation is not None
    assert problem.explanation.summary == "0/1 cluster fits: 1 InsufficientCPU"


@pytest.mark.parametrize(
    "body, text",
    [
        (b"<html>502 Bad Gateway</html>", "<html>502 Bad Gateway</html>"),
        (b"", "empty body"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"{}", "{}"),
        (b'{"error":"of another system"}', "of another system"),
    ],
)
def test_response_of_another_server_is_unexpected(body, text):
    error = problems.error_from_response(400, body)
    assert type(error) is errors.UnexpectedResponse
    assert not error.retryable
    assert error.message.startswith("the broker answered 400: ")
    assert text in error.message


@pytest.mark.parametrize("status", [404, 405])
def test_missing_route_is_told_from_a_missing_object(status):
    error = problems.error_from_response(status, b"404 page not found\n")
    assert type(error) is errors.MissingRoute
    assert not error.retryable


@pytest.mark.parametrize("status", [500, 502, 503, 504, 599])
def test_server_error_of_a_proxy_is_retryable(status):
    error = problems.error_from_response(status, b"<html>Bad Gateway</html>")
    assert type(error) is errors.Unavailable
    assert error.retryable
    assert error.message == f"the broker answered {status}: <html>Bad Gateway</html>"


def test_unknown_code_of_a_newer_broker_is_a_plain_error():
    problem = bodies.Problem("urn:x", "Teapot", 418, "short and stout", "Teapot", "short and stout")
    error = problems.error_from_response(418, msgspec.json.encode(problem))
    assert type(error) is KubelendError
    assert error.message == "short and stout"
