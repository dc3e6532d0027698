"""How the command line becomes an agent: the name that its certificate says, and settings in a variable."""

import os

import pytest

from certificates import Certificates
from kubelend.apps import agent_launcher, flags
from kubelend.apps.agent_launcher import AgentLaunch
from kubelend.apps.agent_settings import AgentSettings
from kubelend.core.errors import InvalidSettings


@pytest.fixture
def certificates(tmp_path):
    return Certificates(tmp_path)


def settings(directory, **texts):
    needed = {"source": "simulated", "simulation": "berlin.yaml"}
    return flags.parse_settings(
        AgentSettings, needed | {"broker_cert_path": str(directory)} | texts
    )


def test_the_certificate_names_the_cluster(certificates):
    found = agent_launcher.prepare_launch(settings(certificates.cluster("berlin")))
    assert found.settings.cluster_id == "berlin"


def test_a_name_that_the_certificate_says_too_is_fine(certificates):
    found = agent_launcher.prepare_launch(
        settings(certificates.cluster("berlin"), cluster_id="berlin")
    )
    assert found.settings.cluster_id == "berlin"


def test_another_name_than_the_certificates_is_refused(certificates):
    with pytest.raises(InvalidSettings, match="paris differs from the certificate's name berlin"):
        agent_launcher.prepare_launch(settings(certificates.cluster("berlin"), cluster_id="paris"))


def test_a_persons_certificate_is_refused(certificates):
    with pytest.raises(InvalidSettings, match="alice has role admin, not cluster"):
        agent_launcher.prepare_launch(settings(certificates.admin("alice")))


def test_a_directory_without_certificate_is_told(tmp_path):
    with pytest.raises(InvalidSettings, match="nowhere"):
        agent_launcher.prepare_launch(settings(tmp_path / "nowhere"))


@pytest.mark.parametrize("transport", ["", "kubernetes"])
def test_without_a_broker_to_show_it_to_no_certificate_is_read(tmp_path, transport):
    alone = settings(tmp_path / "nowhere", broker_transport=transport)
    assert agent_launcher.prepare_launch(alone) == AgentLaunch(alone)


def test_the_settings_arrive_as_they_were(certificates, monkeypatch):
    monkeypatch.setenv("KUBELEND_BROKER_URL", "https://not-this-one:1")
    monkeypatch.setenv("LANG", "C.UTF-8")
    sent = settings(
        certificates.cluster("berlin"),
        labels="tier=gold",
        metrics_bind_address="0",
        finished_for="90s",
    )
    launched = agent_launcher.prepare_launch(sent)
    assert launched.renew_at is not None
    environment = agent_launcher.launch_environment(launched)
    assert agent_launcher.read_launch(environment) == launched
    assert environment["LANG"] == "C.UTF-8"
    assert [name for name in environment if name.startswith("KUBELEND_")] == [
        agent_launcher.SETTINGS_VARIABLE
    ]


def test_who_starts_the_module_by_hand_is_told_how():
    with pytest.raises(InvalidSettings, match="start the agent with `kubelend agent`"):
        agent_launcher.read_launch(
            {name: "" for name in os.environ if name != agent_launcher.SETTINGS_VARIABLE}
        )
