"""The exit codes, and which error has which. Scripts rely on them: they are API, and documented."""

from __future__ import annotations

from enum import IntEnum

from kubelend.core import errors


class Code(IntEnum):
    """How a command ended."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    NOT_FOUND = 3
    FORBIDDEN = 4
    NO_CAPACITY = 5
    LIMIT_EXCEEDED = 6
    UNAVAILABLE = 7
    VIOLATED = 8
    INTERRUPTED = 130

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]


_MEANINGS = {
    Code.OK: "it is done, also if nobody read the output to its end (`| head`)",
    Code.UNEXPECTED: "something unexpected; `--debug` before the command shows where."
    " Or the output could not be written",
    Code.USAGE: "a flag, an argument or a file is wrong",
    Code.NOT_FOUND: "no such cluster or reservation",
    Code.FORBIDDEN: "this certificate is not accepted, or it or this user of the cluster may not do that",
    Code.NO_CAPACITY: "no cluster fits, or the state of the object does not allow it",
    Code.LIMIT_EXCEEDED: "too much, or too often",
    Code.UNAVAILABLE: "the broker, its store or the cluster cannot be reached; trying again may help",
    Code.VIOLATED: "an invariant of the store is violated (`kubelend audit`)",
    Code.INTERRUPTED: "ended by Ctrl-C",
}

_CODES: dict[type[errors.KubelendError], Code] = {
    errors.KubelendError: Code.UNEXPECTED,
    errors.InvalidInput: Code.USAGE,
    errors.InvalidSettings: Code.USAGE,
    errors.InvalidIdentity: Code.FORBIDDEN,
    errors.Forbidden: Code.FORBIDDEN,
    errors.NotFound: Code.NOT_FOUND,
    errors.Conflict: Code.NO_CAPACITY,
    errors.LimitExceeded: Code.LIMIT_EXCEEDED,
    errors.TooSlow: Code.UNAVAILABLE,
    errors.Unavailable: Code.UNAVAILABLE,
    errors.CertificateRefused: Code.FORBIDDEN,
}
"""A class that is not here has the code of its nearest base."""


def saying(error: errors.KubelendError, more: str) -> errors.KubelendError:
    """The same error, and so the same code, with something more to say."""
    return type(error)(f"{error.message}; {more}", hint=error.hint)


def code_of(error: errors.KubelendError) -> Code:
    return next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)
