"""Where an agent lives, as its settings say: files that are right, and files that are not."""

import pytest

from kubelend.apps import agent_environment, flags
from kubelend.apps.agent_settings import AgentSettings
from kubelend.core.errors import InvalidInput, InvalidSettings
from kubelend.core.resources import Resources
from kubelend.peerings.liqoctl import LiqoctlPeering
from kubelend.peerings.none import NoPeering
from kubelend.sources.memory_objects import MemoryObjects

CLUSTER = """
nodes: [{capacity: {cpu: 4, memory: 8Gi}}]
region: eu
labels: {tier: gold}
cost: {cpuCost: "0.05", currency: EUR}
"""


@pytest.fixture
def write(tmp_path):
    def write_to(name, text):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write_to


@pytest.fixture
def settings(write):
    def made(**texts):
        needed = {"broker_transport": "", "source": "simulated"}
        simulation = {"simulation": write("cluster.yaml", CLUSTER)}
        return flags.parse_settings(AgentSettings, needed | simulation | texts)

    return made


def test_the_description_says_what_the_flags_do_not(settings):
    offer = agent_environment.simulated_environment(
        settings(labels="zone=a", region="eu-west")
    ).offer
    assert offer.labels == {"tier": "gold", "zone": "a"}
    assert offer.region == "eu-west"
    assert offer.cost is not None
    assert (offer.cost.cpu_cost, offer.cost.currency) == ("0.05", "EUR")


def test_prices_of_the_flags_replace_those_of_the_description(settings):
    offer = agent_environment.simulated_environment(settings(gpu_cost="2", currency="CHF")).offer
    assert offer.cost is not None
    assert (offer.cost.cpu_cost, offer.cost.gpu_cost, offer.cost.currency) == ("", "2", "CHF")


def test_a_policy_is_read_for_the_broker_and_for_the_agent(settings, write):
    path = write("policy.yaml", "keepBack: {cpu: 3}\ndeny: [lab-*]\n")
    around = agent_environment.simulated_environment(settings(policy_file=path))
    assert around.policy is not None
    assert around.policy.keep_back == Resources(cpu=3000)
    assert around.offer.policy is not None
    assert around.offer.policy.deny == ["lab-*"]


@pytest.mark.parametrize(
    "text, problem",
    [
        ("keepback: {cpu: 3}", "keepback: unknown field"),
        ("keepBack: [cpu]", "keepBack"),
        ("keepBack: {", "not valid YAML"),
        ("keepBack: {cpu: x}", "keepBack.cpu"),
    ],
    ids=["typo", "type", "no YAML", "amount"],
)
def test_a_policy_that_would_not_hold_is_refused(settings, write, text, problem):
    with pytest.raises((InvalidSettings, InvalidInput), match=problem):
        agent_environment.simulated_environment(settings(policy_file=write("policy.yaml", text)))


def test_a_policy_that_is_not_there_is_told(settings, tmp_path):
    with pytest.raises(InvalidSettings, match=r"--policy-file: .* No such file"):
        agent_environment.simulated_environment(
            settings(policy_file=str(tmp_path / "nowhere.yaml"))
        )


def test_the_namespace_of_the_pod_counts_if_no_flag_does(settings, monkeypatch):
    monkeypatch.setenv("POD_NAMESPACE", "lending")
    assert agent_environment.simulated_environment(settings()).namespace == "lending"
    assert (
        agent_environment.simulated_environment(settings(instruction_namespace="other")).namespace
        == "other"
    )
    monkeypatch.setenv("POD_NAMESPACE", "Bad_NS")
    with pytest.raises(InvalidSettings, match="POD_NAMESPACE: 'Bad_NS' is not a valid namespace"):
        agent_environment.simulated_environment(settings())


async def test_objects_are_in_memory_or_in_files(settings, tmp_path):
    assert isinstance(agent_environment.simulated_environment(settings()).objects, MemoryObjects)
    around = agent_environment.simulated_environment(
        settings(objects_dir=str(tmp_path / "objects"))
    )
    assert around.object_error() == ""
    await around.close()
    assert (tmp_path / "objects").is_dir()


def test_kubeconfigs_mean_liqoctl_unless_it_is_turned_off(settings, tmp_path):
    directory = {"kubeconfigs_dir": str(tmp_path)}
    assert isinstance(agent_environment.make_peering(settings(), "berlin"), NoPeering)
    assert isinstance(
        agent_environment.make_peering(settings(**directory), "berlin"), LiqoctlPeering
    )
    off = settings(peering="none", **directory)
    assert isinstance(agent_environment.make_peering(off, "berlin"), NoPeering)
