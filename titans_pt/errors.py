"""The one exception that a user can cause, and its exit code."""

EXIT_USER = 2


class UserError(Exception):
    """Something a user did or must decide: shown as one line, without a traceback, exit code 2.

    The message names the setting or the file, what was given, what is allowed, and the remedy.
    Everything else that is raised is a fault of ours and keeps its traceback.
    """
