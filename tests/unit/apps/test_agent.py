"""The agent as it is put together: what can be asked of it from the first moment on."""

import pytest

from kubelend.apps import agent, agent_environment, flags
from kubelend.apps.agent_settings import AgentSettings


@pytest.mark.parametrize(
    "transport, parts",
    [("http", ["collector", "publisher", "stream"]), ("", ["collector"])],
    ids=["with a broker", "alone"],
)
def test_an_agent_whose_work_has_not_begun_is_not_ready(tmp_path, transport, parts):
    simulation = tmp_path / "cluster.yaml"
    simulation.write_text("nodes: [{capacity: {cpu: 4, memory: 8Gi}}]")
    texts = {"broker_transport": transport, "broker_cert_path": "certs", "source": "simulated"}
    settings = flags.parse_settings(AgentSettings, texts | {"simulation": str(simulation)})
    process = agent.AgentApp(settings, agent_environment.simulated_environment(settings), "berlin")
    unready = "; ".join(f"{part}: starting" for part in parts)
    assert process.health.not_ready_reason == unready
