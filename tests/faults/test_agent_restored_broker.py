"""A broker that comes back from a backup knows less than its agents, and is believed all the same."""

import shutil

import pytest

import agents
import brokers

pytestmark = pytest.mark.filterwarnings(agents.LEFT_SOCKETS)

RENEWALS = 200
"""More than there are changes of anything else: revisions must not catch up by themselves."""


@pytest.mark.timeout(120)
async def test_agents_follow_a_broker_that_was_restored_from_a_backup(certificates, tmp_path):
    store, backup = tmp_path / "kubelend.db", tmp_path / "backup.db"
    async with agents.starting(certificates, tmp_path) as start:
        async with brokers.child(certificates, tmp_path) as broker:
            members = [await start(name, broker.port) for name in ("a", "b")]
            borrower, port = members[0], str(broker.port)
            await borrower.create_request("kept")
            await borrower.becomes("kept", "Active")
            (reservation,) = await agents.until_agreed(broker, *members)
            assert await broker.stop() == 0
        shutil.copy(store, backup)
        async with brokers.child(certificates, tmp_path, http_port=port) as broker:
            for minutes in range(100, 100 + RENEWALS):
                longer = {"duration": f"{minutes}m"}
                answer = await broker.cluster("a").post(
                    "reservations", reservation, "renew", longer
                )
                assert answer.status == 200
            await agents.until_agreed(broker, *members)
            assert await broker.stop() == 0
        for left in tmp_path.glob("kubelend.db*"):
            left.unlink()
        shutil.copy(backup, store)
        async with brokers.child(certificates, tmp_path, http_port=port) as broker:
            assert list(await agents.until_agreed(broker, *members)) == [reservation]
            await agents.until_over(broker, *members)
            await borrower.create_request("new")
            await borrower.becomes("new", "Active")
            assert await broker.stop() == 0
    brokers.audited(store)
