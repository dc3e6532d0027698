"""A command that has done its work does not wait long for a new certificate, nor fail for want of one."""

import shutil

import pytest

from certificates import Certificates
from desks import due
from kubelend.apps.settings import ClientSettings
from kubelend.cli import renewal
from kubelend.core.errors import Conflict, NotFound
from kubelend.kits import backoff
from kubelend.transports.client import BrokerClient
from scripted_broker import body, hang_up, problem, raw, say_nothing
from tls_peers import serial_in

pytestmark = pytest.mark.broker("scripted")


@pytest.fixture
def certificates(tmp_path):
    return Certificates(tmp_path / "certificates")


@pytest.fixture
def directory(certificates, tmp_path):
    return shutil.copytree(due(certificates), tmp_path / "live")


@pytest.mark.parametrize(
    "answer",
    [
        say_nothing,
        hang_up,
        problem(NotFound("no such route")),
        problem(Conflict("this broker issues no certificates")),
        raw(b"<html>", 502),
        body({"certificate": "nonsense", "authorities": "nonsense"}),
    ],
    ids=["silence", "cut off", "an older broker", "no authority", "a gateway", "nonsense"],
)
async def test_whatever_the_broker_does_the_command_goes_on_without_a_word(
    broker, directory, monkeypatch, capsys, answer
):
    monkeypatch.setattr(renewal, "RENEWAL_TIMEOUT", 0.3)
    broker.responses.append(answer)
    old = serial_in(directory)
    settings = ClientSettings(broker_url=broker.url, cert_path=directory)
    async with BrokerClient(broker.url, directory, backoff=backoff.NO_RETRIES) as client:
        await renewal.renew_if_due(settings, client)
    assert broker.seen[0].path == "/api/v1/certificates"
    assert serial_in(directory) == old
    assert sorted(path.name for path in directory.iterdir()) == ["ca.crt", "tls.crt", "tls.key"]
    assert capsys.readouterr() == ("", "")


async def test_one_with_much_life_left_costs_no_call(broker, certificates):
    directory = certificates.cluster("a")
    settings = ClientSettings(broker_url=broker.url, cert_path=directory)
    async with BrokerClient(broker.url, directory) as client:
        await renewal.renew_if_due(settings, client)
    assert broker.seen == []
