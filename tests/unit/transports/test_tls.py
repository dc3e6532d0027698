"""What a directory of certificates tells before any connection: its errors, its end, its modes."""

from datetime import timedelta

import pytest
from cryptography.hazmat.primitives import serialization

from certificates import Certificates
from kubelend.core.errors import InvalidSettings
from kubelend.pki import files, identity
from kubelend.pki.keys import Algorithm
from kubelend.transports import tls


@pytest.fixture
def certificates(tmp_path):
    return Certificates(tmp_path)


@pytest.fixture(params=[tls.server_context, tls.client_context], ids=["server", "client"])
def make_context(request):
    return request.param


@pytest.mark.parametrize("missing", ["tls.crt", "tls.key", "ca.crt"])
def test_a_missing_file_is_named_with_what_to_do(certificates, make_context, missing):
    directory = certificates.server()
    (directory / missing).unlink()
    with pytest.raises(InvalidSettings, match=f"{missing} is missing; .*`kubelend ca issue`"):
        make_context(directory)


@pytest.mark.parametrize("algorithm", [Algorithm.P256, Algorithm.RSA], ids=str)
def test_a_certificate_and_a_key_that_do_not_match_are_named(certificates, make_context, algorithm):
    directory = certificates.cluster("a")
    other = certificates.write("b", identity.client_profile("b"), algorithm=algorithm)
    (directory / "tls.key").write_bytes((other / "tls.key").read_bytes())
    with pytest.raises(InvalidSettings, match=r"tls\.crt and .*tls\.key do not match; use the"):
        make_context(directory)


def test_an_encrypted_key_is_an_error_and_not_a_question_on_the_terminal(
    certificates, make_context
):
    directory = certificates.cluster("a")
    key = files.load_key(directory / "tls.key")
    secret = serialization.BestAvailableEncryption(b"x")
    pkcs8 = serialization.PrivateFormat.PKCS8
    encrypted = key.private_bytes(serialization.Encoding.PEM, pkcs8, secret)
    (directory / "tls.key").write_bytes(encrypted)
    with pytest.raises(InvalidSettings, match="not a certificate and unencrypted key in PEM form"):
        make_context(directory)


def test_a_reloading_context_does_not_start_with_broken_files(certificates):
    directory = certificates.server()
    (directory / "tls.key").unlink()
    with pytest.raises(InvalidSettings, match=r"tls\.key is missing"):
        tls.ReloadingServerContext(directory, report=print)


def test_the_end_of_a_certificate_is_told(certificates):
    directory = certificates.write("a", identity.client_profile("a"), lifetime=timedelta(hours=3))
    expected = certificates.now.replace(microsecond=0) + timedelta(hours=3)
    assert tls.certificate_expiry(directory) == expected


def test_the_end_of_what_is_no_certificate_is_an_error(tmp_path):
    (tmp_path / "tls.crt").write_text("garbage")
    with pytest.raises(InvalidSettings, match=r"tls\.crt: not a certificate in PEM form"):
        tls.certificate_expiry(tmp_path)


def test_a_key_that_others_can_read_is_a_warning_since_kubernetes_mounts_it_so(certificates):
    directory = certificates.server()
    assert tls.key_mode_warning(directory) == ""
    (directory / "tls.key").chmod(0o644)
    assert "mode 0644, so other users can access it; chmod 600" in tls.key_mode_warning(directory)
    tls.server_context(directory)
