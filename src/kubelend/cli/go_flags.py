"""Flags as manifests of the published Go programs have them: `-http-port=8443`, `--leader-elect=true`.

Flags of those programs that ours have no use for are left out, with a line on standard error, so that a
manifest works unchanged.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Final

from kubelend.apps import flags
from kubelend.apps.agent_settings import AgentSettings
from kubelend.apps.settings import BrokerSettings

_SETTINGS: Final = {"broker": BrokerSettings, "agent": AgentSettings}

UNUSED: Final = {
    "--metrics-secure": "metrics are served without TLS",
    "--enable-http2": "HTTP/1.1 is used",
    "--metrics-cert-path": "metrics are served without TLS",
    "--metrics-cert-name": "metrics are served without TLS",
    "--metrics-cert-key": "metrics are served without TLS",
    "--webhook-cert-path": "there are no webhooks",
    "--webhook-cert-name": "there are no webhooks",
    "--webhook-cert-key": "there are no webhooks",
    "--zap-devel": "see --log-format",
    "--zap-encoder": "see --log-format",
    "--zap-log-level": "see --log-level",
    "--zap-stacktrace-level": "see --log-level",
    "--zap-time-encoding": "times are in RFC 3339",
}
"""Flags of the published programs without effect, and what holds instead."""

_UNUSED_SWITCHES: Final = frozenset({"--metrics-secure", "--enable-http2", "--zap-devel"})
"""Those that take no value of their own: Go's booleans have it behind `=` only."""


def normalize(arguments: list[str]) -> list[str]:
    """Convert the arguments of `broker` and `agent`; those of other commands stay as they are."""
    command = next((word for word in arguments if not word.startswith("-")), "")
    if command not in _SETTINGS:
        return arguments
    return [
        _with_plain_switch(word, command) for word in _used(_with_two_dashes(arguments, command))
    ]


def _with_two_dashes(arguments: list[str], command: str) -> list[str]:
    known = {flag.name for flag in flags.flags_of(_SETTINGS[command])} | UNUSED.keys()
    return [f"-{word}" if f"-{word.partition('=')[0]}" in known else word for word in arguments]


def _used(arguments: list[str]) -> Iterator[str]:
    rest = iter(arguments)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name not in UNUSED:
            yield word
            continue
        print(f"{name} has no effect: {UNUSED[name]}", file=sys.stderr)
        if not equals and name not in _UNUSED_SWITCHES:
            next(rest, None)


def _with_plain_switch(word: str, command: str) -> str:
    """`--leader-elect=true` is `--leader-elect`, and with `=false` it is `--no-leader-elect`."""
    name, _, value = word.partition("=")
    switches = {flag.name for flag in flags.flags_of(_SETTINGS[command]) if flag.is_switch}
    if name not in switches or not _GO_BOOLEAN.fullmatch(value):
        return word
    return name if value[0] in "1tT" else name.replace("--", "--no-", 1)


_GO_BOOLEAN: Final = re.compile("1|t|true|0|f|false", re.IGNORECASE)
