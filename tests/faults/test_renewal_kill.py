"""A holder killed in the middle of a renewal has a certificate that works, and renews it when it is back."""

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

# Renews without a pause; a desk instead of a broker, for the disk is what this is about.
_PROGRAM = """
import asyncio, sys
from datetime import UTC, datetime
from pathlib import Path
from desks import Desk
from kubelend.apps.renewal import Renewer
from kubelend.pki.authority import Authority

async def main(authority, directory):
    now = datetime.now(UTC)
    desk = Desk(Authority.load(authority), now)
    renewer = Renewer(directory, desk.ask, desk.prove)
    while True:
        assert await renewer.renew(now, force=True) is not None
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
        env={"PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        text=True,
    )
