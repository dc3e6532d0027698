"""Logs: one line per event, of our code and of libraries alike, without secrets."""

import io
import json
import logging
import warnings
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
import structlog

from kubelend.core.errors import InvalidSettings, NotFound
from kubelend.core.lifecycle import Phase
from kubelend.kits import clock, logs

# In two pieces, so that no scanner takes this file for a leak.
BEGIN = "-----BEGIN " + "PRIVATE KEY-----"
PEM = f"{BEGIN}\nMIGHAgEAMBMGByqGSM49\n-----END PRIVATE KEY-----"
pytestmark = pytest.mark.usefixtures("own_logging")


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
def line(stream):
    """Log one event as JSON, and give it back as a program would read it."""
    logs.setup("debug", "json", stream)

    def log(event="something", **fields):
        structlog.get_logger("test").info(event, **fields)
        return json.loads(stream.getvalue().split("\n")[-2])

    return log


# -- the line


def test_line_has_timestamp_level_logger_and_event(line):
    before = clock.utc_now()
    found = line("placed", cluster="a", seconds=0.5, ready=True, nothing=None)
    assert list(found)[:4] == ["timestamp", "level", "logger", "event"]
    assert (found["level"], found["logger"], found["event"]) == ("info", "test", "placed")
    assert (found["cluster"], found["seconds"], found["ready"]) == ("a", 0.5, True)
    assert found["nothing"] is None
    assert found["timestamp"].endswith("Z")
    assert before <= datetime.fromisoformat(found["timestamp"]) <= clock.utc_now()


def test_bound_values_and_the_exception_are_in_the_line(line, stream):
    structlog.contextvars.bind_contextvars(request="r-1")
    try:
        raise NotFound("no cluster 'a'")
    except NotFound:
        structlog.get_logger("test").bind(cluster="a").exception("failed")
    found = json.loads(stream.getvalue())
    assert (found["request"], found["cluster"], found["level"]) == ("r-1", "a", "error")
    assert "Traceback" in found["exception"]
    assert "no cluster 'a'" in found["exception"]


class Thing(msgspec.Struct):
    size: int


@pytest.mark.parametrize(
    "value, shown",
    [
        (datetime(2026, 1, 1, tzinfo=UTC), "2026-01-01T00:00:00+00:00"),
        (timedelta(hours=1), "1:00:00"),
        (Phase.RESERVED, "Reserved"),
        (Path("/tmp/x"), "/tmp/x"),
        (NotFound("gone"), "NotFound('gone')"),
        (b"\x00\x01", "[2 bytes]"),
        ({"a": (1, Path("b"))}, {"a": [1, "b"]}),
        (frozenset({"a"}), ["a"]),
        (Thing(1), "Thing(size=1)"),
        (2**80, str(2**80)),
        ("\ud800", "\\ud800"),
        ("ümläut", "ümläut"),
        ("two\nlines", "two\nlines"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_value_can_be_logged(line, value, shown):
    assert line(value=value)["value"] == shown


def test_one_event_is_one_line_and_nesting_is_limited(stream, line):
    nested: dict[str, object] = {}
    nested["again"] = nested
    assert "[too deep]" in json.dumps(line("two\nlines", text="\r\n\u2028", value=nested))
    assert stream.getvalue().count("\n") == 1


# -- console format


@pytest.mark.parametrize("is_coloured", [False, True])
def test_console_line_has_no_control_characters_of_others(monkeypatch, stream, is_coloured):
    """Colours on a terminal, unless the user wants none."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(stream, "isatty", lambda: True)
    if not is_coloured:
        monkeypatch.setenv("NO_COLOR", "1")
    logs.setup("info", "console", stream)
    structlog.get_logger("test").warning("store failed", problem="disk full", tries=2)
    structlog.get_logger("test").info("hello\n\x1b[2J", name="a\r\nfake line\x07")
    assert ("\x1b[" in stream.getvalue()) == is_coloured
    assert not set("\r\x07") & set(stream.getvalue())
    assert "\x1b[2J" not in stream.getvalue()
    found, _ = stream.getvalue().split("\n")[:-1]
    if not is_coloured:
        assert "[warning" in found
        assert "[test]" in found
        assert "problem='disk full' tries=2" in found
        assert found.split()[0].endswith("Z")


def test_console_traceback_has_no_variables(stream):
    logs.setup("info", "console", stream)
    in_a_variable = "-".join(["correct", "horse"])
    try:
        raise NotFound("gone \x1b[2J")
    except NotFound:
        structlog.get_logger("test").exception("failed")
    assert "NotFound: gone" in stream.getvalue()
    assert stream.getvalue().count("\n") > 3
    assert in_a_variable not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


# -- secrets


SECRET_KEYS = """
    token join_token bearerToken Authorization proxy-authorization password db_password passphrase secret
    client_secret Cookie credentials private_key privateKey api_key apiKey X-Api-Key key ca_key keys key_pem
    private_bytes key_material_token
"""
OTHER_KEYS = "cluster idempotency_key Idempotency-Key request_key key_file token_id keyspace path"


@pytest.mark.parametrize("name", SECRET_KEYS.split())
def test_values_of_secret_keys_are_redacted(line, name):
    assert line(**{name: None})[name] is None
    for value in ("hunter2", b"hunter2", {"deep": "hunter2"}, ["hunter2"], 42):
        assert line(**{name: value})[name] == logs.REDACTED
    assert line(outer={"inner": [{name: "hunter2"}]})["outer"] == {"inner": [{name: logs.REDACTED}]}


@pytest.mark.parametrize("name", OTHER_KEYS.split())
def test_values_of_other_keys_are_not_redacted(line, name):
    assert line(**{name: "shown"})[name] == "shown"


SECRETS = {
    "a key": (PEM, "[redacted]"),
    "amid text": (f"before {PEM} after", "before [redacted] after"),
    "two keys": (f"{PEM}\nbetween\n{PEM}", "[redacted]\nbetween\n[redacted]"),
    "half a key": (BEGIN + "\nMIGHAgEAcut off", "[redacted]"),
    "its repr": (repr(PEM), "'[redacted]'"),
    "password in URL": ("postgres://me:hunter2@db/x", "postgres://[redacted]@db/x"),
    "user in URL": (
        "see https://a/b and https://hunter2@c",
        "see https://a/b and https://[redacted]@c",
    ),
    "bearer": ("Bearer hunter2.x-y", "Bearer [redacted]"),
    "header": ("authorization: bearer hunter2", "authorization: bearer [redacted]"),
    "a joining token": ("join --token kl1.abc234.hunter2", "join --token kl1.abc234.[redacted]"),
    "one in JSON": ('{"token":"kl1.abc234.hunter2"}', '{"token":"kl1.abc234.[redacted]"}'),
}


@pytest.mark.parametrize("secret, shown", SECRETS.values(), ids=SECRETS)
def test_secrets_inside_texts_are_redacted(line, stream, secret, shown):
    assert line(secret)["event"] == shown
    found = line(value=secret, deep=[{"a": secret}], exc_info=ValueError(secret))
    assert (found["value"], found["deep"]) == (shown, [{"a": shown}])
    assert f"ValueError: {shown}" in found["exception"]
    logging.getLogger("library").warning("it said %s", secret)
    assert json.loads(stream.getvalue().split("\n")[-2])["event"] == f"it said {shown}"
    for piece in "MIGHAgEA", "hunter2":
        assert piece not in stream.getvalue()


def test_redaction_of_a_long_hostile_text_is_fast(line):
    for text in (
        "://" + ":" * 300_000 + " @",
        "-----BEGIN" * 30_000,
        "bearer " * 50_000,
        "kl1." * 50_000,
    ):
        assert line(value=text)


# -- libraries


def test_libraries_log_to_the_same_stream_in_the_same_format(line, stream):
    try:
        raise OSError("cut off")
    except OSError:
        logging.getLogger("aiohttp.server").exception("bad %s from %s", "request", "127.0.0.1")
    found = json.loads(stream.getvalue())
    assert (found["logger"], found["level"]) == ("aiohttp.server", "error")
    assert found["event"] == "bad request from 127.0.0.1"
    assert "OSError: cut off" in found["exception"]
    assert found["timestamp"].endswith("Z")


def test_custom_levels_become_the_nearest_below_and_wrong_arguments_are_shown(line, stream):
    del logging.getLogger().handlers[1:]  # those of pytest do not forgive it
    for level in (5, 15, 35, 99):
        logging.getLogger("library").log(level, "%d bytes", "many")
    found = [json.loads(text) for text in stream.getvalue().splitlines()]
    assert [one["level"] for one in found] == ["debug", "warning", "critical"]
    assert {one["event"] for one in found} == {"%d bytes ('many',)"}


def test_warnings_are_logged(line, stream):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    found = json.loads(stream.getvalue())
    assert found["logger"] == "py.warnings"
    assert "DeprecationWarning: old" in found["event"]


# -- setup


@pytest.mark.parametrize("level", logs.LEVELS)
def test_only_the_level_and_above_is_logged(stream, level):
    logs.setup(level, "json", stream)
    for name in logs.LEVELS:
        getattr(structlog.get_logger("ours"), name)("said")
        getattr(logging.getLogger("theirs"), name)("said")
    found = [json.loads(text)["level"] for text in stream.getvalue().splitlines()]
    expected = logs.LEVELS[logs.LEVELS.index(level) :]
    assert found == [name for name in expected for _ in range(2)]


def test_existing_loggers_follow_a_second_setup_and_log_each_line_once(stream):
    old = io.StringIO()
    logs.setup("info", "console", old)
    log = structlog.get_logger("ours").bind(cluster="a")
    log.info("to the old")
    logs.setup("info", "json", stream)
    log.info("to the new")
    logging.getLogger("theirs").info("to the new")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == [
        "to the new"
    ] * 2
    assert len(old.getvalue().splitlines()) == 1


def test_standard_error_is_the_default(capsys):
    logs.setup()
    structlog.get_logger("ours").info("hello")
    out, err = capsys.readouterr()
    assert out == ""
    assert json.loads(err)["event"] == "hello"


@pytest.mark.parametrize("level, format", [("loud", "json"), ("info", "xml")])
def test_unknown_settings_are_rejected(level, format):
    with pytest.raises(InvalidSettings, match="use"):
        logs.setup(level, format)


def test_full_disk_and_closed_stream_do_not_stop_the_process(stream):
    full = Path("/dev/full").open("w")  # noqa: SIM115 - closing it fails, and that is asserted
    for each in (full, stream):
        logs.setup("info", "json", each)
        if each is stream:
            stream.close()
        structlog.get_logger("ours").info("hello")
        logging.getLogger("theirs").info("hello")
    with pytest.raises(OSError, match="No space left"):
        full.close()
