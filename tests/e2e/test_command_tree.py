"""Verbs over nouns, old spellings, names that are passed on, and questions before what cannot be undone.

All commands run in this process, against one broker over TLS that all tests of the file share.
"""

import asyncio
import io
import json
import shlex

import pytest

import applicants
import broker_thread
from kubelend.cli import main
from kubelend.transports.client import BrokerClient
from kubelend.wire import bodies


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
def kubelend(broker, monkeypatch, capsys, tmp_path):
    """Runs a command line as somebody; gives exit code, output and errors."""
    monkeypatch.setenv("KUBELEND_CONFIG", str(tmp_path / "config.yaml"))

    def run(line, directory):
        monkeypatch.setenv("KUBELEND_BROKER_URL", broker.url)
        monkeypatch.setenv("KUBELEND_CERT_PATH", str(directory))
        capsys.readouterr()
        code = main.run(shlex.split(line))
        out, err = capsys.readouterr()
        return code, out.strip(), err.strip()

    return run


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
            amounts = bodies.Quantities(cpu, f"{cpu}Gi")
            await client.publish(bodies.Advertisement(name, bodies.Metrics(amounts)))


BORROW = "borrow --cpu 1 --memory 1Gi"

pytestmark = pytest.mark.usefixtures("fleet")


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
    assert (code, err) == (
        2,
        "error: 'reservation/x' is a reservation, not a cluster; give its name alone",
    )


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
        "error: of which cluster? Viewers and admins have no reservations of their own; add --cluster",
    )


def test_quotas_are_set_listed_described_and_deleted(admin, paris):
    assert admin("set quota paris --cpu 2")[0] == 0
    assert admin("get quotas -o name") == (0, "quota/paris", "")
    assert json.loads(admin("get quota quota/paris -o json")[1])["quota"]["amounts"] == {"cpu": "2"}
    assert "LIMIT" in admin("describe quota paris")[1]
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
    assert "IN EFFECT" in admin("describe policy policy/rome")[1]
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
    ],
)
def test_mistakes_name_the_flag_and_no_field(paris, line, problem):
    code, out, err = paris(line)
    assert (code, out, err.count("\n")) == (2, "", 0)
    assert err.startswith(f"error: {problem}")


@pytest.mark.parametrize(
    "line, problem",
    [
        ("set quota paris --cpu much", "--cpu: 'much'"),
        ("set quota paris --amounts gpu=much", "--amounts gpu: 'much'"),
        ("set policy rome --max-lent cpu=much", "--max-lent cpu: 'much'"),
        ("create token --ttl 9999h", "--ttl: 9999h is more than"),
        ("create token --uses 0", "--uses: "),
        ("audit log --since yesterday", "--since: 'yesterday'"),
    ],
)
def test_mistakes_of_administrators_do_so_too(admin, line, problem):
    code, out, err = admin(line)
    assert (code, out, err.count("\n")) == (2, "", 0)
    assert err.startswith(f"error: {problem}")


def test_a_duration_that_is_none_is_named_by_its_flag_when_renewing(paris):
    name = paris(f"{BORROW} -o name")[1]
    code, _, err = paris(f"renew {name} --for soon")
    assert (code, err.startswith("error: --for: ")) == (2, True)


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


def test_a_dry_run_of_a_drain_is_a_list_for_programs(admin, paris):
    name = paris(f"{BORROW} --cluster rome -o name")[1]
    assert admin(f"{DRAIN} --dry-run -o name") == (0, name, "")
    assert json.loads(admin(f"{DRAIN} --dry-run -o json")[1])["kind"] == "ReservationList"


def test_a_yes_drains(admin, paris, terminal):
    name = paris(f"{BORROW} -o name")[1]
    assert "rome" in paris(f"get {name.replace('/', ' ')}")[1]
    terminal("y")
    code, out, err = admin(DRAIN)
    assert code == 0
    assert "Drain cluster rome? [y/N]" in err
    assert out.startswith("cluster/rome drained: 1 moved to other clusters, 0 released")
    assert "oslo" in paris(f"get reservation {name}")[1]


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


def test_a_revocation_that_ends_nothing_asks_nothing(admin):
    assert admin("revoke viewer/eve")[0] == 0
    assert admin("delete member viewer/eve")[0] == 0


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
