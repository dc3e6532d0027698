"""The agent as a person runs it: started, asked for things by files, looked at, and stopped."""

import contextlib
import json
import secrets
import signal
import socket
from datetime import UTC, datetime, timedelta

import pytest

import agent_process
import applicants
import broker_process
import brokers
import published_broker
from kubelend.pki import identity
from kubelend.transports import tls
from kubelend.wire.objects import (
    Advertisement,
    ProviderInstruction,
    ReservationInstruction,
    ResourceRequest,
)
from waiting import PATIENCE

pytestmark = pytest.mark.timeout(120)

USAGE = 2
SECOND = timedelta(seconds=1)
SPENT, LEFT = timedelta(seconds=50), timedelta(seconds=10)
"""Of a certificate's life: it is time to renew it, and there is time to."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("agents")


@pytest.fixture(scope="module")
def broker(certificates, root):
    with broker_process.running(certificates.server(), root) as broker:
        yield broker


@contextlib.contextmanager
def ready_agent(broker, directory, root):
    with agent_process.running(broker.url, directory, root) as agent:
        agent.wait_until_ready()
        yield agent


@pytest.fixture(scope="module")
def rome(broker, certificates, root):
    with ready_agent(broker, certificates.cluster("rome"), root / "rome") as agent:
        yield agent


@pytest.fixture(scope="module")
def bonn(broker, certificates, root):
    with ready_agent(broker, certificates.cluster("bonn"), root / "bonn") as agent:
        yield agent


def has(phase):
    return lambda found: found.status.phase == phase


# -- its work


def test_cluster_is_advertised_and_a_request_in_a_file_is_reserved_held_used_and_released(
    rome, bonn
):
    shown = rome.sees(Advertisement, "cluster-advertisement", has("Active"))
    assert (shown.spec.cluster_id, shown.spec.resources.capacity.cpu) == ("rome", "64")
    assert shown.status.published
    rome.put("training", cpu="4", duration="2h")
    found = rome.sees(ResourceRequest, "training", lambda one: bool(one.status.reservation_name))
    reservation = found.status.reservation_name
    assert found.status.target_cluster_id == "bonn"
    held = bonn.sees(ProviderInstruction, f"{reservation}-provider", has("Held"))
    assert held.spec.requester_cluster_id == "rome"
    assert held.status.enforced
    use = rome.sees(ReservationInstruction, reservation, has("NotPeered"))
    assert (use.spec.target_cluster_id, use.spec.requested_cpu) == ("bonn", "4")
    rome.sees(ResourceRequest, "training", has("Reserved"))
    rome.remove("training")
    bonn.sees(ProviderInstruction, f"{reservation}-provider", has("Withdrawn"))
    rome.sees(ReservationInstruction, reservation, has("Finished"))
    rome.misses(ResourceRequest, "training")


def test_invalid_file_is_logged_and_ignored(rome, bonn):
    path = rome.manifest("odd")
    path.write_text("kind: [")
    rome.wait_for(
        lambda: any("odd" in line["file"] for line in rome.logged("Ignoring invalid object file"))
    )
    path.unlink()
    assert rome.get("/readyz")[0] == 200


def test_probes_and_metrics_answer(rome):
    assert rome.get("/healthz") == (200, "ok")
    assert rome.get("/readyz")[0] == 200
    status, text = rome.get("/metrics", "metrics")
    assert status == 200
    assert brokers.series(text, "kubelend_agent_stream_connected") == 1
    assert brokers.series(text, "kubelend_agent_nodes") == 1
    assert brokers.series(text, "kubelend_agent_component_healthy", component="publisher") == 1
    assert rome.get("/nothing")[0] == 404


def test_every_line_of_the_log_is_json(rome):
    lines = [json.loads(line) for line in rome.text.splitlines()]
    assert {"Agent started", "Listening"} <= {line["event"] for line in lines}
    assert all({"timestamp", "level", "logger", "event"} <= line.keys() for line in lines)


# -- with a broker of the published system


def test_published_broker_is_polled_and_its_reservations_expire(certificates, tmp_path):
    """It has no stream, no reads of one reservation and no release."""
    with contextlib.ExitStack() as running:
        broker = running.enter_context(published_broker.running(certificates.server()))
        lender, borrower = (
            running.enter_context(ready_agent(broker, certificates.cluster(name), tmp_path / name))
            for name in ("lender", "borrower")
        )
        lender.sees(Advertisement, "cluster-advertisement", has("Active"))
        borrower.put("short", duration="1s")
        borrower.put("training", cpu="4", duration="1h")
        found = borrower.sees(ResourceRequest, "training", has("Reserved"))
        reservation = found.status.reservation_name
        instruction = f"{reservation}-provider"
        held = lender.sees(ProviderInstruction, instruction, has("Held"))
        assert (held.spec.requester_cluster_id, held.status.enforced) == ("borrower", True)
        borrower.remove("training")
        borrower.misses(ResourceRequest, "training")
        [line] = borrower.logged("Reservation cannot be released")
        assert line["reservation"] == reservation
        assert lender.find_in(ProviderInstruction, instruction).status.phase == "Held"
        broker.reservations[reservation]["status"]["phase"] = "Released"
        lender.sees(ProviderInstruction, instruction, has("Withdrawn"))
        expired = borrower.sees(ResourceRequest, "short", has("Expired"))
        assert expired.status.reservation_name
        for agent in (lender, borrower):
            assert agent.get("/readyz") == (200, "ok")


# -- its end


def test_signal_ends_it_in_good_order_and_the_broker_notices(broker, certificates, tmp_path):
    """Another one is active long before an agent that is only silent would be replaced."""
    for number in (signal.SIGINT, signal.SIGTERM):
        root = tmp_path / secrets.token_hex(4)
        with ready_agent(broker, certificates.cluster("next"), root) as agent:
            assert agent.end(number) == 0
            assert agent.logged("Stopping")
            assert not [line for line in agent.log() if line["level"] == "error"]


def test_missing_directory_of_objects_is_reported_and_waited_for(broker, certificates, tmp_path):
    with ready_agent(broker, certificates.cluster("x"), tmp_path / "x") as agent:
        kept = agent.directory / "objects"
        kept.rename(agent.directory / "elsewhere")
        agent.wait_for(lambda: agent.get("/readyz")[0] == 503)
        assert agent.get("/healthz") == (200, "ok")
        (agent.directory / "elsewhere").rename(kept)
        agent.wait_until_ready()
        agent.put("w", cpu="100")
        agent.sees(ResourceRequest, "w", has("Failed"))


# -- its certificate


def test_a_certificate_that_is_due_is_renewed_while_it_runs(certificates, tmp_path):
    authority = applicants.authority(certificates, tmp_path)
    flags = (f"--ca-path={authority}", "--enrol-port=0", "--certificate-lifetime=1h")
    with contextlib.ExitStack() as running:
        broker = running.enter_context(
            broker_process.running(certificates.server(), tmp_path, *flags)
        )
        # Now that the broker is there: all that is left of it is the agent's.
        profile, issued = identity.client_profile("due"), datetime.now(UTC) - SPENT
        directory = certificates.write("due", profile, at=issued, lifetime=SPENT + LEFT)
        before, old = (directory / "tls.crt").read_bytes(), tls.own_certificate(directory)
        agent = running.enter_context(ready_agent(broker, directory, tmp_path / "due"))
        agent.wait_for(lambda: (directory / "tls.crt").read_bytes() != before)
        agent.wait_for(lambda: datetime.now(UTC) > old.not_valid_after_utc + SECOND)
        # Nobody would listen to the old one any more.
        shown = agent.sees(Advertisement, "cluster-advertisement")
        agent.sees(Advertisement, "cluster-advertisement", is_later(shown))
        assert agent.get("/readyz") == (200, "ok")
        assert not [line for line in agent.log() if "component" in line and "error" in line]
        assert agent.end() == 0


def is_later(shown):
    return lambda found: found.status.published and found.spec.timestamp > shown.spec.timestamp


# -- what is wrong is reported before anything starts; the messages have unit tests


@pytest.fixture
def files(certificates, tmp_path):
    (tmp_path / "good.yaml").write_text(agent_process.SOME)
    (tmp_path / "odd.yaml").write_text("nodes: [{capacity: {cpu: 4, memory: 8Gi}, colour: red}]")
    return {
        "broker_url": "https://localhost:1",
        "broker_cert_path": certificates.cluster("rome"),
        "simulation": tmp_path / "good.yaml",
        "objects_dir": tmp_path / "objects",
    }


@pytest.mark.parametrize(
    "flag, value, words",
    [
        ("broker_cert_path", "nowhere", "nowhere/tls.crt is missing"),
        ("simulation", "odd.yaml", "odd.yaml: nodes[0].colour: unknown field"),
    ],
)
def test_invalid_setting_is_one_line_and_a_code(files, tmp_path, flag, value, words):
    code, said = outcome(tmp_path, **files | {flag: value})
    assert words in said
    assert said.startswith("error: ")
    assert len(said.splitlines()) == 1
    assert code == USAGE


def test_port_that_is_taken_is_one_line_and_a_code(files, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, said = outcome(tmp_path, **files | {"health_probe_bind_address": address})
    assert said.startswith(f"error: cannot listen on {address}: Address already in use")
    assert len(said.splitlines()) == 1
    assert code == USAGE


def outcome(directory, **settings):
    """The exit code of a command that ends by itself, and what it said."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    process = agent_process.started(directory, *flags)
    try:
        code = process.wait(PATIENCE)
    finally:
        process.kill()
    return code, (directory / "log").read_text()
