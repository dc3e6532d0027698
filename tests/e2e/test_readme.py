"""The tour of the README: every block, in order, pasted into one shell."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from waiting import PATIENCE

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("curl") is None, reason="the tour needs curl"),
]

README = Path(__file__).parents[2] / "README.md"


def tour():
    """What the section tells the reader to paste."""
    _, _, rest = README.read_text("utf-8").partition("\n## Five minutes\n")
    section, _, _ = rest.partition("\n## ")
    blocks = re.findall(r"^```bash\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert len(blocks) > 5
    return blocks


def free_ports(count):
    """All are taken before one is given back: no two are the same."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in taken]


def script(blocks, probes):
    """The blocks as they are, but for the ports; ends at the first failure, and with how the broker did."""
    text = "\n".join(blocks)
    assert "localhost:8081" in text
    text = text.replace("localhost:8081", f"localhost:{probes}")
    # By process and not by job: bash forgets a job that has ended, and remembers how its process did.
    text = text.replace("\nkill %1", "\nstarted=$(jobs -p)\nkill %1")
    wait = "for process in $started; do wait $process; done"
    return f"set -euo pipefail\n{text}\n{wait}\necho 'the tour is over'\n"


def environment(api, enrol, probes, metrics):
    kept = {name: text for name, text in os.environ.items() if not name.startswith("KUBELEND_")}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "no_proxy": "localhost",
        "KUBELEND_HTTP_HOST": "127.0.0.1",
        "KUBELEND_HTTP_PORT": str(api),
        "KUBELEND_ENROL_PORT": str(enrol),
        "KUBELEND_HEALTH_PROBE_BIND_ADDRESS": f"127.0.0.1:{probes}",
        "KUBELEND_METRICS_BIND_ADDRESS": f"127.0.0.1:{metrics}",
        "KUBELEND_BROKER_URL": f"https://localhost:{api}",
    }


def members(session):
    """The processes of a session that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        # It may end while we look. The name in brackets may contain anything.
        with suppress(OSError):
            state, _, _, its_session = path.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                found.append(int(path.parent.name))
    return found


def paste(text, directory, environment):
    """Exit code, all that it printed, and the processes that still run."""
    shell = subprocess.Popen(
        ["bash", "-c", text],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = shell.communicate(timeout=2 * PATIENCE)
        left = members(shell.pid)
    finally:
        for pid in members(shell.pid):
            os.kill(pid, signal.SIGKILL)
        shell.wait()
    return shell.returncode, out, left


SHOWN = [
    "wrote the certificate of cluster berlin to certs/berlin",
    "phase: Reserved",
    "Hold 500m CPU / 256Mi Memory for requester paris",
    "Reserved on berlin",
    "exit code 5",
    "cluster/berlin cordoned",
    "cluster/berlin revoked",
    "refused with exit code 4",
    "No violations",
]


def test_the_tour_succeeds_shows_what_it_promises_and_leaves_no_process_behind(tmp_path):
    ports = free_ports(4)
    code, out, left = paste(script(tour(), ports[2]), tmp_path, environment(*ports))
    log = tmp_path / "broker.log"
    assert code == 0, f"{out}\n{log.read_text() if log.exists() else ''}"
    assert out.endswith("the tour is over\n")
    assert [text for text in SHOWN if text not in out] == []
    assert sorted(SHOWN, key=out.index) == SHOWN
    assert left == []
