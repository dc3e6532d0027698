"""The exit codes, and which error has which. Scripts rely on them: they are API, and documented."""

from __future__ import annotations

from enum import IntEnum

from kubelend.core import errors


class ExitCode(IntEnum):
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
    ExitCode.OK: "success, also if the reader of the output stopped early (`| head`)",
    ExitCode.UNEXPECTED: "unexpected error; `--debug` before the command prints the traceback."
    " Also if the output could not be written",
    ExitCode.USAGE: "a flag, an argument or a file is wrong",
    ExitCode.NOT_FOUND: "no such cluster, reservation or other object",
    ExitCode.FORBIDDEN: "the certificate is not accepted, or its holder (or the user of the kubeconfig) lacks"
    " the permission",
    ExitCode.NO_CAPACITY: "no cluster fits, or the state of the object does not allow it",
    ExitCode.LIMIT_EXCEEDED: "a quota, a rate limit or a size limit is exceeded",
    ExitCode.UNAVAILABLE: "the broker, its store or the cluster cannot be reached; retrying may help",
    ExitCode.VIOLATED: "an invariant of the store, or the chain of the audit log, is violated"
    " (`kubelend audit check`)",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C, or not confirmed",
}

_CODES: dict[type[errors.KubelendError], ExitCode] = {
    errors.KubelendError: ExitCode.UNEXPECTED,
    errors.InvalidInput: ExitCode.USAGE,
    errors.InvalidSettings: ExitCode.USAGE,
    errors.InvalidIdentity: ExitCode.FORBIDDEN,
    errors.Forbidden: ExitCode.FORBIDDEN,
    errors.QuotaExceeded: ExitCode.LIMIT_EXCEEDED,
    errors.NotFound: ExitCode.NOT_FOUND,
    errors.Conflict: ExitCode.NO_CAPACITY,
    errors.LimitExceeded: ExitCode.LIMIT_EXCEEDED,
    errors.TooSlow: ExitCode.UNAVAILABLE,
    errors.Unavailable: ExitCode.UNAVAILABLE,
    errors.CertificateRefused: ExitCode.FORBIDDEN,
}
"""A class that is not here has the code of its nearest base."""


def exit_code_for(error: errors.KubelendError) -> ExitCode:
    return next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)


def with_detail(error: errors.KubelendError, more: str) -> errors.KubelendError:
    """The same error, and so the same code, with more text."""
    return type(error)(f"{error.message}; {more}", hint=error.hint)
