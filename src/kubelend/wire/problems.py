"""Errors on the wire: HTTP status, problem body (RFC 9457), and decoding back to the same error class."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

import msgspec

from kubelend.core import errors
from kubelend.wire import bodies, json_types

CONTENT_TYPE = "application/problem+json"

STATUS_BY_ERROR: dict[type[errors.KubelendError], HTTPStatus] = {
    errors.KubelendError: HTTPStatus.INTERNAL_SERVER_ERROR,
    errors.InvalidInput: HTTPStatus.BAD_REQUEST,
    errors.TooSlow: HTTPStatus.REQUEST_TIMEOUT,
    errors.KeyReused: HTTPStatus.UNPROCESSABLE_ENTITY,
    errors.InvalidIdentity: HTTPStatus.FORBIDDEN,
    errors.Forbidden: HTTPStatus.FORBIDDEN,
    errors.NotFound: HTTPStatus.NOT_FOUND,
    errors.MethodNotAllowed: HTTPStatus.METHOD_NOT_ALLOWED,
    errors.Conflict: HTTPStatus.CONFLICT,
    errors.LimitExceeded: HTTPStatus.TOO_MANY_REQUESTS,
    errors.BodyTooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    errors.Unavailable: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.UnexpectedResponse: HTTPStatus.BAD_GATEWAY,
}
"""HTTP status by class. Other classes have the status of their nearest base."""


def http_status(error: errors.KubelendError) -> HTTPStatus:
    return next(STATUS_BY_ERROR[kind] for kind in type(error).__mro__ if kind in STATUS_BY_ERROR)


def status_and_codes(classes: Iterable[json_types.ErrorClass]) -> list[str]:
    """Format errors as status and code: `404 NotFound`."""
    return [f"{int(http_status(kind('')))} {kind.code}" for kind in classes]


def to_problem(error: errors.KubelendError) -> bodies.Problem:
    """Convert an error to a problem body: `code` is for programs, `error` for people."""
    # Imported late, because it loads numpy, which clients of the broker do not need.
    from kubelend.wire import conversion

    status = http_status(error)
    explanation = error.explanation if isinstance(error, errors.NoCapacity) else None
    return bodies.Problem(
        type=f"urn:kubelend:problem:{error.code}",
        title=status.phrase,
        status=int(status),
        detail=error.message,
        code=error.code,
        error=str(error),
        hint=error.hint,
        retryable=error.retryable,
        explanation=None if explanation is None else conversion.from_explanation(explanation),
    )


def error_from_response(status: int, body: bytes) -> errors.KubelendError:
    """Decode an error response, also one that does not come from a broker."""
    try:
        problem = msgspec.json.decode(body, type=bodies.Problem)
    except msgspec.MsgspecError:
        text = body[:200].decode("utf-8", "replace").strip()
        return _undecodable_error(status)(f"the broker answered {status}: {text or 'empty body'}")
    kind = json_types.ERRORS_BY_CODE.get(problem.code, errors.KubelendError)
    return kind(problem.detail, hint=problem.hint)


def _undecodable_error(status: int) -> type[errors.KubelendError]:
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        # A proxy answers with its own page when the broker fails: retryable, as if it were unreachable.
        return errors.Unavailable
    if status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
        return errors.MissingRoute
    return errors.UnexpectedResponse
