"""The throw-away broker under demo and benchmarks: started, found, stopped, and gone."""

import asyncio
import signal

import pytest

import processes
from kubelend.core.errors import Unavailable
from kubelend.core.lifecycle import Role
from kubelend.envtest import processes as envtest_processes
from kubelend.transports.client import BrokerClient


@pytest.fixture
def trial(tmp_path):
    return envtest_processes.TemporaryDeployment(tmp_path)


def test_a_trial_broker_answers_its_clients_whatever_the_environment_and_is_stopped(
    trial, tmp_path, monkeypatch
):
    monkeypatch.setenv("KUBELEND_STORE", "/nowhere/else.db")
    monkeypatch.setenv("KUBELEND_RATE_LIMIT", "nonsense")

    async def version(url):
        async with BrokerClient(url, trial.certificate("ada", Role.ADMIN)) as client:
            return await client.version()

    with trial.broker() as broker:
        assert broker.wait_until_ready() > 0
        assert asyncio.run(version(broker.url)).api == "v1"
        assert broker.loaded_reservations() == 0
    assert trial.store.exists()
    assert processes.naming(tmp_path) == []
    assert broker.stop() == 0


def test_a_broker_that_does_not_start_says_why(trial):
    with trial.broker("--http-port=99999") as broker, pytest.raises(Unavailable) as problem:
        broker.wait_until_ready()
    assert "--http-port" in problem.value.hint


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["terminated", "hung up"])
def test_the_directory_is_removed_and_handlers_are_restored_after_a_signal(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), envtest_processes.temporary_deployment() as trial:
        signal.raise_signal(number)
    assert not trial.directory.exists()
    assert signal.getsignal(number) is before
