"""The everyday commands, in this process, against a real broker over TLS."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

import broker_thread
from certificates import Certificates
from kubelend.cli import main
from kubelend.transports.client import BrokerClient
from kubelend.wire import bodies
from waiting import PATIENCE

CLUSTERS = {"lender-a": "8", "lender-b": "4"}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def broker(certificates, tmp_path):
    """Two clusters lend, one with 8 free CPU and one with 4."""
    with broker_thread.running(certificates.server(), tmp_path) as broker:
        asyncio.run(advertise(broker.url, certificates))
        yield broker


async def advertise(url, certificates):
    for name, cpu in CLUSTERS.items():
        amounts = bodies.Quantities(cpu, f"{cpu}Gi")
        advertisement = bodies.Advertisement(
            name, bodies.Metrics(amounts), cost=bodies.Cost(f"0.0{cpu}", "0.01"), region="eu"
        )
        async with BrokerClient(url, certificates.cluster(name)) as client:
            await client.publish(advertisement)


@pytest.fixture
def kubelend(broker, certificates, monkeypatch, capsys):
    """Runs a command as a cluster or a person; gives exit code, output and errors."""

    def run(line, directory=None):
        monkeypatch.setenv("KUBELEND_BROKER_URL", broker.url)
        monkeypatch.setenv("KUBELEND_CERT_PATH", str(directory or certificates.cluster("borrower")))
        capsys.readouterr()
        code = main.run(line.split())
        out, err = capsys.readouterr()
        return code, out.strip(), err.strip()

    return run


@pytest.fixture
def admin(kubelend, certificates):
    return lambda line: kubelend(line, certificates.admin("alice"))


def borrow(kubelend, flags="--cpu 2 --memory 1Gi"):
    code, name, err = kubelend(f"borrow {flags} -o name")
    assert (code, err) == (0, "")
    return name.removeprefix("reservation/")


def test_the_whole_life_of_a_reservation(kubelend):
    code, out, _ = kubelend("borrow --cpu 2 --memory 1Gi --for 2h")
    name = out.split()[0]
    assert (code, out) == (0, f"{name} is Reserved on lender-a for 2h")
    assert kubelend(f"dev activate {name}") == (0, f"{name} is Active on lender-a for 2h", "")
    assert kubelend(f"renew {name} --for 5h") == (0, f"{name} is Active on lender-a for 5h", "")
    released = f"{name} is Released: Released by requester borrower"
    assert kubelend(f"release {name}") == (0, released, "")
    assert kubelend(f"release {name}") == (0, released, "")
    assert kubelend(f"renew {name}")[0] == 5


def test_reservations_are_listed_for_people_and_programs(kubelend):
    name = borrow(kubelend)
    _, table, _ = kubelend("get reservations")
    assert table.splitlines()[1].split()[:5] == [name, "Reserved", "lender-a", "2", "1Gi"]
    (found,) = json.loads(kubelend("get reservations -o json")[1])["items"]
    assert found["id"] == name
    assert yaml.safe_load(kubelend(f"get reservations {name} -o yaml")[1]) == found
    assert kubelend("get rsv -o name") == (0, f"reservation/{name}", "")
    assert "REQUESTER" in kubelend("get reservations -o wide")[1]
    assert f"Name:       {name}" in kubelend(f"describe reservation {name}")[1]


@pytest.mark.parametrize(
    "filter,count",
    [
        ("--phase Reserved,Active", 1),
        ("--phase Failed", 0),
        ("--role requester", 1),
        ("--role provider", 0),
    ],
)
def test_reservations_are_filtered(kubelend, filter, count):
    borrow(kubelend)
    _, out, err = kubelend(f"get reservations {filter} -o name")
    assert len(out.splitlines()) == count
    assert err == ("" if count else "No reservations found.")


@pytest.mark.parametrize("flags", ["", " --watch"])
def test_a_phase_that_does_not_exist_is_refused_with_those_that_do(kubelend, flags):
    code, out, err = kubelend(f"get reservations --phase Reserved,Bogus{flags}")
    assert (code, out) == (2, "")
    assert err == (
        "error: --phase: 'Bogus' is unknown; there are Pending, Reserved, Active, Released, Failed"
    )


def test_the_same_key_gives_the_same_reservation(kubelend):
    flags = "--cpu 1 --memory 1Gi --key order-7"
    assert borrow(kubelend, flags) == borrow(kubelend, flags)
    code, _, err = kubelend("borrow --cpu 2 --memory 1Gi --key order-7")
    assert code == 2
    assert "was used for another request" in err


def test_no_capacity_is_exit_code_5_with_what_would_help(kubelend):
    code, out, err = kubelend("borrow --cpu 10 --memory 1Gi")
    assert (code, out) == (5, "")
    assert "0/2 clusters fit: 2 InsufficientCPU" in err
    assert "lender-a fits if you request 2 cpu less" in err


def test_a_request_that_waits_in_vain_ends_with_exit_code_5(kubelend):
    code, out, err = kubelend("borrow --cpu 10 --memory 1Gi --wait 300ms")
    assert (code, out) == (5, "")
    assert "is pending, waiting for capacity" in err.splitlines()[0]
    assert "error: No cluster fitted in time" in err.splitlines()[1]


def test_a_request_that_waits_is_served_when_capacity_comes_free(kubelend, broker, certificates):
    blocker = borrow(kubelend, "--cpu 8 --memory 1Gi")
    directory = certificates.cluster("borrower")
    free = threading.Timer(0.3, lambda: asyncio.run(release(broker.url, directory, blocker)))
    free.start()
    code, out, _ = kubelend("borrow --cpu 8 --memory 1Gi --wait 1m")
    free.join()
    assert code == 0
    assert "is Reserved on lender-a" in out


async def release(url, directory, name):
    async with BrokerClient(url, directory) as client:
        await client.release(name)


def test_a_dry_run_shows_the_choice_and_takes_nothing(kubelend):
    code, out, _ = kubelend("borrow --cpu 6 --memory 1Gi --dry-run")
    assert code == 0
    assert out.startswith("1/2 clusters fit: 1 InsufficientCPU")
    assert kubelend("get reservations -o name")[1] == ""


def test_explain_says_why_not(kubelend):
    code, out, _ = kubelend("explain --cpu 6 --memory 1Gi --max-price 0.001")
    assert code == 0
    assert "TooExpensive" in out
    assert "Nearest: " in out
    assert kubelend(f"explain {borrow(kubelend)}")[0] == 0


def test_clusters_are_for_people(kubelend, admin, certificates):
    assert kubelend("get clusters")[0] == 4
    viewer = certificates.viewer("bob")
    assert kubelend("get clusters -o name", viewer) == (0, "cluster/lender-a\ncluster/lender-b", "")
    assert kubelend("cordon lender-a", viewer)[0] == 4
    assert "AVAILABLE" in admin("describe cluster lender-a")[1]
    assert admin("get clusters nobody")[0] == 3


def test_an_administrator_closes_empties_and_forgets_a_cluster(kubelend, admin):
    name = borrow(kubelend)
    assert admin("cordon lender-a --reason upgrade") == (0, "cluster/lender-a cordoned", "")
    assert "Cordoned" in admin("get clusters lender-a")[1]
    assert admin("delete cluster lender-a")[0] == 5
    code, out, _ = admin("drain lender-a --reason upgrade --yes")
    assert code == 0
    assert out.startswith("cluster/lender-a drained: 1 moved to other clusters, 0 released")
    assert "lender-b" in kubelend(f"get reservations {name}")[1]
    assert admin("uncordon lender-a") == (0, "cluster/lender-a uncordoned", "")
    assert admin("delete cluster lender-a") == (0, "cluster/lender-a deleted", "")
    assert admin("get clusters -o name")[1] == "cluster/lender-b"


def test_several_are_released_though_one_is_unknown(kubelend):
    first, second = borrow(kubelend), borrow(kubelend)
    code, out, err = kubelend(f"release {first} unknown {second}")
    assert code == 3
    assert len(out.splitlines()) == 2
    assert err == "error: no reservation 'unknown'; see `kubelend get reservations`"


@pytest.mark.parametrize("format,read", [("json", json.loads), ("yaml", yaml.safe_load)])
def test_several_that_are_released_are_one_list_for_programs(kubelend, format, read):
    first, second, third = borrow(kubelend), borrow(kubelend), borrow(kubelend)
    found = read(kubelend(f"release {first} {second} -o {format}")[1])
    assert [one["id"] for one in found["items"]] == [first, second]
    assert read(kubelend(f"release {third} -o {format}")[1])["id"] == third
    code, out, _ = kubelend(f"release unknown {third} -o {format}")
    assert (code, [one["id"] for one in read(out)["items"]]) == (3, [third])


def test_a_watch_is_for_clusters(admin):
    code, out, err = admin("get reservations --watch")
    assert (code, out) == (4, "")
    assert "use a certificate with the role cluster" in err


def test_the_version_of_the_broker_is_told(kubelend):
    code, out, _ = kubelend("version")
    assert code == 0
    assert out.splitlines()[0].split()[1] == out.splitlines()[1].split()[1]


def test_a_running_brokers_store_passes_the_audit(kubelend, broker):
    borrow(kubelend)
    code, out, _ = kubelend(f"audit check --store {broker.store} --json")
    report = json.loads(out)
    assert code == 0
    assert (report["violations"], report["clusters"], report["live"]) == (0, 2, 1)


@pytest.mark.parametrize(
    "kind,reason",
    [
        ("stranger", "which no CA in"),
        ("expired", "expired at"),
        ("early", "is not valid before"),
    ],
)
def test_a_certificate_that_is_not_accepted_is_exit_code_4(kubelend, certificates, kind, reason):
    code, out, err = kubelend("get reservations", getattr(certificates, kind)("borrower"))
    assert (code, out) == (4, "")
    assert reason in err
    assert err.endswith("(`kubelend ca issue`, or `kubelend join`)")


def test_a_watch_shows_each_change_until_ctrl_c(kubelend, broker, certificates):
    name = borrow(kubelend)
    with watching(broker, certificates) as watch:
        assert watch.stdout is not None
        assert watch.stdout.readline().split() == [
            "NAME",
            "PHASE",
            "TARGET",
            "CPU",
            "MEMORY",
            "AGE",
        ]
        assert watch.stdout.readline().split()[:2] == [name, "Reserved"]
        kubelend(f"release {name}")
        assert watch.stdout.readline().split()[:2] == [name, "Released"]
        watch.send_signal(signal.SIGINT)
        _, err = watch.communicate(timeout=PATIENCE)
    assert (watch.returncode, err) == (130, "")


def test_a_watch_ends_when_nobody_reads_it(kubelend, broker, certificates):
    name = borrow(kubelend)
    with watching(broker, certificates) as watch:
        assert watch.stdout is not None
        assert watch.stdout.readline().startswith("NAME")
        watch.stdout.close()
        kubelend(f"release {name}")
        assert watch.wait(timeout=PATIENCE) == 0
        assert watch.stderr is not None
        assert watch.stderr.read() == ""


def watching(broker, certificates):
    program = str(Path(sys.executable).with_name("kubelend"))
    environment = {
        **{name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
        "KUBELEND_BROKER_URL": broker.url,
        "KUBELEND_CERT_PATH": str(certificates.cluster("borrower")),
    }
    return subprocess.Popen(
        [program, "get", "reservations", "--watch"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
