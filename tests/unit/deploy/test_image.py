"""The Dockerfile, as far as it can be judged without a container engine."""

import re

import pytest

from charts import ROOT

TEXT = (ROOT / "Dockerfile").read_text()


def instructions(text):
    """Each as (word, rest), with continued lines put together."""
    joined = re.sub(r"\\\n\s*", "", text)
    lines = (line for line in joined.splitlines() if line and not line.startswith("#"))
    return [tuple(line.split(maxsplit=1)) for line in lines]


@pytest.fixture(scope="module")
def stages():
    """What each stage says, by its order."""
    found: list[list[tuple[str, ...]]] = []
    for word, rest in instructions(TEXT):
        if word == "FROM":
            found.append([])
        if found:
            found[-1].append((word, rest))
    return found


def test_last_stage_only_copies_what_the_first_has_made(stages):
    first, last = stages
    assert first[0] == ("FROM", "${PYTHON} AS build")
    assert last[0] == ("FROM", "${PYTHON}")
    assert [rest for word, rest in last if word == "COPY"] == [
        "--from=build /opt/kubelend /opt/kubelend"
    ]
    assert not [rest for word, rest in last if word in {"RUN", "ADD"}]
    assert ("USER", "65532:65532") in last, "a number, and not root"
    assert ("ENTRYPOINT", '["kubelend"]') in last, "signals reach the program itself"


def test_everything_from_outside_is_pinned_by_hash_and_nothing_is_compiled(stages):
    installs = [rest for word, rest in stages[0] if word == "RUN" and " install " in rest]
    outside, own = installs
    assert "--require-hashes --requirement /src/requirements.lock" in outside
    assert "--only-binary :all:" in outside
    assert "--no-deps --no-build-isolation /src" in own


def test_whatever_is_copied_is_let_into_the_context(stages):
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    copied = {name for word, rest in stages[0] if word == "COPY" for name in rest.split()[:-1]}
    assert "*" in ignored
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)
