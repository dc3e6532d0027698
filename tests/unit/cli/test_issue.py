"""`kubelend ca`: an authority and certificates from it, by openssl's judgement too."""

import stat
from datetime import UTC, datetime, timedelta

import pytest

import openssl
from kubelend.cli import main
from kubelend.core.lifecycle import Role
from kubelend.pki import files, identity
from kubelend.transports import tls


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def authority(here):
    assert main.run(["ca", "init"]) == 0
    return here / "ca"


def test_an_authority_keeps_its_key_to_itself(authority):
    assert stat.S_IMODE((authority / "ca.key").stat().st_mode) == 0o600


def test_a_new_authority_says_what_comes_next(here, capsys):
    assert main.run(["ca", "init"]) == 0
    out, err = capsys.readouterr()
    assert out == (
        "created an authority in ca; keep ca/ca.key secret: it can issue a certificate for any name\n"
    )
    assert err == "Next: kubelend ca issue broker --role broker\n"


def test_an_authority_is_not_replaced_by_accident(authority, capsys):
    before = (authority / "ca.key").read_bytes()
    assert main.run(["ca", "init"]) == 2
    assert "would be overwritten" in capsys.readouterr().err
    assert (authority / "ca.key").read_bytes() == before


@openssl.needed
@pytest.mark.parametrize("role", ["cluster", "viewer", "admin", "proxy"])
def test_a_certificate_is_for_a_name_and_a_role(authority, here, role):
    assert main.run(["ca", "issue", "alice", "--role", role]) == 0
    directory = here / "certs" / "alice"
    assert "OK" in openssl.said("verify", "-CAfile", authority / "ca.crt", directory / "tls.crt")
    assert files.common_names(directory) == ["alice"]
    assert role_in(directory) == role
    tls.client_context(directory)


def role_in(directory):
    subject = openssl.said(
        "x509", "-in", directory / "tls.crt", "-noout", "-subject", "-nameopt", "multiline"
    )
    (organisation,) = (line for line in subject.splitlines() if "organizationName" in line)
    return identity.ROLES_BY_ORGANISATION.get(organisation.partition("= ")[2], Role.CLUSTER)


@openssl.needed
def test_a_broker_gets_the_names_it_is_reached_by(authority, here, capsys):
    arguments = "ca issue broker --role broker --dns broker.example.org --ip 192.0.2.7 --out b"
    assert main.run(arguments.split()) == 0
    names = openssl.said("x509", "-in", here / "b" / "tls.crt", "-noout", "-ext", "subjectAltName")
    assert all(name in names for name in ("localhost", "broker.example.org", "192.0.2.7"))
    assert "Next: kubelend broker --http-cert-path b" in capsys.readouterr().err


def test_names_of_hosts_are_for_brokers(authority, capsys):
    assert main.run(["ca", "issue", "a", "--dns", "x"]) == 2
    assert "--dns and --ip are for a broker; add --role broker" in capsys.readouterr().err


def test_a_lifetime_is_kept(authority, here):
    assert main.run(["ca", "issue", "a", "--lifetime", "90m"]) == 0
    left = tls.certificate_expiry(here / "certs" / "a") - datetime.now(UTC)
    assert timedelta(minutes=89) < left < timedelta(minutes=91)


def test_a_certificate_is_replaced_only_when_asked(authority, capsys):
    assert main.run(["ca", "issue", "a"]) == 0
    capsys.readouterr()
    assert main.run(["ca", "issue", "a"]) == 2
    assert "or replace them with --overwrite" in capsys.readouterr().err
    assert main.run(["ca", "issue", "a", "--overwrite"]) == 0


def test_a_name_cannot_lead_out_of_the_directory(authority, here):
    assert main.run(["ca", "issue", "../../evil"]) == 0
    assert files.common_names(here / "certs" / "..%2F..%2Fevil") == ["../../evil"]


@pytest.mark.parametrize("name", ["", "liqo-resource-broker", "x" * 65, "a\nb"])
def test_a_name_that_the_broker_would_refuse_is_a_wrong_argument(authority, name, capsys):
    assert main.run(["ca", "issue", name]) == 2
    assert capsys.readouterr().err.startswith("error: NAME: ")


def test_what_to_paste_is_quoted(authority, capsys):
    assert main.run(["ca", "issue", "has space"]) == 0
    assert capsys.readouterr().err == "Next: export KUBELEND_CERT_PATH='certs/has space'\n"
    assert main.run(["ca", "issue", "b", "--role", "broker", "--out", "the broker"]) == 0
    assert "--http-cert-path 'the broker'\n" in capsys.readouterr().err
    assert main.run(["ca", "init", "--ca", "another one"]) == 0
    assert "--ca 'another one'\n" in capsys.readouterr().err
