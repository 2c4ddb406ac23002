"""What a user can be told: one sentence naming what was expected, what was found, where, and the remedy.

Every error that a command reports is an `EyasError`; the command line prints `eyas: <message>` and leaves with its
exit code. Anything else that reaches the top is a bug and keeps its traceback.
"""


class EyasError(Exception):
    """A failure with a message for the user (exit code 1)."""

    exit_code = 1


class BadInput(EyasError):
    """Input that cannot be read as what it should be: a malformed line, an impossible value (exit code 2)."""

    exit_code = 2


class Mismatch(EyasError):
    """Two artifacts that do not belong together: another target, tokenizer, template, taps or map (exit code 3)."""

    exit_code = 3


class OutOfMemory(EyasError):
    """An allocation failed: the message says in what, and which setting makes it less (exit code 1)."""
