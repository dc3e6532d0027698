"""openssl as the second opinion on what the authority makes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

needed = pytest.mark.skipif(
    not shutil.which("openssl"), reason="openssl is missing: apt-get install openssl"
)


def run(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """What it prints; its verdict is in the exit code."""
    command = ["openssl", *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, input=text)


def said(*arguments: str | Path, text: str | None = None) -> str:
    """What it prints, where it must not fail."""
    answer = run(*arguments, text=text)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def described(certificate: Path) -> str:
    """The text of a certificate, without the layout, which differs between versions of openssl."""
    text = said("x509", "-in", certificate, "-noout", "-text")
    return re.sub(r"\s+", " ", text).replace(" = ", "=")


def accepts(leaf: Path, authorities: Path, *, purpose: str = "sslclient") -> bool:
    """Whether it verifies a `tls.crt` by these authorities and what stands behind the leaf."""
    verdict = run(
        *("verify", "-x509_strict", "-CAfile", authorities, "-untrusted", leaf),
        *("-purpose", purpose, leaf),
    )
    return verdict.returncode == 0
