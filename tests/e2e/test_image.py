"""The commands of the Dockerfile, run in directories of the test's own: they make what the image holds."""

import base64
import re
import shutil
import subprocess
import sys

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

import kubelend
from charts import ROOT

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """What becomes /opt/kubelend."""
    root = tmp_path_factory.mktemp("image")
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
    build, _, _ = text.partition("\nFROM ${PYTHON}\n")
    for word, rest in re.findall(r"^(COPY|RUN) (.*)$", build, flags=re.MULTILINE):
        if word == "COPY":
            copy(rest.split(), root)
        else:
            run(rest, root)
    return root / "opt" / "kubelend"


def copy(words, root):
    *names, target = words
    place = root / target.removeprefix("/")
    for name in names:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, place, ignore=ignored)
        else:
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place)


def run(command, root):
    command = re.sub(r"(?<=\s)/(?=opt/|src)", f"{root}/", command)
    command = re.sub(r"\bpip --python", f"{sys.executable} -m pip -q --python", command)
    command = re.sub(r"^python\b", sys.executable, command)
    # Without bytecode, whose compilation took most of the time; no test looks at it.
    command = command.replace(" install ", " install --no-compile ")
    done = subprocess.run(["sh", "-c", command], check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def output(image, *arguments):
    command = [image / "bin" / "kubelend", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env={}).stdout


def test_program_runs_with_all_commands_that_the_charts_start(image):
    assert output(image, "version").strip() == f"Client: {kubelend.__version__}"
    for program, known in (("broker", "--store"), ("agent", "--cleanup-deployment"), ("join", "")):
        text = output(image, program, "--help")
        assert "Usage: kubelend" in text
        assert known in text


def test_it_signs_the_request_of_a_peering(image):
    """In a child process of the agent, the only one that loads a key of Liqo."""
    key = ed25519.Ed25519PrivateKey.generate()
    parts = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    done = subprocess.run(
        [image / "bin" / "python", "-P", "-m", "kubelend.pki.liqo_csr", "berlin"],
        input=base64.b64encode(key.private_bytes(*parts)),
        check=True,
        capture_output=True,
        env={},
    )
    request = x509.load_pem_x509_csr(base64.b64decode(done.stdout))
    assert request.is_signature_valid
    assert request.subject.rfc4514_string() == "CN=berlin,O=liqo.io"
    assert request.public_key() == key.public_key()


def test_it_is_small_and_contains_nothing_that_only_builds(image):
    packages = {path.name.partition("-")[0] for path in image.glob("lib/python*/site-packages/*")}
    assert "kubelend" in packages
    assert not packages & {"pip", "setuptools", "wheel", "pytest", "mypy"}
    assert not [name for name in ("pip", "pytest") if (image / "bin" / name).exists()]
    size = sum(path.stat().st_size for path in image.rglob("*") if path.is_file())
    assert size < 180_000_000
