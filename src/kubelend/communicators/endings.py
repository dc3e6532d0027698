"""The error of calls on a closed communicator, the same for every transport."""

from __future__ import annotations

from kubelend.core.errors import BrokerUnreachable


def closed_error() -> BrokerUnreachable:
    """For calls after `close`, or during it.

    Retryable, because the broker has rejected nothing: a stopping agent must not mark requests as
    Failed.
    """
    return BrokerUnreachable("the connection to the broker was closed on this side")
