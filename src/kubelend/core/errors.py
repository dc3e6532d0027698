"""Everything that can go wrong, in one tree. Callers catch the class that says what to do next.

    KubelendError
    ├── InvalidInput             the caller must change what it sent
    │   ├── InvalidQuantity      a text is no Kubernetes quantity, or not in range
    │   ├── InvalidDuration      a text is no Go duration, or not in range
    │   ├── InvalidIdentity      a certificate's subject names no usable cluster
    │   ├── InvalidGrant         a text is no grant, or none that counts here
    │   ├── TooSlow              a request did not arrive in time; retryable
    │   └── KeyReused            an idempotency key came back with another request
    ├── Forbidden                the caller is known, and may not do this
    │   ├── Revoked              its certificate is not believed any more
    │   ├── TokenRefused         a token that is wrong, over, or for somebody else
    │   ├── QuotaExceeded        it would hold, wait for or spend more than it may
    │   └── Unauthenticated      an API server does not believe who calls
    ├── NotFound                 no such cluster, reservation or route
    │   └── Hidden               there is, but the caller is not to know; the same on the wire
    ├── MethodNotAllowed         the route exists, but not with this method
    ├── Conflict                 the state of the object does not allow it
    │   ├── NoCapacity           no cluster fits the request; carries the explanation
    │   ├── WrongPhase           the reservation's phase does not allow the transition
    │   ├── IdentityInUse        another agent speaks for this cluster; retryable
    │   ├── AlreadyExists        an object of that name is there
    │   └── Gone                 an API server does not keep that version any more: read anew
    ├── LimitExceeded            too much, or too often; retryable after a delay
    │   ├── RateLimited          more calls per second than this cluster may make
    │   ├── QueueFull            more waiting requests than the broker keeps
    │   └── BodyTooLarge         a body over the limit; final
    ├── Unavailable              the broker cannot answer now; retryable
    │   ├── StoreFailed          the store refused a write or a read
    │   ├── NotReady             the broker is starting, stopping or replaying
    │   ├── NotLeader            another broker decides; this one answers questions
    │   └── BrokerUnreachable    no connection, or no answer in time
    │       └── CertificateRefused   the broker hangs up on the caller's certificate
    ├── UnexpectedAnswer         the other side answered what its contract does not know
    └── InvalidSettings          flags, environment or files do not make a runnable process

Each class has a stable `code`, which crosses the wire, and says whether trying the same again may help.
The HTTP status of each is in `wire.problems`; the client raises the class which the broker raised.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from kubelend.core.explanations import Explanation


class KubelendError(Exception):
    """The root. `message` is one sentence for a person; `hint` says what to do, where that is known."""

    code: ClassVar[str] = "Internal"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class InvalidInput(KubelendError):
    """The caller must change what it sent."""

    code = "InvalidInput"


class InvalidQuantity(InvalidInput):
    """A text is no Kubernetes quantity, or its value is not in range."""

    code = "InvalidQuantity"


class InvalidDuration(InvalidInput):
    """A text is no Go duration, or its value is not in range."""

    code = "InvalidDuration"


class InvalidIdentity(InvalidInput):
    """A certificate's subject names no usable cluster or person."""

    code = "InvalidIdentity"


class InvalidGrant(InvalidInput):
    """A text is no grant of this broker, or none that counts here and now."""

    code = "InvalidGrant"


class TooSlow(InvalidInput):
    """A request began and did not arrive in time; nothing of it has happened."""

    code = "TooSlow"
    retryable = True


class KeyReused(InvalidInput):
    """An idempotency key came back with another request. Use a new key for a new request."""

    code = "KeyReused"


class Forbidden(KubelendError):
    """The caller is known, and may not do this."""

    code = "Forbidden"


class Revoked(Forbidden):
    """The caller's certificate is not believed any more."""

    code = "Revoked"


class TokenRefused(Forbidden):
    """The token that somebody wants to join with is wrong, over, or for somebody else."""

    code = "TokenRefused"


class QuotaExceeded(Forbidden):
    """The caller would hold, wait for or spend more than an administrator allows it."""

    code = "QuotaExceeded"


class Unauthenticated(Forbidden):
    """An API server does not believe who calls, or does not hear it."""

    code = "Unauthenticated"


class NotFound(KubelendError):
    """No such cluster, reservation or route, or none that the caller may see."""

    code = "NotFound"


class Hidden(NotFound):
    """It exists, but not for this caller, who must not hear even that: the same code and words."""


class MethodNotAllowed(KubelendError):
    """The route exists, but not with this method; `allowed` are those it has."""

    code = "MethodNotAllowed"

    def __init__(self, message: str, *, hint: str = "", allowed: Iterable[str] = ()) -> None:
        super().__init__(message, hint=hint)
        self.allowed = tuple(allowed)


class Conflict(KubelendError):
    """The state of the object does not allow it."""

    code = "Conflict"


class NoCapacity(Conflict):
    """No cluster fits the request. `explanation` says why, per cluster, and what would help."""

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
    """Another agent speaks for this cluster. It may stop, or fall silent."""

    code = "IdentityInUse"
    retryable = True


class AlreadyExists(Conflict):
    """An object of that name is there, and was not to be changed."""

    code = "AlreadyExists"


class Gone(Conflict):
    """An API server does not keep a version that old any more. Read what is there now, and go on from it."""

    code = "Gone"


class LimitExceeded(KubelendError):
    """Too much, or too often. The same call may pass after `retry_after` seconds."""

    code = "LimitExceeded"
    retryable = True

    def __init__(self, message: str, *, hint: str = "", retry_after: float = 1.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class RateLimited(LimitExceeded):
    """More calls per second than this caller may make."""

    code = "RateLimited"


class QueueFull(LimitExceeded):
    """More waiting requests than the broker keeps."""

    code = "QueueFull"


class BodyTooLarge(LimitExceeded):
    """A body over the limit. Sending it again does not help."""

    code = "BodyTooLarge"
    retryable = False


class Unavailable(KubelendError):
    """The broker cannot answer now. The same call may pass later, after `retry_after` seconds if told."""

    code = "Unavailable"
    retryable = True

    def __init__(self, message: str, *, hint: str = "", retry_after: float = 0.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class StoreFailed(Unavailable):
    """The store failed. A change may have been kept or not; the same call again, with the same
    `Idempotency-Key` where it takes one, tells.
    """

    code = "StoreFailed"


class NotReady(Unavailable):
    """The broker is starting, stopping or replaying its store."""

    code = "NotReady"


class NotLeader(Unavailable):
    """Another broker decides; this one answers questions, and changes nothing."""

    code = "NotLeader"


class BrokerUnreachable(Unavailable):
    """No connection to the broker, or no answer in time."""

    code = "BrokerUnreachable"


class CertificateRefused(BrokerUnreachable):
    """The broker hangs up on the caller's certificate. The same call passes once there is another one."""

    code = "CertificateRefused"


class UnexpectedAnswer(KubelendError):
    """The other side answered what its contract does not know."""

    code = "UnexpectedAnswer"


class InvalidSettings(KubelendError):
    """Flags, environment or files do not make a runnable process."""

    code = "InvalidSettings"


def no_reservation(name: str, kind: type[NotFound] = NotFound) -> NotFound:
    """To whom it does not concern, one that exists must look like one that does not."""
    return kind(f"no reservation {name!r}", hint="see `kubelend get reservations`")
