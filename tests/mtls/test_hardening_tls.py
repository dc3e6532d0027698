"""What the broker's TLS port agrees to, by the word of `openssl s_client`."""

import asyncio
import re
import shutil
import subprocess

import pytest

from waiting import PATIENCE

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs the program openssl: apt-get install openssl"
)

ANY = "ALL:COMPLEMENTOFALL:@SECLEVEL=0"
"""All that the library knows: what is refused is refused by the broker."""


@pytest.fixture
def talk(broker, certificates):
    """Connect with these flags, say something, and give all that openssl prints."""
    directory = certificates.cluster("openssl")

    def run(*flags, said=b""):
        return subprocess.run(
            [
                *("openssl", "s_client", "-connect", f"127.0.0.1:{broker.port}"),
                *("-servername", "localhost", "-verify_return_error"),
                *("-CAfile", directory / "ca.crt", "-cert", directory / "tls.crt"),
                *("-key", directory / "tls.key", *flags),
            ],
            input=said,
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )

    async def talk(*flags, said=b""):
        done = await asyncio.to_thread(run, *flags, said=said)
        return (done.stdout + done.stderr).decode(errors="replace")

    return talk


def chosen(text):
    """Version and cipher; None if there was no agreement."""
    (found,) = re.findall(r"^New, (\S+), Cipher is (\S+)$", text, re.MULTILINE)
    return None if found[1] == "(NONE)" else found


async def test_newest_version_is_chosen_where_both_can(talk):
    text = await talk()
    assert chosen(text)[0] == "TLSv1.3"
    assert "Verify return code: 0 (ok)" in text


async def test_version_1_2_is_agreed_to_with_a_modern_cipher(talk):
    version, cipher = chosen(await talk("-tls1_2", "-cipher", ANY))
    assert version == "TLSv1.2"
    assert re.fullmatch(r"ECDHE-(ECDSA|RSA)-(AES\d+-GCM-SHA\d+|CHACHA20-POLY1305)", cipher)


@pytest.mark.parametrize("flag", ["-tls1_1", "-tls1"])
async def test_older_versions_are_refused(talk, log, flag):
    assert chosen(await talk(flag, "-cipher", ANY)) is None
    assert [line["reason"] for line in log.lines("TLS handshake rejected")] == [
        "UNSUPPORTED_PROTOCOL"
    ]


@pytest.mark.parametrize(
    "ciphers",
    [
        pytest.param("ECDHE+AES:!AESGCM:!AESCCM", id="CBC"),
        pytest.param("kRSA", id="no forward secrecy"),
        pytest.param("DHE", id="finite field"),
        pytest.param("ECDHE+AESCCM", id="CCM"),
        pytest.param("aNULL:eNULL", id="none"),
    ],
)
async def test_client_that_knows_only_older_ciphers_is_refused(talk, log, ciphers):
    assert chosen(await talk("-tls1_2", "-cipher", f"{ciphers}:@SECLEVEL=0")) is None
    assert [line["reason"] for line in log.lines("TLS handshake rejected")] == ["NO_SHARED_CIPHER"]


async def test_nothing_is_compressed(talk):
    for flags in ((), ("-tls1_2", "-comp")):
        text = await talk(*flags)
        assert chosen(text) is not None
        assert re.findall(r"^Compression: (.*)$", text, re.MULTILINE) == ["NONE"]
        assert re.findall(r"^Expansion: (.*)$", text, re.MULTILINE) == ["NONE"]


async def test_client_cannot_begin_anew_within_a_connection(talk):
    """R is what openssl takes for the wish to."""
    _, asked, answered = (await talk("-tls1_2", said=b"R\n")).partition("RENEGOTIATING")
    assert asked
    assert "no renegotiation" in answered
    assert "verify return" not in answered


@pytest.mark.parametrize("version", ["-tls1_2", "-tls1_3"])
async def test_no_ticket_is_given(talk, version):
    text = await talk(version, said=b"GET /api/v1/version HTTP/1.0\r\n\r\n")
    assert chosen(text) is not None
    assert "TLS session ticket" not in text


async def test_only_http_1_1_is_agreed_to_as_the_protocol(talk):
    assert "ALPN protocol: http/1.1" in await talk("-alpn", "h2,http/1.1")
    assert "No ALPN negotiated" in await talk("-alpn", "h2")
