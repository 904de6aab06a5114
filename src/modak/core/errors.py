"""Errors that tell the next step.

Every failure a user can meet is a `ModakError`: a stable code, what happened, what to do, and whether trying again
can help. The daemon retries by the field `retryable`, never by matching text; the CLI prints message and hint.
"""

from __future__ import annotations


class ModakError(Exception):
    """A failure with a stable code, a message for people and a hint on what to do next."""

    exit_code = 1

    def __init__(self, code: str, message: str, *, hint: str = "", retryable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.retryable = retryable

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (Spark tasks); keyword-only arguments need help to be pickled.
        return (_rebuild, (type(self), self.code, self.message, self.hint, self.retryable))


def _rebuild(kind: type[ModakError], code: str, message: str, hint: str, retryable: bool) -> ModakError:
    error = kind.__new__(kind)
    ModakError.__init__(error, code, message, hint=hint, retryable=retryable)
    return error


class UsageError(ModakError):
    """The command was called wrongly; nothing was done."""

    exit_code = 2


class Refused(ModakError):
    """A precondition does not hold; nothing was done."""


class Conflict(ModakError):
    """Somebody else changed what this step was based on; prepare again from the new state."""

    def __init__(self, code: str, message: str, *, hint: str = "", retryable: bool = True) -> None:
        super().__init__(code, message, hint=hint, retryable=retryable)


class NotLeader(ModakError):
    """This process does not hold the lease (any more); nothing was changed."""
