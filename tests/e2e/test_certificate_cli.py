"""The command line renews the certificate it calls with, at a real broker that has an authority."""

import shutil
from datetime import timedelta

import pytest

import broker_thread
from certificates import Certificates
from desks import due
from kubelend.cli import main
from kubelend.pki import files, identity
from kubelend.transports import tls
from tls_peers import serial_in


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def issuing(certificates, tmp_path_factory):
    """A broker that issues for thirty days."""
    root = tmp_path_factory.mktemp("issuing")
    certificates.authority.save(root / "ca")
    issues = {
        "ca_path": root / "ca",
        "enrol_port": 0,
        "certificate_lifetime": timedelta(days=30),
    }
    with broker_thread.running(certificates.server(), root, **issues) as broker:
        yield broker


@pytest.fixture
def directory(certificates, tmp_path):
    """Of cluster a, with a tenth of its life left."""
    return shutil.copytree(due(certificates), tmp_path / "live")


@pytest.fixture
def kubelend(monkeypatch, capsys):
    """Runs a command at a broker with a certificate; gives exit code, output and errors."""

    def run(broker, directory, line):
        monkeypatch.setenv("KUBELEND_BROKER_URL", broker.url)
        monkeypatch.setenv("KUBELEND_CERT_PATH", str(directory))
        capsys.readouterr()
        code = main.run(line.split())
        out, err = capsys.readouterr()
        return code, out.strip(), err.strip()

    return run


def test_after_a_call_that_worked_a_certificate_near_its_end_is_renewed_once(
    issuing, directory, certificates, kubelend
):
    old = serial_in(directory)
    code, out, err = kubelend(issuing, directory, "get reservations -o name")
    assert (code, out) == (0, "")
    note, nothing = err.splitlines()
    assert note.startswith(f"renewed the certificate in {directory}, valid until ")
    assert note.endswith("(in 30d)")
    assert nothing == "No reservations found."
    found = files.load_credentials(directory)
    assert found.certificate.serial_number != old
    assert identity.caller_from_certificate(found.certificate).name == "a"
    assert found.authorities == certificates.authority.trusted
    again = kubelend(issuing, directory, "get reservations -o name")
    assert again == (0, "", "No reservations found.")


def test_the_new_one_works_for_programs_that_read_only_the_output(issuing, directory, kubelend):
    _, out, _ = kubelend(issuing, directory, "get reservations -o json")
    assert out == '{\n  "kind": "ReservationList",\n  "items": []\n}'
    assert kubelend(issuing, directory, "version")[0] == 0


@pytest.mark.parametrize(
    "line",
    ["get reservations --no-auto-renew", "get reservations nothing", "certificate show"],
    ids=["told not to", "a call that failed", "no call"],
)
def test_nothing_is_renewed(issuing, directory, kubelend, line):
    old = serial_in(directory)
    kubelend(issuing, directory, line)
    assert serial_in(directory) == old


def test_one_with_much_life_left_stays(issuing, certificates, kubelend):
    directory = certificates.cluster("fresh")
    old = serial_in(directory)
    assert kubelend(issuing, directory, "get reservations")[2] == "No reservations found."
    assert serial_in(directory) == old


def test_a_broker_that_issues_nothing_does_not_spoil_a_command(
    certificates, directory, kubelend, tmp_path
):
    old = serial_in(directory)
    with broker_thread.running(certificates.server(), tmp_path) as broker:
        done = kubelend(broker, directory, "get reservations -o name")
        assert done == (0, "", "No reservations found.")
        assert serial_in(directory) == old
        code, out, err = kubelend(broker, directory, "certificate renew")
        assert (code != 0, out) == (True, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 0


def test_by_hand_it_is_renewed_when_it_is_time_or_when_forced(issuing, directory, kubelend):
    code, out, _ = kubelend(issuing, directory, "certificate renew")
    assert code == 0
    assert out.startswith(f"renewed the certificate in {directory}, valid until ")
    renewed = serial_in(directory)
    code, out, err = kubelend(issuing, directory, "certificate renew")
    assert code == 0
    assert f"the certificate in {directory} is not due for renewal before " in out
    assert "--force" in err
    assert serial_in(directory) == renewed
    assert kubelend(issuing, directory, "certificate renew --force")[0] == 0
    assert serial_in(directory) != renewed


@pytest.mark.parametrize("role", ["viewer", "admin"])
def test_people_renew_too(issuing, certificates, kubelend, role):
    directory = getattr(certificates, role)("paula")
    assert kubelend(issuing, directory, "certificate renew --force")[0] == 0
    found = identity.caller_from_certificate(tls.own_certificate(directory))
    assert (found.name, found.role) == ("paula", role)


def test_a_mounted_secret_is_left_to_whoever_mounts_it(issuing, directory, kubelend, tmp_path):
    mount = tmp_path / "mount"
    mount.mkdir()
    (mount / "..data").symlink_to(directory)
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (mount / name).symlink_to(f"..data/{name}")
    assert kubelend(issuing, mount, "get reservations")[2] == "No reservations found."
    code, _, err = kubelend(issuing, mount, "certificate renew")
    assert code == 2
    assert "renew the files with the tool that manages them" in err
