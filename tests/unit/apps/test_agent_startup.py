"""How an agent starts: its launch, what its process loads, and the environment that its settings select."""

import os
import subprocess
import sys

import pytest

from certificates import Certificates
from kubelend.apps import agent, agent_environment, agent_launcher, agent_peering, flags
from kubelend.apps.agent_launcher import AgentLaunch
from kubelend.apps.agent_settings import AgentSettings
from kubelend.core.errors import InvalidInput, InvalidSettings
from kubelend.core.resources import Resources
from kubelend.peerings.liqoctl import LiqoctlPeering
from kubelend.sources.file_objects import FileObjects
from kubelend.sources.memory_objects import MemoryObjects

CLUSTER = """
nodes: [{capacity: {cpu: 4, memory: 8Gi}}]
region: eu
labels: {tier: gold}
cost: {cpuCost: "0.05", currency: EUR}
"""


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def settings(write):
    """Of the agent of a simulated cluster, without a broker unless they name one."""

    def settings(**texts):
        needed = {"source": "simulated", "simulation": write("cluster.yaml", CLUSTER)}
        return flags.parse_settings(AgentSettings, {"broker_transport": ""} | needed | texts)

    return settings


@pytest.fixture
def environment(settings):
    def environment(**texts):
        return agent_environment.simulated_environment(settings(**texts))

    return environment


# -- launch


@pytest.fixture
def certificates(tmp_path):
    return Certificates(tmp_path)


@pytest.fixture
def http_settings(settings):
    def http_settings(directory, **texts):
        return settings(broker_transport="http", broker_cert_path=str(directory), **texts)

    return http_settings


def test_cluster_id_is_the_name_in_the_certificate(certificates, http_settings, tmp_path):
    berlin = certificates.cluster("berlin")
    for texts in ({}, {"cluster_id": "berlin"}):
        launched = agent_launcher.prepare_launch(http_settings(berlin, **texts))
        assert launched.settings.cluster_id == "berlin"
    for directory, texts, problem in (
        (berlin, {"cluster_id": "paris"}, "paris differs from the certificate's name berlin"),
        (certificates.admin("alice"), {}, "alice has role admin, not cluster"),
        (tmp_path / "nowhere", {}, "nowhere"),
    ):
        with pytest.raises(InvalidSettings, match=problem):
            agent_launcher.prepare_launch(http_settings(directory, **texts))


@pytest.mark.parametrize("transport", ["", "kubernetes"])
def test_no_certificate_is_read_for_another_transport(settings, tmp_path, transport):
    given = settings(broker_cert_path=str(tmp_path / "nowhere"), broker_transport=transport)
    assert agent_launcher.prepare_launch(given) == AgentLaunch(given)


@pytest.mark.parametrize(
    "texts, transport",
    [
        ({"broker_kubeconfig": "hub.yaml"}, "kubernetes"),
        ({"broker_kubeconfig": "hub.yaml", "broker_cert_path": "certs"}, "http"),
        ({"broker_kubeconfig": "hub.yaml", "broker_transport": ""}, ""),
        ({"broker_kubeconfig": "hub.yaml", "broker_transport": "http"}, "http"),
        ({"broker_cert_path": "certs"}, "http"),
    ],
    ids=str,
)
def test_kubeconfig_of_the_broker_alone_selects_the_kubernetes_transport(texts, transport):
    """As the published agent is started: `agent --broker-kubeconfig=PATH`."""
    given = AgentSettings(**{"broker_cert_path": ""} | texts)
    assert given.transport == transport
    if transport == "kubernetes":
        assert given.problems() == []
        assert agent_launcher.prepare_launch(given) == AgentLaunch(given)


def test_agent_process_receives_all_settings_in_one_variable(
    certificates, http_settings, monkeypatch
):
    monkeypatch.setenv("KUBELEND_BROKER_URL", "https://not-this-one:1")
    monkeypatch.setenv("LANG", "C.UTF-8")
    sent = http_settings(
        certificates.cluster("berlin"),
        labels="tier=gold",
        metrics_bind_address="0",
        finished_for="90s",
    )
    launched = agent_launcher.prepare_launch(sent)
    assert launched.renew_at is not None
    variables = agent_launcher.launch_environment(launched)
    assert agent_launcher.read_launch(variables) == launched
    assert variables["LANG"] == "C.UTF-8"
    assert [name for name in variables if name.startswith("KUBELEND_")] == [
        agent_launcher.SETTINGS_VARIABLE
    ]
    assert agent_launcher.agent_command()[-2:] == ["-m", "kubelend.apps.agent_process"]


# -- process

HEAVY = ("aiohttp.web", "cryptography", "numpy", "sqlite3", "typer", "uvloop")

PROCESS = """
import os, sys
from kubelend.apps import agent_process
try:
    agent_process.main()
except SystemExit:
    from kubelend.communicators import http
    from aiohttp import connector
    authorities = connector._SSL_CONTEXT_VERIFIED.get_ca_certs()
    print(os.environ.get("SSL_CERT_FILE"), len(authorities), *sys.modules)
    raise
"""


def start_process(**variables):
    """Runs an agent without settings; returns SSL_CERT_FILE at its exit, the number of CAs, and modules."""
    unset = ("SSL_CERT_FILE", agent_launcher.SETTINGS_VARIABLE)
    env = {name: text for name, text in os.environ.items() if name not in unset} | variables
    command = [sys.executable, "-c", PROCESS]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert f"{agent_launcher.SETTINGS_VARIABLE} is not set" in ended.stderr
    assert "start the agent with `kubelend agent`" in ended.stderr
    variable, authorities, *modules = ended.stdout.split()
    assert {"kubelend.apps.agent", "kubelend.communicators.http", "aiohttp"} <= set(modules)
    return variable, int(authorities), modules


@pytest.fixture(scope="module")
def process():
    return start_process()


def test_agent_process_does_not_load_heavy_libraries(process):
    assert not {"rich.console", "frozenlist._frozenlist", *HEAVY} & set(process[2])


def test_system_authorities_are_not_loaded_but_left_to_child_processes(process):
    assert process[:2] == ("None", 0)
    assert start_process(SSL_CERT_FILE="/etc/ours.pem")[:2] == ("/etc/ours.pem", 0)


ENVIRONMENT = """
import asyncio, sys
from kubelend.apps import agent_environment
from kubelend.apps.agent_settings import AgentSettings

async def load(source, simulation):
    if source == "kubernetes":
        from kubelend.kube import config
        config.load_config = lambda path: config.KubeConfig(server="https://127.0.0.1:1")
    settings = AgentSettings(source=source, simulation=simulation)
    async with agent_environment.open_environment(settings):
        print(*sys.modules)

asyncio.run(load(*sys.argv[1:]))
"""

ONLY = {
    "kubernetes": {"kubelend.kube.client", "kubelend.sources.kubernetes"},
    "simulated": {"kubelend.sources.simulation", "kubelend.sources.file_objects", "yaml"},
}


@pytest.mark.parametrize(
    "source, other", [("kubernetes", "simulated"), ("simulated", "kubernetes")]
)
def test_neither_kind_of_cluster_loads_the_libraries_of_the_other(process, write, source, other):
    command = [sys.executable, "-c", ENVIRONMENT, source, write("cluster.yaml", CLUSTER)]
    loaded = set(subprocess.check_output(command, text=True).split())
    assert ONLY[source] <= loaded
    assert not ONLY[other] & (loaded | set(process[2]))
    assert not loaded & set(HEAVY)


@pytest.mark.parametrize(
    "transport, components",
    [("http", ["collector", "publisher", "stream"]), ("", ["collector"])],
    ids=["with a broker", "alone"],
)
def test_agent_is_not_ready_before_its_components_have_worked(settings, transport, components):
    given = settings(broker_transport=transport, broker_cert_path="certs")
    process = agent.AgentApp(given, agent_environment.simulated_environment(given), "berlin")
    unready = "; ".join(f"{component}: starting" for component in components)
    assert process.health.not_ready_reason == unready


# -- environment


def test_flags_override_the_description_of_the_cluster(environment):
    offer = environment(labels="zone=a", region="eu-west").offer
    assert offer.labels == {"tier": "gold", "zone": "a"}
    assert offer.region == "eu-west"
    assert (offer.cost.cpu_cost, offer.cost.currency) == ("0.05", "EUR")
    cost = environment(gpu_cost="2", currency="CHF").offer.cost
    assert (cost.cpu_cost, cost.gpu_cost, cost.currency) == ("", "2", "CHF")


def test_policy_is_advertised_and_enforced(environment, write):
    found = environment(policy_file=write("policy.yaml", "keepBack: {cpu: 3}\ndeny: [lab-*]\n"))
    assert found.policy.keep_back == Resources(cpu=3000)
    assert found.offer.policy.deny == ["lab-*"]


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
def test_invalid_or_missing_policy_is_rejected(environment, write, tmp_path, text, problem):
    with pytest.raises((InvalidSettings, InvalidInput), match=problem):
        environment(policy_file=write("policy.yaml", text))
    with pytest.raises(InvalidSettings, match=r"--policy-file: .* No such file"):
        environment(policy_file=str(tmp_path / "nowhere.yaml"))


def test_instructions_are_in_the_namespace_of_the_advertisement_unless_another_is_set(
    environment, monkeypatch
):
    monkeypatch.setenv("POD_NAMESPACE", "lending")
    assert environment(advertisement_namespace="home").namespace == "home"
    assert environment(instruction_namespace="other").namespace == "other"


def test_objects_are_in_memory_or_in_files(environment, tmp_path):
    assert type(environment().objects) is MemoryObjects
    found = environment(objects_dir=str(tmp_path / "objects"))
    assert isinstance(found.objects, FileObjects)
    assert found.object_error() == ""
    found.close()
    assert (tmp_path / "objects").is_dir()


class NoExchange:
    async def exchange_handshake(self, reservation, handshake):
        raise AssertionError("nothing is peered here")

    async def grant_keys(self):
        raise AssertionError("nothing is peered here")


async def test_kubeconfigs_select_liqoctl_unless_peering_is_disabled(
    settings, environment, tmp_path
):
    directory = str(tmp_path)
    for texts, mode, kind in (
        ({}, "none", type(None)),
        ({"kubeconfigs_dir": directory}, "liqoctl", LiqoctlPeering),
        ({"kubeconfigs_dir": directory, "peering": "none"}, "none", type(None)),
    ):
        chosen, simulated = settings(**texts), environment()
        assert await agent_peering.select_peering(chosen, simulated) == mode
        made = agent_peering.make_peering(mode, chosen, "a", simulated, NoExchange(), dict, str)
        assert isinstance(made.requester, kind)
        assert made.provider is None
    with pytest.raises(
        InvalidSettings, match="--peering=liqo: only valid with --source=kubernetes"
    ):
        agent_peering.make_peering("liqo", settings(), "a", environment(), NoExchange(), dict, str)
