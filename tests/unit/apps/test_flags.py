"""Flags are read off the record: names, variables, help, values, and all problems at once."""

from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest

from kubelend.apps import flags
from kubelend.apps.flags import Address, Settings
from kubelend.core.errors import InvalidSettings


class Sample(Settings, frozen=True, kw_only=True):
    directory: Path
    """Where it lies."""

    listen_port: int = 80
    """A port,
    on two lines."""

    mode: Literal["fast", "slow"] = "fast"
    """How."""

    is_on: bool = False
    """Whether."""

    pause: timedelta = timedelta(minutes=90)
    """How long."""

    address: Address | None = Address("", 8080)
    """Where."""

    title: str = ""
    """What."""

    def problems(self) -> list[str]:
        return [] if self.listen_port else ["--listen-port: must not be zero"]


def flag(attribute):
    return next(found for found in flags.flags_of(Sample) if found.attribute == attribute)


def parse(**texts):
    return flags.parse_settings(Sample, {"directory": "d", **texts})


def test_an_attribute_is_a_flag_and_a_variable():
    assert flag("listen_port").name == "--listen-port"
    assert flag("listen_port").variable == "KUBELEND_LISTEN_PORT"


def test_the_docstring_below_an_attribute_is_its_help_on_one_line():
    assert flag("listen_port").help == "A port, on two lines."


@pytest.mark.parametrize(
    "attribute,default",
    [
        ("directory", None),
        ("listen_port", "80"),
        ("mode", "fast"),
        ("is_on", "false"),
        ("pause", "1h30m"),
        ("address", ":8080"),
        ("title", ""),
    ],
)
def test_a_default_is_shown_as_one_would_write_it(attribute, default):
    assert flag(attribute).default == default


def test_every_default_reads_back_as_itself():
    texts = {found.attribute: found.default for found in flags.flags_of(Sample) if found.default}
    assert parse(**texts) == Sample(directory=Path("d"))


@pytest.mark.parametrize(
    "attribute,text,value",
    [
        ("directory", "/a/b", Path("/a/b")),
        ("listen_port", "-1", -1),
        ("mode", "slow", "slow"),
        ("is_on", "T", True),
        ("is_on", "0", False),
        ("pause", "90s", timedelta(seconds=90)),
        ("address", "127.0.0.1:1", Address("127.0.0.1", 1)),
        ("address", "[::1]:1", Address("::1", 1)),
        ("address", "0", None),
        ("title", "", ""),
    ],
)
def test_a_text_becomes_a_value_of_its_type(attribute, text, value):
    assert getattr(parse(**{attribute: text}), attribute) == value


@pytest.mark.parametrize(
    "attribute,text,problem",
    [
        ("directory", "", "--directory: required; set the flag or KUBELEND_DIRECTORY"),
        ("listen_port", "8O", "--listen-port: '8O' is not an integer"),
        ("listen_port", "1" * 19, "is not an integer"),
        ("listen_port", "²", "is not an integer"),
        ("listen_port", "", "--listen-port: required"),
        ("mode", "medium", "--mode: 'medium' is not supported; use one of fast, slow"),
        ("is_on", "yes", "--is-on: 'yes' is not a boolean; use true or false"),
        ("pause", "5", "--pause: '5' has a number without a unit; write numbers with units"),
        ("address", "8080", "--address: not a valid address; use :8081"),
        ("address", ":70000", "--address: not a valid address"),
        ("address", ":x", "--address: not a valid address"),
        ("address", "::1:80", "--address: too many colons"),
        ("listen_port", "0", "--listen-port: must not be zero"),
    ],
)
def test_a_wrong_text_is_told_by_the_flags_name(attribute, text, problem):
    with pytest.raises(InvalidSettings) as raised:
        parse(**{attribute: text})
    assert problem in str(raised.value)


def test_all_problems_are_told_at_once():
    with pytest.raises(InvalidSettings) as raised:
        flags.parse_settings(Sample, {"mode": "x", "pause": "y", "listen_port": "0"})
    told = str(raised.value)
    positions = [told.index(name) for name in ("--directory", "--mode", "--pause", "--listen-port")]
    assert positions == sorted(positions)


@pytest.mark.parametrize("text", [":8081", "localhost:1", "[::1]:443", "1.2.3.4:0"])
def test_an_address_round_trips(text):
    assert str(Address.parse(text)) == text
