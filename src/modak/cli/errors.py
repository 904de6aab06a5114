"""The one place where a failure becomes lines on stderr and an exit code.

0 is success, 1 a failure, 2 a wrong call. People get `error:` and `hint:`; a traceback only with `--debug`. Nothing
here prints a password: messages of ours never hold one, and those of others go through the same mask as the logs.
"""

from __future__ import annotations

import sys
import traceback

import typer

from modak.core.errors import ModakError

_debug = False


def set_debug(on: bool) -> None:
    """Show tracebacks from now on (`--debug`)."""
    global _debug
    _debug = on


def debugging() -> bool:
    """Whether `--debug` was given."""
    return _debug


def report(error: BaseException) -> int:
    """Tell what went wrong and return the exit code."""
    from modak.cli.masking import mask
    from modak.cli.output import note, paint

    message, hint, code = _explain(error)
    if _debug:
        note(mask("".join(traceback.format_exception(error))).rstrip())
    note(f"{paint('error:', 'red', sys.stderr)} {mask(message)}")
    if hint:
        note(f"{paint('hint:', 'cyan', sys.stderr)} {mask(hint)}")
    return code


def _explain(error: BaseException) -> tuple[str, str, int]:
    error = _translated(error)
    if isinstance(error, ModakError):
        return error.message, error.hint, error.exit_code
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        path = getattr(context, "command_path", "modak-worker")
        return error.format_message(), f"See {path} --help.", error.exit_code
    kind = type(error).__name__
    text = str(error).strip()
    hint = "This is a fault in Modak. Run it again with --debug before the command to see where it happened."
    return f"{kind}: {text}" if text else kind, "" if _debug else hint, 1


def _translated(error: BaseException) -> BaseException:
    psycopg = sys.modules.get("psycopg")
    if psycopg is not None and isinstance(error, psycopg.Error):
        from modak.postgres.connect import translate

        return translate(error)
    return error
