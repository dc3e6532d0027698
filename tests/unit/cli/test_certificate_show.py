"""`kubelend certificate show`: whose it is and until when, from the directory alone."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from certificates import Certificates
from kubelend.cli import main
from kubelend.pki import identity, tokens


@pytest.fixture
def certificates(tmp_path):
    return Certificates(tmp_path)


def show(capsys, directory, *flags):
    code = main.run(["certificate", "show", "--cert-path", str(directory), *flags])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_person_reads_whose_it_is_and_how_long_it_lasts(certificates, capsys):
    profile = identity.client_profile("cluster-1")
    directory = certificates.write("c", profile, lifetime=timedelta(days=100))
    code, out, _ = show(capsys, directory)
    shown = dict(line.split(":", 1) for line in out.splitlines() if ":  " in line)
    assert code == 0
    assert shown["Name"].strip() == "cluster-1"
    assert shown["Role"].strip() == "cluster"
    assert shown["Days left"].strip() == "99"
    assert shown["Signed by"].strip() == "CN=test-ca"
    assert "(in 100d)" in shown["Valid until"]
    assert tokens.ca_pin(certificates.authority.certificate) in out


def test_a_program_reads_the_same_as_json(certificates, capsys):
    directory = certificates.admin("alice")
    found = json.loads(show(capsys, directory, "-o", "json")[1])
    assert (found["name"], found["role"]) == ("alice", "admin")
    left = datetime.fromisoformat(found["notAfter"]) - datetime.now(UTC)
    renewed_with = datetime.fromisoformat(found["notAfter"]) - datetime.fromisoformat(
        found["renewAt"]
    )
    assert timedelta(days=364) < left < timedelta(days=366)
    assert 0.19 < renewed_with / left < 0.26
    (trusted,) = found["authorities"]
    assert trusted["pin"] == tokens.ca_pin(certificates.authority.certificate)


@pytest.mark.parametrize("role", ["viewer", "admin", "cluster"])
def test_the_role_is_told(certificates, capsys, role):
    directory = getattr(certificates, role)("x")
    assert json.loads(show(capsys, directory, "-o", "json")[1])["role"] == role


def test_a_broker_calls_nobody(certificates, capsys):
    assert json.loads(show(capsys, certificates.server(), "-o", "json")[1])["role"] == "broker"


def test_one_that_has_ended_says_so(certificates, capsys):
    _, out, _ = show(capsys, certificates.expired("a"))
    assert "ago)" in next(line for line in out.splitlines() if line.startswith("Valid until"))
    assert "Days left:     0" in out


def test_the_private_key_is_not_shown(certificates, capsys):
    directory = certificates.cluster("a")
    secret = (directory / "tls.key").read_text().splitlines()[1]
    for shape in ("table", "json", "yaml"):
        assert secret not in show(capsys, directory, "-o", shape)[1]


def test_a_pair_that_does_not_match_is_exit_code_2(certificates, capsys):
    directory = certificates.cluster("a")
    other = certificates.cluster("b")
    (directory / "tls.key").write_bytes((other / "tls.key").read_bytes())
    code, out, err = show(capsys, directory)
    assert (code, out) == (2, "")
    assert "do not match" in err
