"""Entry points of `kubelend`, `kubectl lend` and its completion; errors become one line and an exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import typer

from kubelend.cli import app, options, output
from kubelend.cli.output import ExitCode
from kubelend.core.errors import KubelendError
from kubelend.kits import tables


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and end the process."""
    code = run(sys.argv[1:] if arguments is None else list(arguments), program(sys.argv[0]))
    try:
        print(end="", flush=True)
    except OSError as error:
        code = _lost(error, code)
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
        return _fail(_usage(error, arguments, name), ExitCode(error.exit_code))
    except typer.Abort:
        return ExitCode.INTERRUPTED
    except KubelendError as error:
        _trace(state)
        return _fail(str(error), output.exit_code_for(error))
    except SystemExit as end:
        # On a closed pipe the parser exits by itself.
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        code = _lost(end.__context__)
    except Exception as error:  # noqa: BLE001 - the root of the process: printed, with an exit code
        return _unexpected(error, state)
    return code if isinstance(code, int) else ExitCode.OK


def program(path: str) -> str:
    """The name of the command for its user: kubectl finds plugins by file name and hides the dash."""
    name = Path(path).name
    return name.replace("-", " ", 1) if name.startswith("kubectl-") else "kubelend"


_WRITE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
_REPORT = "run it again with --debug before the command, and report the output"


def _usage(error: typer.TyperException, arguments: list[str], name: str) -> str:
    text = _with_whole_flag(error, arguments).rstrip(".")
    path, known = _named_command(options.move_global_flags(arguments))
    # Of the commands at top level there are too many for a line.
    nouns = f"; there are {', '.join(known)}" if path and text.startswith("No such command") else ""
    command = " ".join([name, *path])
    return f"{text[:1].lower()}{text[1:]}{nouns}; see `{command} --help`".replace("?;", "?")


def _with_whole_flag(error: typer.TyperException, arguments: list[str]) -> str:
    """The parser takes `-foo` for `-f -o -o`, and names the first letter that is no flag."""
    text, letter = error.format_message(), getattr(error, "option_name", "")
    if len(letter) != 2 or not text.startswith("No such option"):
        return text
    words = (word for word in arguments if word[:1] == "-" != word[1:2])
    whole = next((word for word in words if letter[1] in word), letter)
    has_long = f"-{whole}".partition("=")[0] in _flags(getattr(error, "ctx", None))
    return f"No such option: {whole}" + (f" (did you mean -{whole}?)" if has_long else "")


def _flags(context: typer.Context | None) -> set[str]:
    params = [] if context is None else context.command.params
    return {flag for param in params for flag in param.opts}


def _named_command(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The command that the arguments begin with, and the commands below it."""
    command: Any = app.build_app()
    path: list[str] = []
    for word in arguments:
        if (below := getattr(command, "commands", {}).get(word)) is not None:
            command = below
            path.append(word)
        elif not word.startswith("-"):
            break
    below = getattr(command, "commands", {})
    return path, [word for word, one in below.items() if not one.hidden]


def _trace(state: app.GlobalFlags) -> None:
    if state.debug:
        print(tables.sanitize_lines(traceback.format_exc()), end="", file=sys.stderr)


def _unexpected(error: Exception, state: app.GlobalFlags) -> int:
    if isinstance(error, OSError) and error.errno in _WRITE_ERRORS:
        return _lost(error)
    _trace(state)
    text = f"unexpected: {type(error).__name__}: {error}; {_REPORT}"
    return _fail(text, ExitCode.UNEXPECTED)


def _lost(loss: OSError, code: int = ExitCode.OK) -> int:
    """The exit code if output is lost; a reader who has closed the pipe (`| head`) is no failure."""
    # The rest goes nowhere: what is still in a buffer would fail again when the process ends.
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    if code or loss.errno == errno.EPIPE:
        return code
    return _fail(f"the output could not be written: {loss.strerror or loss}", ExitCode.UNEXPECTED)


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
