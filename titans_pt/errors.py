"""Exceptions that a user can cause, and their exit code."""

EXIT_USER = 2


class UserError(Exception):
    """An error that a user caused or must decide about: shown as one line, without a traceback, exit code 2.

    The message names the setting or file, the given value, the allowed values and the remedy. All other exceptions are
    bugs of ours and keep their traceback.
    """


class Diverged(UserError):
    """Training ended because too many consecutive steps had a non-finite loss or gradient."""


class Busy(UserError):
    """Another process is at work on what this one would write."""


class Unreachable(UserError):
    """A network resource cannot be reached now; earlier knowledge of it may suffice."""
