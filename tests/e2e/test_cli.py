"""The commands against a real broker over TLS, which all tests of the file share.

They run in this process, except for watches, which a signal or a closed pipe ends.
"""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import applicants
import broker_thread
from kubelend.cli import main
from kubelend.transports.client import BrokerClient
from kubelend.wire import bodies
from waiting import PATIENCE


@pytest.fixture(scope="module")
def broker(certificates, tmp_path_factory):
    """It issues certificates, too."""
    directory = tmp_path_factory.mktemp("broker")
    authority = applicants.authority(certificates, directory)
    with broker_thread.running(
        certificates.server(), directory, ca_path=authority, enrol_port=0, rate_limit=0
    ) as running:
        yield running


@pytest.fixture
def kubelend(broker, run_command):
    """Runs a command line as somebody."""
    return lambda line, directory: run_command(line, broker.url, directory)


@pytest.fixture
def admin(kubelend, certificates):
    return lambda line: kubelend(line, certificates.admin("alice"))


@pytest.fixture
def paris(kubelend, certificates):
    return lambda line: kubelend(line, certificates.cluster("paris"))


@pytest.fixture
def fleet(broker, certificates, paris, admin):
    """Two clusters lend, and paris, which lends nothing, has borrowed nothing."""
    asyncio.run(advertise(broker.url, certificates))
    yield
    names = admin("get reservations --phase Reserved,Active -o name")[1]
    if names:
        assert admin(f"release {' '.join(names.split())}")[0] == 0
    for name in ("rome", "oslo"):
        admin(f"uncordon {name}")


async def advertise(url, certificates):
    for name, cpu in (("rome", "8"), ("oslo", "4")):
        async with BrokerClient(url, certificates.cluster(name)) as client:
            amounts, cost = bodies.Quantities(cpu, f"{cpu}Gi"), bodies.Cost("0.05", "0.01")
            await client.publish(bodies.Advertisement(name, bodies.Metrics(amounts), cost=cost))


BORROW = "borrow --cpu 1 --memory 1Gi"

pytestmark = pytest.mark.usefixtures("fleet")


# -- reservations


def test_the_whole_life_of_a_reservation(paris):
    line = "borrow --cpu 2 --memory 1Gi --for 2h --key order-7"
    code, out, _ = paris(line)
    name = out.split()[0]
    assert (code, out) == (0, f"{name} is Reserved on rome for 2h")
    assert paris(line)[1] == out
    row = paris(f"get reservations {name}")[1].splitlines()[1]
    assert row.split()[:6] == [name, "Reserved", "paris", "rome", "2", "1Gi"]
    assert paris(f"dev activate {name}") == (0, f"{name} is Active on rome for 2h", "")
    assert paris(f"renew {name} --for soon")[2].startswith("error: --for: ")
    assert paris(f"renew {name} --for 5h") == (0, f"{name} is Active on rome for 5h", "")
    for _ in range(2):
        released = f"{name} is Released: Released by requester paris"
        assert paris(f"release {name}") == (0, released, "")
    assert paris(f"renew {name}")[0] == 5


def test_a_request_that_does_not_fit_is_explained(paris):
    code, out, err = paris("borrow --cpu 10 --memory 1Gi")
    assert (code, out) == (5, "")
    assert "0/2 clusters fit: 2 InsufficientCPU" in err
    assert "a cluster fits if you request 2 cpu less" in err
    code, out, err = paris("borrow --cpu 10 --memory 1Gi --wait 300ms")
    assert (code, out) == (5, "")
    assert "is pending, waiting for capacity" in err.splitlines()[0]
    assert "error: No cluster fitted in time" in err.splitlines()[1]
    code, out, _ = paris("explain --cpu 6 --memory 1Gi --max-price 0.001")
    assert (code, "TooExpensive" in out, "Nearest: " in out) == (0, True, True)


def test_a_dry_run_shows_the_choice_and_reserves_nothing(paris):
    code, out, _ = paris("borrow --cpu 6 --memory 1Gi --dry-run")
    assert code == 0
    assert out.startswith("1/2 clusters fit: 1 InsufficientCPU")
    assert paris("get reservations --phase Reserved -o name")[1] == ""


def test_several_are_released_though_one_is_unknown(paris):
    first, second, third = (paris(f"{BORROW} -o name")[1].partition("/")[2] for _ in range(3))
    code, out, err = paris(f"release {first} unknown {second}")
    assert (code, len(out.splitlines())) == (3, 2)
    assert err == "error: no reservation 'unknown'; see `kubelend get reservations`"
    code, out, _ = paris(f"release unknown {third} -o json")
    assert (code, [one["id"] for one in json.loads(out)["items"]]) == (3, [third])
    assert json.loads(paris(f"release {third} -o json")[1])["id"] == third


@pytest.fixture
def borrowed(paris):
    return paris(f"{BORROW} -o name")[1].removeprefix("reservation/")


@pytest.fixture
def watch(borrowed, broker, certificates):
    environment = {
        **{name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
        "KUBELEND_BROKER_URL": broker.url,
        "KUBELEND_CERT_PATH": str(certificates.cluster("paris")),
    }
    program = str(Path(sys.executable).with_name("kubelend"))
    command = [program, "get", "reservations", "--watch"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("NAME ")
        yield process
        process.kill()


def test_a_watch_shows_each_change_until_ctrl_c(paris, borrowed, watch):
    assert watch.stdout.readline().split()[:2] == [borrowed, "Reserved"]
    paris(f"release {borrowed}")
    assert watch.stdout.readline().split()[:2] == [borrowed, "Released"]
    watch.send_signal(signal.SIGINT)
    _, err = watch.communicate(timeout=PATIENCE)
    assert (watch.returncode, err) == (130, "")


def test_a_watch_ends_when_nobody_reads_it(paris, borrowed, watch):
    watch.stdout.close()
    paris(f"release {borrowed}")
    assert watch.wait(timeout=PATIENCE) == 0
    assert watch.stderr.read() == ""


# -- names


def test_names_that_one_command_prints_are_taken_by_the_next(paris):
    for _ in range(2):
        assert paris(BORROW)[0] == 0
    names = paris("get reservations --phase Reserved -o name")[1].split()
    assert len(names) == 2
    assert all(name.startswith("reservation/") for name in names)
    assert paris(f"describe reservation {names[0]}")[0] == 0
    assert paris(f"explain {names[0]}")[0] == 0
    assert paris(f"renew {names[0]} -o name") == (0, names[0], "")
    code, out, _ = paris(f"release {' '.join(names)} -o name")
    assert (code, out.split()) == (0, names)
    assert paris("get reservations --phase Reserved -o name")[1] == ""


def test_clusters_are_taken_by_kind_and_name(admin, paris):
    first, second = admin("get clusters -o name")[1].split()
    assert (first, second) == ("cluster/oslo", "cluster/rome")
    assert admin(f"cordon {first} -o name") == (0, first, "")
    assert "Cordoned" in admin(f"get {first.replace('/', ' ')}")[1]
    assert admin(f"uncordon {first}") == (0, "cluster/oslo uncordoned", "")
    assert "on oslo" in paris(f"{BORROW} --cluster {first}")[1]
    assert "on oslo" in paris(f"{BORROW} --exclude {second}")[1]
    assert admin(f"get reservations --cluster {first} --phase Reserved -o name")[1].count("\n") == 1
    code, _, err = admin("cordon reservation/x")
    problem = "error: 'reservation/x' is a reservation, not a cluster; give its name alone"
    assert (code, err) == (2, problem)
    assert "AVAILABLE" in admin("describe cluster oslo")[1]
    assert admin("get clusters nobody")[0] == 3


def test_what_a_role_may_not_is_exit_code_4(paris, kubelend, admin, certificates):
    assert paris("get clusters")[0] == 4
    assert kubelend("cordon rome", certificates.viewer("bob"))[0] == 4
    code, out, err = admin("get reservations --watch")
    assert (code, out) == (4, "")
    assert "use a certificate with the role cluster" in err


@pytest.mark.parametrize(
    "noun, kind",
    [
        ("clusters", "Cluster"),
        ("reservations", "Reservation"),
        ("tokens", "Token"),
        ("members", "Member"),
        ("quotas", "Quota"),
        ("policies", "Policy"),
    ],
)
def test_every_list_is_kind_and_items(admin, noun, kind):
    code, out, _ = admin(f"get {noun} -o json")
    found = json.loads(out)
    assert (code, found["kind"]) == (0, f"{kind}List")
    assert all(one["kind"] == kind for one in found["items"])


# -- nouns


def test_what_a_cluster_has_borrowed_and_lent(paris, kubelend, certificates, admin):
    name = paris(f"{BORROW} --cluster rome -o name")[1]
    assert paris("get borrowed --phase Reserved -o name") == (0, name, "")
    assert paris("get lent -o name") == (0, "", "No reservations found.")
    assert kubelend("get lent --phase Reserved -o name", certificates.cluster("rome"))[1] == name
    assert admin("get lent --cluster rome --phase Reserved -o name")[1] == name
    code, _, err = admin("get lent")
    assert (code, err) == (
        2,
        "error: viewers and admins have no reservations of their own; select a cluster with --cluster",
    )


def test_quotas_are_set_listed_described_and_deleted(admin, paris):
    assert admin("set quota paris --cpu 2")[0] == 0
    assert admin("get quotas -o name") == (0, "quota/paris", "")
    assert json.loads(admin("get quota quota/paris -o json")[1])["quota"]["amounts"] == {"cpu": "2"}
    assert "LIMIT" in admin("describe quota paris")[1] == paris("describe quota paris")[1]
    assert paris("set quota paris --cpu 64")[0] == paris("get quotas")[0] == 4
    code, out, err = paris("borrow --cpu 3 --memory 1Gi")
    assert (code, out) == (6, "")
    assert "would exceed its quota" in err
    assert admin("delete quota quota/paris") == (0, "quota/paris deleted", "")
    assert admin("get quota paris")[0] == 3


def test_policies_are_set_listed_described_and_deleted(admin):
    assert admin("set policy rome --deny team-x --keep-back cpu=1")[0] == 0
    assert admin("get policies -o name") == (0, "policy/rome", "")
    row = admin("get policies")[1].splitlines()[1]
    assert row.split(maxsplit=1) == ["rome", "not to team-x; keeps back 1 cpu"]
    assert "EFFECTIVE" in admin("describe policy policy/rome")[1]
    assert admin("delete policy cluster/rome") == (0, "policy/rome deleted", "")
    assert admin("get policies") == (0, "", "No policies found.")


def test_tokens_are_created_listed_described_and_deleted(admin):
    code, out, err = admin("create token --cluster-id lima")
    assert code == 0
    assert out.startswith("KUBELEND_TOKEN=kl1.")
    assert " kubelend join https://localhost:" in out
    assert "Run it where lima is." in err
    name = admin("get tokens -o name")[1]
    assert name.startswith("token/")
    assert "lima" in admin(f"get token {name}")[1]
    assert "Uses left:" in admin(f"describe token {name}")[1]
    assert admin(f"delete token {name}") == (0, f"{name} deleted", "")
    assert admin(f"describe token {name}")[0] == 3


def test_members_are_revoked_approved_described_and_deleted(admin):
    assert admin("revoke viewer/eve --reason gone")[1] == "viewer/eve revoked"
    assert admin("get members --status Revoked -o name") == (0, "viewer/eve", "")
    assert "Revoked" in admin("get member viewer/eve")[1]
    assert "Reason:      gone" in admin("describe member viewer/eve")[1]
    assert admin("approve viewer/eve")[1].startswith("viewer/eve approved; certificates from")
    assert admin("delete member viewer/eve")[1].startswith("viewer/eve deleted")
    assert admin("describe member nobody --role viewer") == (
        3,
        "",
        "error: no member 'viewer/nobody'; see `kubelend get members`",
    )
    assert admin("get members --status Bogus")[2].startswith("error: --status: 'Bogus' is unknown")


def test_a_policy_of_a_cluster_that_does_not_advertise_yet_comes_from_a_file_or_flags(
    admin, tmp_path
):
    path, old = tmp_path / "policy.yaml", tmp_path / "old.yaml"
    path.write_text("deny: [team-x]\nkeepBack: {cpu: 4, memory: 8Gi}\nhours: ['22:00-06:00']\n")
    code, from_file, err = admin(f"set policy naples -f {path} -o json")
    assert (code, err) == (0, "")
    flags = "--deny team-x --keep-back cpu=4,memory=8Gi --hours 22:00-06:00"
    assert admin(f"set policy naples {flags} -o json") == (0, from_file, "")
    assert admin("get policy naples -o json") == (0, from_file, "")
    assert admin(f"set policy naples {flags} -f {path}")[0] == 2
    old.write_text("keepback: {cpu: 4}\n")
    unknown = "is no policy: Object contains unknown field `keepback`"
    assert unknown in admin(f"set policy naples --file {old}")[2]
    assert admin("get policies -o name") == (0, "policy/naples", "")
    assert admin("delete policy naples") == (0, "policy/naples deleted", "")


# -- old spellings


OLD = [
    ("token create --cluster-id lima", 0),
    ("token list", 0),
    ("token delete nothing", 3),
    ("quota set paris --cpu 64", 0),
    ("quota list", 0),
    ("quota show paris", 0),
    ("quota clear paris", 0),
    ("policy set rome --deny team-x", 0),
    ("policy show rome", 0),
    ("policy clear rome", 0),
    ("accept nobody", 3),
    ("reject nobody", 3),
    ("remove nobody", 3),
    ("get members --standing Pending", 0),
    ("mailbox create --cluster-id lima", 0),
    ("activate nothing", 3),
    ("advertise --help", 0),
    ("demo --help", 0),
    ("lab up --help", 0),
    ("lab status --directory {}/nowhere", 3),
    ("bench --help", 0),
]


@pytest.mark.parametrize("line, code", OLD, ids=str)
def test_old_spellings_work(admin, tmp_path, line, code):
    found, out, err = admin(line.format(tmp_path))
    assert (found, "no such command" in err.lower()) == (code, False), (out, err)


def test_the_old_check_of_a_store_works(admin, broker):
    code, out, _ = admin(f"audit --store {broker.store} --json")
    assert (code, json.loads(out)["violations"]) == (0, 0)
    assert admin(f"audit check --store {broker.store}")[1].startswith("No violations: ")


# -- mistakes


def test_a_pinned_cluster_that_is_unknown_is_said_to_be_unknown(paris):
    code, _, err = paris(f"{BORROW} --cluster nowhere")
    assert code == 5
    assert "cluster 'nowhere' is unknown" in err
    explained = paris("explain --cpu 1 --memory 1Gi --cluster nowhere")
    assert (explained[0], "cluster 'nowhere' is unknown" in explained[1]) == (0, True)
    assert "unknown" not in paris("borrow --cpu 64 --memory 1Gi --cluster rome")[2]


@pytest.mark.parametrize(
    "line, problem",
    [
        ("admin: set policy x", "the policy is empty; `kubelend delete policy x` deletes it"),
        ("admin: set policy x --keep-back 4", "--keep-back: '4' has no name"),
        ("admin: set policy x --keep-back cpu=much", "--keep-back cpu: 'much'"),
        ("admin: set policy x --hours noon", "--hours: 'noon' is not a valid opening-hours text"),
        ("admin: set policy x -f /nowhere", "--file: /nowhere cannot be read: No such file"),
        ("admin: set quota x", "the quota is empty"),
        ("admin: set quota x --budget lots", "--budget: 'lots' is no amount of money"),
        ("admin: set quota paris --cpu much", "--cpu: 'much'"),
        ("admin: set quota paris --amounts gpu=much", "--amounts gpu: 'much'"),
        ("admin: set policy rome --max-lent cpu=much", "--max-lent cpu: 'much'"),
        ("admin: create token --ttl 9999h", "--ttl: 9999h is more than"),
        ("admin: create token --uses 0", "--uses: "),
        ("admin: audit log --since yesterday", "--since: 'yesterday'"),
        ("borrow --cpu much --memory 1Gi", "--cpu: 'much'"),
        ("borrow --cpu 1 --memory 0", "--memory: must be more than zero"),
        ("borrow --cpu 1 --memory 1Gi --for 1y", "--for: "),
        ("borrow --cpu 1 --memory 1Gi --for 99999h", "--for: 99999h exceeds the broker's maximum"),
        ("borrow --cpu 1 --memory 1Gi --wait -5m", "--wait: "),
        ("borrow --cpu 1 --memory 1Gi --policy best", "--policy: 'best' is unknown"),
        ("borrow --cpu 1 --memory 1Gi --weight luck=1", "--weight: 'luck' is unknown"),
        ("borrow --cpu 1 --memory 1Gi --max-price cheap", "--max-price: 'cheap'"),
        ("borrow --cpu 1 --memory 1Gi --resource a.b/c=much", "--resource a.b/c: 'much'"),
        ("borrow --cpu 1 --memory 1Gi --priority 99999999999", "--priority: "),
        ("explain --cpu 1 --memory lots", "--memory: 'lots'"),
        ("get reservations --phase Bogus", "--phase: 'Bogus' is unknown"),
        ("get reservations --phase Bogus --watch", "--phase: 'Bogus' is unknown"),
    ],
)
def test_mistakes_name_the_flag_and_no_field(paris, admin, line, problem):
    run = admin if line.startswith("admin: ") else paris
    code, out, err = run(line.removeprefix("admin: "))
    assert (code, out, err.count("\n")) == (2, "", 0)
    assert err.startswith(f"error: {problem}")


@pytest.mark.parametrize(
    "noun, problem",
    [
        ("get policy", "no cluster 'nobody'"),
        ("delete policy", "no policy is set for 'nobody'"),
        ("get quota", "'nobody' has no quota"),
        ("delete quota", "'nobody' has no quota"),
    ],
)
def test_what_is_not_there_is_exit_code_3(admin, noun, problem):
    code, out, err = admin(f"{noun} nobody")
    assert (code, out, err.count("\n")) == (3, "", 0)
    assert err.startswith(f"error: {problem}")


# -- what cannot be undone


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Somebody at a terminal who gives this answer."""
    return lambda answer: monkeypatch.setattr("sys.stdin", Terminal(answer + "\n"))


DRAIN, REVOKE = "drain rome", "revoke rome --release"


@pytest.mark.parametrize("line", [DRAIN, REVOKE])
def test_without_a_terminal_and_without_a_yes_nothing_is_done(admin, paris, monkeypatch, line):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    paris(f"{BORROW} --cluster rome")
    assert admin(line) == (
        2,
        "",
        "error: confirmation is required, and there is no terminal to ask on;"
        " add --yes, or --dry-run to see what would be done",
    )
    assert "Active" in admin("get cluster rome")[1]
    assert "cluster/rome" not in admin("get members --status Revoked -o name")[1]


@pytest.mark.parametrize("line", [DRAIN, REVOKE])
def test_a_no_ends_it_and_what_would_end_was_shown(admin, paris, terminal, line):
    name = paris(f"{BORROW} --cluster rome -o name")[1].removeprefix("reservation/")
    terminal("n")
    code, out, err = admin(line)
    assert (code, out) == (130, "")
    assert name in err
    assert "[y/N]" in err
    assert "Active" in admin("get cluster rome")[1]


@pytest.mark.parametrize("line", [DRAIN, REVOKE])
def test_a_dry_run_shows_what_would_end_and_changes_nothing(admin, paris, line):
    name = paris(f"{BORROW} --cluster rome -o name")[1].removeprefix("reservation/")
    code, out, _ = admin(f"{line} --dry-run")
    assert code == 0
    assert name in out
    assert "would be" in out
    assert "Active" in admin("get cluster rome")[1]
    assert "on rome" in paris(f"renew {name}")[1]
    if line == DRAIN:
        listed = json.loads(admin(f"{line} --dry-run -o json")[1])
        assert (listed["kind"], listed["items"][0]["id"]) == ("ReservationList", name)


@pytest.mark.parametrize("flags", ["", "--yes"])
def test_a_confirmed_drain_moves_reservations_so_that_the_cluster_can_be_deleted(
    admin, paris, terminal, flags
):
    name = paris(f"{BORROW} -o name")[1]
    assert "rome" in paris(f"get {name.replace('/', ' ')}")[1]
    assert admin("delete cluster rome")[0] == 5
    terminal("" if flags else "y")
    code, out, err = admin(f"{DRAIN} {flags}")
    assert code == 0
    assert ("Drain cluster rome? [y/N]" in err) == (not flags)
    assert out.startswith("cluster/rome drained: 1 moved to other clusters, 0 released")
    assert "oslo" in paris(f"get reservation {name}")[1]
    assert admin("delete cluster rome") == (0, "cluster/rome deleted", "")
    assert admin("get clusters -o name")[1] == "cluster/oslo"


def test_a_yes_revokes_and_releases(admin, certificates, kubelend, terminal, broker):
    lima = certificates.cluster("lima")
    assert kubelend(BORROW, lima)[0] == 0
    terminal("y")
    code, out, err = admin("revoke lima --release")
    assert code == 0
    assert "1 reservation is borrowed and would be released:" in err
    assert "No reservations are lent" in err
    assert out == (
        "cluster/lima revoked; 1 borrowed reservation released,"
        " 0 lent reservations moved or released"
    )
    assert admin("approve lima")[0] == 0


# -- contexts


def test_a_context_stands_in_for_flags(broker, certificates, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("KUBELEND_CONFIG", str(tmp_path / "config.yaml"))
    for name, directory in (
        ("alice", certificates.admin("alice")),
        ("paris", certificates.cluster("paris")),
    ):
        flags = ["--broker-url", broker.url, "--cert-path", str(directory)]
        assert main.run(["config", "set-context", name, *flags]) == 0
    assert main.run(["get", "clusters"]) == 0
    assert main.run(["get", "clusters", "--context", "paris"]) == 4
    assert main.run(["--context", "paris", "get", "borrowed"]) == 0
    assert main.run(["config", "use-context", "paris"]) == 0
    assert main.run(["get", "clusters"]) == 4
    capsys.readouterr()
    assert main.run(["version"]) == 0
    assert "Broker: " in capsys.readouterr().out
