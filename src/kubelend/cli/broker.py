"""`kubelend broker`: start one."""

from __future__ import annotations

from kubelend.apps.settings import BrokerSettings
from kubelend.cli import options


@options.takes(settings=options.broker)
def broker(settings: BrokerSettings) -> None:
    """Run the broker until it is told to stop (SIGTERM or Ctrl-C).

    It needs a certificate: `kubelend ca init`, then `kubelend ca issue broker --role broker`.
    """
    from kubelend.apps import broker as app

    app.run(settings)
