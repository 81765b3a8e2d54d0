"""The exceptions that a user can cause, and their exit code."""

EXIT_USER = 2


class UserError(Exception):
    """Something a user did or must decide: shown as one line, without a traceback, exit code 2.

    The message names the setting or the file, what was given, what is allowed, and the remedy.
    Everything else that is raised is a fault of ours and keeps its traceback.
    """


class Diverged(UserError):
    """A training ended because too many steps in a row had a loss or gradient that is not finite."""


class Unreachable(UserError):
    """Something on the network cannot be reached now; what is known of it from before may do."""
