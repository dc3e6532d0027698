"""The error hierarchy. Callers catch the class that determines their reaction.

    KubelendError
    ├── InvalidInput             the caller must change the request
    │   ├── InvalidQuantity      not a Kubernetes quantity, or out of range
    │   ├── InvalidDuration      not a Go duration, or out of range
    │   ├── InvalidIdentity      the certificate's subject names no valid cluster or user
    │   ├── InvalidGrant         not a valid grant of this broker
    │   ├── TooSlow              the request was not received in time; retryable
    │   └── KeyReused            an idempotency key was used for a different request
    ├── Forbidden                the caller is authenticated but not authorized
    │   ├── Revoked              the caller's certificate is revoked
    │   ├── TokenRefused         the join token is wrong, expired, used up, or for another name
    │   ├── QuotaExceeded        the requester's quota or budget would be exceeded
    │   └── Unauthenticated      the Kubernetes API server rejected the credentials
    ├── NotFound                 no such cluster, reservation or route
    │   └── Hidden               exists, but not visible to the caller; the same on the wire
    ├── MethodNotAllowed         the route does not support this method
    ├── Conflict                 the current state of the object does not allow the operation
    │   ├── NoCapacity           no cluster fits the request; carries the explanation
    │   ├── WrongPhase           the reservation's phase does not allow the transition
    │   ├── IdentityInUse        another agent is active for this cluster; retryable
    │   ├── AlreadyExists        an object with that name exists
    │   └── Gone                 the resource version was compacted: list again
    ├── LimitExceeded            a limit was exceeded; retryable after a delay
    │   ├── RateLimited          too many requests per second
    │   ├── QueueFull            too many requests are waiting, in total or of one requester
    │   └── BodyTooLarge         the body exceeds the size limit; not retryable
    ├── Unavailable              the broker cannot respond now; retryable
    │   ├── StoreFailed          the store failed to read or write
    │   ├── NotReady             the broker is starting, stopping or loading its store
    │   ├── NotLeader            another replica is the leader; this one serves reads only
    │   └── BrokerUnreachable    no connection, or no response in time
    │       └── CertificateRefused   the broker rejected the caller's certificate; not retryable
    ├── UnexpectedResponse       the response does not match the API contract
    │   └── MissingRoute         the broker has no such route
    └── InvalidSettings          flags, environment or files are not a valid configuration

Each class has a `code`, its name, which crosses the wire, and a flag `retryable`. `wire.problems` maps
classes to HTTP statuses; a client raises the same class that the broker raised.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from kubelend.core.explanations import Explanation


class KubelendError(Exception):
    """Base of all errors. `message` is one sentence for a person, `hint` says what to do about it."""

    code: ClassVar[str] = "Internal"
    retryable: ClassVar[bool] = False
    retry_after: float = 0.0
    """How many seconds the caller shall wait before it tries again, if the error says so."""

    def __init_subclass__(cls) -> None:
        cls.code = cls.__dict__.get("code", cls.__name__)

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class InvalidInput(KubelendError):
    """The request is invalid; the caller must change it."""


class InvalidQuantity(InvalidInput):
    """The text is not a Kubernetes quantity, or its value is out of range."""


class InvalidDuration(InvalidInput):
    """The text is not a Go duration, or its value is out of range."""


class InvalidIdentity(InvalidInput):
    """The certificate's subject does not name a valid cluster or user."""


class InvalidGrant(InvalidInput):
    """The text is not a valid grant of this broker."""


class TooSlow(InvalidInput):
    """The request was not received completely in time; it had no effect."""

    retryable = True


class KeyReused(InvalidInput):
    """The idempotency key was already used for a different request. Use a new key for a new request."""


class Forbidden(KubelendError):
    """The caller is authenticated but not authorized."""


class Revoked(Forbidden):
    """The caller's certificate is revoked."""


class TokenRefused(Forbidden):
    """The join token is wrong, expired, used up, or issued for another role or name."""


class QuotaExceeded(Forbidden):
    """The request would exceed the quota or budget of the requester."""


class Unauthenticated(Forbidden):
    """The Kubernetes API server rejected the credentials."""


class NotFound(KubelendError):
    """The cluster, reservation or route does not exist, or is not visible to the caller."""


class Hidden(NotFound):
    """The object exists, but the caller must not learn that: same code and text as `NotFound`."""

    code = NotFound.code


class MethodNotAllowed(KubelendError):
    """The route does not support this method; `allowed` lists the supported ones."""

    def __init__(self, message: str, *, hint: str = "", allowed: Iterable[str] = ()) -> None:
        super().__init__(message, hint=hint)
        self.allowed = tuple(allowed)


class Conflict(KubelendError):
    """The current state of the object does not allow the operation."""


class NoCapacity(Conflict):
    """No cluster fits the request. `explanation` gives the rejection reasons and a suggestion."""

    def __init__(
        self, message: str, *, hint: str = "", explanation: Explanation | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.explanation = explanation


class WrongPhase(Conflict):
    """The reservation's phase does not allow the transition."""


class IdentityInUse(Conflict):
    """Another agent is active for this cluster. Retryable: that agent may stop or time out."""

    retryable = True


class AlreadyExists(Conflict):
    """An object with that name already exists."""


class Gone(Conflict):
    """The requested resource version was compacted. List again and continue from there."""


class LimitExceeded(KubelendError):
    """A limit was exceeded. The same call may succeed after `retry_after` seconds."""

    retryable = True

    def __init__(self, message: str, *, hint: str = "", retry_after: float = 1.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class RateLimited(LimitExceeded):
    """The caller exceeded its request rate."""


class QueueFull(LimitExceeded):
    """Too many requests are waiting, in total or of this requester."""


class BodyTooLarge(LimitExceeded):
    """The body exceeds the size limit. Retrying does not help."""

    retryable = False


class Unavailable(KubelendError):
    """The broker cannot respond now. Retry later, after `retry_after` seconds if it is set."""

    retryable = True

    def __init__(self, message: str, *, hint: str = "", retry_after: float = 0.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class StoreFailed(Unavailable):
    """The store failed, and the change may or may not be durable. Retry with the same
    `Idempotency-Key`, where the call takes one, to find out.
    """


class NotReady(Unavailable):
    """The broker is starting, stopping or loading its store."""


class NotLeader(Unavailable):
    """Another broker replica is the leader; this one serves reads only."""


class BrokerUnreachable(Unavailable):
    """The broker could not be reached or did not respond in time."""


class CertificateRefused(BrokerUnreachable):
    """The broker rejected the caller's certificate. Retry with another one, not with the same."""

    retryable = False


class UnexpectedResponse(KubelendError):
    """The response does not match the API contract."""


class MissingRoute(UnexpectedResponse):
    """The broker has no such route, such as the one of the published system."""


class InvalidSettings(KubelendError):
    """Flags, environment or files are not a valid configuration."""


def reservation_not_found(name: str, kind: type[NotFound] = NotFound) -> NotFound:
    """Builds the same error for a missing reservation and for one the caller may not see."""
    return kind(f"no reservation {name!r}", hint="see `kubelend get reservations`")
