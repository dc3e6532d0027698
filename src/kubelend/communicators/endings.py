"""How a conversation that this side has ended fails: the same for every transport."""

from __future__ import annotations

from kubelend.core.errors import BrokerUnreachable


def closed() -> BrokerUnreachable:
    """For what is called afterwards, or was under way.

    The broker has refused nothing: an agent that stops must not tell its users that it did.
    """
    return BrokerUnreachable("the connection to the broker was closed on this side")
