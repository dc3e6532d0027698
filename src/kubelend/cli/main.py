"""The entry of `kubelend` and `kubectl lend`: errors become one line and an exit code, here only."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import typer

from kubelend.cli import completion, escapes, exits, options, output, streams, tree
from kubelend.cli.exits import Code
from kubelend.core.errors import KubelendError


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and end the process."""
    streams.install()
    code = run(sys.argv[1:] if arguments is None else list(arguments), program(sys.argv[0]))
    try:
        streams.finish()
    except streams.Lost as loss:
        code = code or _lost(loss)
    sys.exit(code)


def run(arguments: list[str], name: str = "kubelend") -> int:
    """Run one command; gives its exit code."""
    state = tree.State()
    completion.prepare()
    try:
        code = tree.build().main(
            args=options.plain(arguments),
            prog_name=name,
            complete_var=completion.VARIABLE,
            standalone_mode=False,
            obj=state,
        )
    except typer.TyperException as error:
        return _fail(_usage(error), Code(error.exit_code))
    except typer.Abort:
        return Code.INTERRUPTED
    except KubelendError as error:
        _trace(state)
        return _fail(str(error), exits.code_of(error))
    except streams.Lost as loss:
        return _lost(loss)
    except Exception as error:  # noqa: BLE001 - the root of the process: told, and ended
        _trace(state)
        text = f"unexpected: {type(error).__name__}: {error}; {_REPORT}"
        return _fail(text, Code.UNEXPECTED)
    return code if isinstance(code, int) else Code.OK


def program(path: str) -> str:
    """What to call ourselves: kubectl finds plugins by file name and hides the dash."""
    name = Path(path).name
    return name.replace("-", " ", 1) if name.startswith("kubectl-") else "kubelend"


_REPORT = "run it again with --debug before the command, and report what it prints"


def _usage(error: typer.TyperException) -> str:
    text = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    command = "kubelend" if context is None else context.command_path
    return f"{text[:1].lower()}{text[1:]}; see `{command} --help`"


def _trace(state: tree.State) -> None:
    if state.debug:
        print(escapes.lines(traceback.format_exc()), end="", file=sys.stderr)


def _lost(loss: streams.Lost) -> Code:
    return Code.OK if loss.is_unread else _fail(str(loss), Code.UNEXPECTED)


def _fail(text: str, code: Code) -> Code:
    output.complain(text)
    return code


if __name__ == "__main__":
    main()
