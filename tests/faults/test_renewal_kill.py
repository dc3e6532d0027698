"""A process killed while it renews its certificate leaves one that works."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from certificates import Certificates
from kubelend.pki import files
from kubelend.transports import tls

TESTS = Path(__file__).parents[1]

# Renews without a pause, without a broker.
_PROGRAM = """
import asyncio, sys
from datetime import UTC, datetime
from pathlib import Path
from issuers import Issuer
from kubelend.apps import join
from kubelend.pki.authority import Authority

async def main(authority, directory):
    now = datetime.now(UTC)
    issuer = Issuer(Authority.load(authority), now)
    while True:
        assert await join.renew(directory, issuer.issue, issuer.verify, now, force=True)
        print("renewed", flush=True)

asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
"""


@pytest.mark.timeout(120)
def test_a_kill_at_any_moment_leaves_a_pair_that_works(tmp_path):
    certificates = Certificates(tmp_path / "certificates")
    certificates.authority.save(tmp_path / "ca")
    directory = certificates.cluster("a")
    serials = set()
    for turn in range(8):
        with renewing(tmp_path / "ca", directory) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "renewed\n"
            # A renewal takes a few milliseconds: the kill meets another part of it each time.
            time.sleep(0.001 * turn)
            process.send_signal(signal.SIGKILL)
        found = files.load_credentials(directory)
        assert found.authorities == certificates.authority.trusted
        tls.client_context(directory)
        serials.add(found.certificate.serial_number)
    assert len(serials) == 8
    # What was left behind is cleared away by the next: one generation, and perhaps one just begun.
    assert len(list(directory.glob(".generation-*"))) <= 3


def renewing(authority, directory):
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, authority, directory],
        env={"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
    )
