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
    │   ├── QueueFull            the wait queue of the broker is full
    │   └── BodyTooLarge         the body exceeds the size limit; not retryable
    ├── Unavailable              the broker cannot respond now; retryable
    │   ├── StoreFailed          the store failed to read or write
    │   ├── NotReady             the broker is starting, stopping or loading its store
    │   ├── NotLeader            another replica is the leader; this one serves reads only
    │   └── BrokerUnreachable    no connection, or no response in time
    │       └── CertificateRefused   the broker rejected the caller's certificate
    ├── UnexpectedAnswer         the response does not match the API contract
    └── InvalidSettings          flags, environment or files are not a valid configuration

Each class has a stable `code`, which crosses the wire, and a flag `retryable`. `wire.problems` maps
classes to HTTP statuses; a client raises the same class that the broker raised.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from kubelend.core.explanations import Explanation


class KubelendError(Exception):
    """Base class of all errors. `message` is one sentence for a person; `hint` says what to do
    about it.
    """

    code: ClassVar[str] = "Internal"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class InvalidInput(KubelendError):
    """The request is invalid; the caller must change it."""

    code = "InvalidInput"


class InvalidQuantity(InvalidInput):
    """The text is not a Kubernetes quantity, or its value is out of range."""

    code = "InvalidQuantity"


class InvalidDuration(InvalidInput):
    """The text is not a Go duration, or its value is out of range."""

    code = "InvalidDuration"


class InvalidIdentity(InvalidInput):
    """The certificate's subject does not name a valid cluster or user."""

    code = "InvalidIdentity"


class InvalidGrant(InvalidInput):
    """The text is not a valid grant of this broker."""

    code = "InvalidGrant"


class TooSlow(InvalidInput):
    """The request was not received completely in time; it had no effect."""

    code = "TooSlow"
    retryable = True


class KeyReused(InvalidInput):
    """The idempotency key was already used for a different request. Use a new key for a new request."""

    code = "KeyReused"


class Forbidden(KubelendError):
    """The caller is authenticated but not authorized."""

    code = "Forbidden"


class Revoked(Forbidden):
    """The caller's certificate is revoked."""

    code = "Revoked"


class TokenRefused(Forbidden):
    """The join token is wrong, expired, used up, or issued for another role or name."""

    code = "TokenRefused"


class QuotaExceeded(Forbidden):
    """The request would exceed the quota or budget of the requester."""

    code = "QuotaExceeded"


class Unauthenticated(Forbidden):
    """The Kubernetes API server rejected the credentials."""

    code = "Unauthenticated"


class NotFound(KubelendError):
    """The cluster, reservation or route does not exist, or is not visible to the caller."""

    code = "NotFound"


class Hidden(NotFound):
    """The object exists, but the caller must not learn that: same code and text as `NotFound`."""


class MethodNotAllowed(KubelendError):
    """The route does not support this method; `allowed` lists the supported ones."""

    code = "MethodNotAllowed"

    def __init__(self, message: str, *, hint: str = "", allowed: Iterable[str] = ()) -> None:
        super().__init__(message, hint=hint)
        self.allowed = tuple(allowed)


class Conflict(KubelendError):
    """The current state of the object does not allow the operation."""

    code = "Conflict"


class NoCapacity(Conflict):
    """No cluster fits the request. `explanation` gives the rejection reasons and a suggestion."""

    code = "NoCapacity"

    def __init__(
        self, message: str, *, hint: str = "", explanation: Explanation | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.explanation = explanation


class WrongPhase(Conflict):
    """The reservation's phase does not allow the transition."""

    code = "WrongPhase"


class IdentityInUse(Conflict):
    """Another agent is active for this cluster. Retryable: that agent may stop or time out."""

    code = "IdentityInUse"
    retryable = True


class AlreadyExists(Conflict):
    """An object with that name already exists."""

    code = "AlreadyExists"


class Gone(Conflict):
    """The requested resource version was compacted. List again and continue from there."""

    code = "Gone"


class LimitExceeded(KubelendError):
    """A limit was exceeded. The same call may succeed after `retry_after` seconds."""

    code = "LimitExceeded"
    retryable = True

    def __init__(self, message: str, *, hint: str = "", retry_after: float = 1.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class RateLimited(LimitExceeded):
    """The caller exceeded its request rate."""

    code = "RateLimited"


class QueueFull(LimitExceeded):
    """The wait queue of the broker is full."""

    code = "QueueFull"


class BodyTooLarge(LimitExceeded):
    """The body exceeds the size limit. Retrying does not help."""

    code = "BodyTooLarge"
    retryable = False


class Unavailable(KubelendError):
    """The broker cannot respond now. Retry later, after `retry_after` seconds if it is set."""

    code = "Unavailable"
    retryable = True

    def __init__(self, message: str, *, hint: str = "", retry_after: float = 0.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class StoreFailed(Unavailable):
    """The store failed, and the change may or may not be durable. Retry with the same
    `Idempotency-Key`, where the call takes one, to find out.
    """

    code = "StoreFailed"


class NotReady(Unavailable):
    """The broker is starting, stopping or loading its store."""

    code = "NotReady"


class NotLeader(Unavailable):
    """Another broker replica is the leader; this one serves reads only."""

    code = "NotLeader"


class BrokerUnreachable(Unavailable):
    """The broker could not be reached or did not respond in time."""

    code = "BrokerUnreachable"


class CertificateRefused(BrokerUnreachable):
    """The broker closed the connection because of the caller's certificate. Retry with another
    certificate.
    """

    code = "CertificateRefused"


class UnexpectedAnswer(KubelendError):
    """The response does not match the API contract."""

    code = "UnexpectedAnswer"


class InvalidSettings(KubelendError):
    """Flags, environment or files are not a valid configuration."""

    code = "InvalidSettings"


def reservation_not_found(name: str, kind: type[NotFound] = NotFound) -> NotFound:
    """Builds the same error for a missing reservation and for one the caller may not see."""
    return kind(f"no reservation {name!r}", hint="see `kubelend get reservations`")
