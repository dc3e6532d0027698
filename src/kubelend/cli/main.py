"""Entry points of `kubelend`, `kubectl lend` and its completion; errors become one line and an exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NoReturn

import typer

from kubelend.cli import app, exit_codes, options, output
from kubelend.cli.exit_codes import ExitCode
from kubelend.core.errors import KubelendError
from kubelend.kits import tables


class OutputLost(Exception):
    """Standard output cannot be written. Not an `OSError`, which the parser would handle in its own way."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"the output could not be written: {cause.strerror or cause}")
        self.is_unread = cause.errno == errno.EPIPE
        """The reader has closed the pipe (`| head`), which is no failure."""


class TolerantOutput(io.TextIOWrapper):
    """Standard output that accepts all writes, and raises `OutputLost` only when it is flushed.

    So a command that changes something is not stopped half-way because its output is lost.
    """

    cause: OSError | None = None

    def write(self, text: str) -> int:
        with self._deferring():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._deferring():
            super().flush()
        if self.cause is not None:
            raise OutputLost(self.cause)

    @contextlib.contextmanager
    def _deferring(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.cause = self.cause or error
            # The rest goes nowhere: what is still in a buffer would fail again when the process ends.
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())


def install_output() -> None:
    """Replace standard output, unless the process was started without one."""
    known = sys.stdout
    if isinstance(known, io.TextIOWrapper):
        sys.stdout = TolerantOutput(
            known.buffer,
            encoding=known.encoding,
            errors=known.errors,
            line_buffering=known.line_buffering,
        )


def flush_output() -> None:
    """Write what is still in a buffer; `OutputLost` if not everything was written."""
    if isinstance(sys.stdout, TolerantOutput):
        try:
            sys.stdout.flush()
        finally:
            # The interpreter flushes once more at exit, and would print a warning.
            sys.stdout.cause = None


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and end the process."""
    install_output()
    code = run(sys.argv[1:] if arguments is None else list(arguments), program(sys.argv[0]))
    try:
        flush_output()
    except OutputLost as loss:
        code = code or _lost(loss)
    sys.exit(code)


def run(arguments: list[str], name: str = "kubelend") -> int:
    """Run one command, and return its exit code."""
    state = app.GlobalFlags()
    app.register_shells()
    try:
        code = app.build_app().main(
            args=options.normalize_arguments(arguments),
            prog_name=name,
            complete_var=app.COMPLETE_VARIABLE,
            standalone_mode=False,
            obj=state,
        )
    except typer.TyperException as error:
        return _fail(_usage(error), ExitCode(error.exit_code))
    except typer.Abort:
        return ExitCode.INTERRUPTED
    except KubelendError as error:
        _trace(state)
        return _fail(str(error), exit_codes.exit_code_for(error))
    except OutputLost as loss:
        return _lost(loss)
    except Exception as error:  # noqa: BLE001 - the root of the process: printed, with an exit code
        _trace(state)
        text = f"unexpected: {type(error).__name__}: {error}; {_REPORT}"
        return _fail(text, ExitCode.UNEXPECTED)
    return code if isinstance(code, int) else ExitCode.OK


def program(path: str) -> str:
    """The name of the command for its user: kubectl finds plugins by file name and hides the dash."""
    name = Path(path).name
    return name.replace("-", " ", 1) if name.startswith("kubectl-") else "kubelend"


_REPORT = "run it again with --debug before the command, and report the output"


def _usage(error: typer.TyperException) -> str:
    text = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    command = "kubelend" if context is None else context.command_path
    return f"{text[:1].lower()}{text[1:]}; see `{command} --help`"


def _trace(state: app.GlobalFlags) -> None:
    if state.debug:
        print(tables.sanitize_lines(traceback.format_exc()), end="", file=sys.stderr)


def _lost(loss: OutputLost) -> ExitCode:
    return ExitCode.OK if loss.is_unread else _fail(str(loss), ExitCode.UNEXPECTED)


def _fail(text: str, code: ExitCode) -> ExitCode:
    output.print_error(text)
    return code


# -- completion for kubectl

NO_FILES: Final = ":4"
"""Cobra's directive: complete no file names."""
FILES: Final = ":0"
"""Cobra's directive: complete file names."""


def complete() -> None:
    """`kubectl_complete-lend`: kubectl runs it with the words behind `kubectl lend`, the last perhaps empty.

    The candidates are requested as the completion script of a shell does it, so the two never differ.
    """
    print(completion_lines(sys.argv[1:]))


def completion_lines(words: Sequence[str]) -> str:
    """A candidate for each line, help behind a tab; then a directive for the shell."""
    candidates = _candidates(words)
    return "\n".join([*candidates, NO_FILES if candidates else FILES])


def _candidates(words: Sequence[str]) -> list[str]:
    *before, incomplete = words or [""]
    line = (
        shlex.join(["kubelend", *options.move_global_flags(before)])
        + " "
        + (incomplete and shlex.quote(incomplete))
    )
    os.environ |= {
        app.COMPLETE_VARIABLE: "complete_fish",
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    with (
        contextlib.redirect_stdout(io.StringIO()) as written,
        contextlib.suppress(SystemExit),
    ):  # the parser exits then
        run([])
    # Where a file is expected, a candidate without a name is printed.
    return [line for line in written.getvalue().splitlines() if line]


if __name__ == "__main__":
    main()
