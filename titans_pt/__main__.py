"""``python -m titans_pt`` and the ``titans`` command."""

import getpass
import io
import os
import sys
from pathlib import Path

from titans_pt.errors import EXIT_USER
from titans_pt.tools.interrupts import quiet_imports
from titans_pt.tools.stacks import stacks_to


def usable_streams() -> None:
    """Replaces standard streams that a shell has closed by /dev/null, and lets standard output take any text.

    The next opened file would get a closed stream's descriptor, and messages could go into a checkpoint.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - until the end
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")  # few encodings have all characters


def usable_home() -> None:
    """Gives a user without an entry in passwd (a container's --user) a home and a name, which libraries ask for."""
    try:
        Path.home()
    except RuntimeError:
        import tempfile

        home = Path(tempfile.gettempdir()) / f"titans-{os.getuid()}"
        home.mkdir(mode=0o700, exist_ok=True)
        if home.stat().st_uid != os.getuid():  # not ours: libraries load code from their caches
            home = Path(tempfile.mkdtemp(prefix="titans-"))
        os.environ["HOME"] = str(home)
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = str(os.getuid())


def main() -> None:
    quiet_imports()
    # Without this, pydantic reads the metadata of every installed package in search of plugins; our settings need none.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    usable_streams()
    usable_home()
    stacks_to()
    try:
        from titans_pt.cli import run  # not at the top: the command line needs click, which may not be installed
    except ModuleNotFoundError as error:
        from titans_pt.tools.extras import missing

        # titans demo needs only the smaller extra.
        extra = "demo" if sys.argv[1:2] == ["demo"] else "train"
        if (told := missing(error, "the program titans", [extra])) is None:
            raise
        print(f"titans: error: {told}", file=sys.stderr)
        sys.exit(EXIT_USER)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
