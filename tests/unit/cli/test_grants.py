"""`kubelend grant verify` needs the keys and nothing else."""

import io
import json

import msgspec
import pytest

from kubelend.cli import main, output
from kubelend.pki.grants import GRANT_ISSUER, Grant, GrantKeys


@pytest.fixture
def keys():
    return GrantKeys.create()


@pytest.fixture
def file(tmp_path, keys):
    path = tmp_path / "keys.json"
    path.write_bytes(msgspec.json.encode(keys.public))
    return path


@pytest.fixture
def grant(keys):
    now = int(output.now().timestamp())
    return keys.sign(
        Grant(
            GRANT_ISSUER, "rsv-1", "paris", "berlin", now, now + 7200, {"cpu": "4", "memory": "8Gi"}
        )
    )


def verify(grant, file, *flags, provider="berlin"):
    return main.run(["grant", "verify", grant, "--keys", str(file), "--provider", provider, *flags])


def test_real_grant_is_told_in_a_sentence(grant, file, capsys):
    assert verify(grant, file) == 0
    out = capsys.readouterr().out
    assert out.startswith("paris may use 4 cpu, 8Gi memory of berlin for rsv-1 until ")


def test_program_reads_its_claims(grant, file, capsys):
    assert verify(grant, file, "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["sub"] == "paris"


def test_grant_can_come_through_a_pipe(grant, file, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(grant + "\n"))
    assert verify("-", file) == 0


def test_grant_for_somebody_else_or_by_somebody_else_is_refused(grant, file, tmp_path, capsys):
    assert verify(grant, file, provider="rome") == 2
    assert "for provider 'berlin', not 'rome'" in capsys.readouterr().err
    other = tmp_path / "other.json"
    other.write_bytes(msgspec.json.encode(GrantKeys.create().public))
    assert verify(grant, other) == 2
    assert "grant is not signed by a key of this broker" in capsys.readouterr().err


def test_file_without_keys_is_one_line(grant, tmp_path, capsys):
    path = tmp_path / "keys.json"
    path.write_text("[]")
    assert verify(grant, path) == 2
    assert "has no keys; write it with `kubelend grant keys`" in capsys.readouterr().err
