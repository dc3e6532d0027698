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
    code: status
    for status, codes in {
        400: "InvalidInput InvalidQuantity InvalidDuration InvalidGrant",
        403: "InvalidIdentity Forbidden Revoked TokenRefused QuotaExceeded Unauthenticated",
        404: "NotFound",
        405: "MethodNotAllowed",
        408: "TooSlow",
        409: "Conflict NoCapacity WrongPhase IdentityInUse AlreadyExists Gone",
        413: "BodyTooLarge",
        422: "KeyReused",
        429: "LimitExceeded RateLimited QueueFull",
        500: "Internal InvalidSettings",
        502: "UnexpectedResponse MissingRoute",
        503: "Unavailable StoreFailed NotReady NotLeader BrokerUnreachable CertificateRefused",
    }.items()
    for code in codes.split()
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
    plain = msgspec.json.decode(msgspec.json.encode(problems.to_problem(kind("gone"))))
    assert plain["error"] == plain["detail"] == "gone"
    assert "hint" not in plain


def test_explanation_is_part_of_the_problem():
    explanation = explanations.explain_placement(
        make.question("cpu=9,memory=1Gi"), make.ledger(a="cpu=4,memory=8Gi").fleet, 10
    )
    problem = problems.to_problem(errors.NoCapacity("no", explanation=explanation))
    assert problem.explanation is not None
    assert problem.explanation.summary == "0/1 cluster fits: 1 InsufficientCPU"


@pytest.mark.parametrize(
    "status, body, kind, text",
    [
        (400, b"<html>502 Bad Gateway</html>", errors.UnexpectedResponse, "<html>502 Bad Gateway"),
        (400, b"", errors.UnexpectedResponse, "empty body"),
        (400, b"\xff\xfe", errors.UnexpectedResponse, "\ufffd\ufffd"),
        (400, b"{}", errors.UnexpectedResponse, "{}"),
        (400, b'{"error":"of another system"}', errors.UnexpectedResponse, '{"error":"of'),
        (404, b"404 page not found\n", errors.MissingRoute, ""),
        (405, b"404 page not found\n", errors.MissingRoute, ""),
        *(
            (status, b"<html>Bad Gateway</html>", errors.Unavailable, "<html>Bad Gateway</html>")
            for status in (500, 502, 503, 504, 599)
        ),
    ],
)
def test_response_of_another_server_is_told_from_one_of_a_broker(status, body, kind, text):
    error = problems.error_from_response(status, body)
    assert (type(error), error.retryable) == (kind, kind is errors.Unavailable)
    assert kind is errors.MissingRoute or (
        error.message.startswith(f"the broker answered {status}: {text}")
    )


def test_unknown_code_of_a_newer_broker_is_a_plain_error():
    problem = bodies.Problem("urn:x", "Teapot", 418, "short and stout", "Teapot", "short and stout")
    error = problems.error_from_response(418, msgspec.json.encode(problem))
    assert type(error) is KubelendError
    assert error.message == "short and stout"
