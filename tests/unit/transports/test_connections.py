"""How long connections are kept between calls."""

import ssl
from pathlib import Path

from kubelend.apps.agent_settings import AgentSettings
from kubelend.apps.settings import BrokerSettings
from kubelend.transports import session
from kubelend.transports.session import ConnectionPool


def test_a_connection_waits_for_the_next_advertisement_but_not_for_the_broker_to_close_it():
    broker = BrokerSettings(http_cert_path=Path("certs"))
    agent = AgentSettings()
    assert agent.advertisement_requeue_interval < session.KEEP_ALIVE < broker.idle_timeout


async def test_every_generation_keeps_its_connections_for_so_long():
    generation = ConnectionPool(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    try:
        kept = vars(generation.session.connector)["_keepalive_timeout"]
        assert kept == session.KEEP_ALIVE.total_seconds()
    finally:
        await generation.session.close()
