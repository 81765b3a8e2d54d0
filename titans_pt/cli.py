"""The command line: the program, its exit codes, and how it reports errors. The commands are in titans_pt/commands/."""

import errno
import os
import re
import select
import signal
import sys
import time

import click

from titans_pt import __version__
from titans_pt.commands import COMPLETION, SECTIONS, SUBJECT, Commands
from titans_pt.errors import EXIT_USER, UserError
from titans_pt.tools.extras import missing
from titans_pt.tools.files import DISK_FAILED
from titans_pt.tools.processes import place
from titans_pt.tools.screen import drop, say

_MEMORY = (
    "set train.activation_checkpointing=true, lower train.micro_batch or data.seq_len, "
    "or shard more with parallel.zero_stage=3"
)
_OS_REMEDIES = {
    errno.ENOSPC: ("free some space", "a place on another disk"),
    errno.EDQUOT: ("free some of your quota", "a place on another disk"),
    errno.EACCES: ("change its permissions", "a place where you may write"),
    errno.EROFS: ("its disk can only be read", "a place on one that can be written to"),
    errno.EISDIR: ("a file belongs there: move the folder away", "another place"),
    errno.ENOTDIR: ("a part of the path is a file", "another place"),
    errno.EEXIST: ("a file, or a link to a folder that does not exist here, has this name: move it", "another place"),
    errno.EFBIG: ("raise the limit of a file's size (ulimit -f)", "a place on a disk that takes larger files"),
    errno.ENAMETOOLONG: ("its name is too long", "a shorter one"),
    errno.ELOOP: ("its links lead in a circle", "another place"),
    errno.EMFILE: ("raise the limit of open files (ulimit -n)", ""),
}
"""(remedy or cause, new value for the setting in the command's WRITES)."""
_CPU_OUT_OF_MEMORY = r"can't allocate memory|not enough memory"
_LOST_PEER = r"connection (closed|reset|refused)|broken pipe|socket closed|remote process exited|ncclRemoteError"


class _Program(click.Group):
    """The group of commands; ``--help`` lists them under the headings of :data:`titans_pt.commands.SECTIONS`."""

    commands: Commands  # type: ignore[assignment]  # click only reads it

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter):
        for section in SECTIONS:
            names = [name for name in self.commands if self.commands.section(name) == section]
            with formatter.section(section):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(limit=100)) for name in names])


@click.group(
    "titans", cls=_Program, commands=Commands(), no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120, "show_default": True},
)  # fmt: skip
@click.version_option(__version__, message="titans %(version)s")
def program():
    """Pretrain and study Titans language models."""


def run(arguments: list[str]) -> int:
    """Runs a command line (without the program's name) and returns its exit status; errors go to stderr.

    0: done. 1: a bug of ours (with a traceback). 2: an error that the user can fix, in one line.
    128 + n: stopped by signal n, after a checkpoint; n = SIGPIPE: the reader of the output has closed.
    """
    if instruction := os.environ.get(COMPLETION):
        from click.shell_completion import shell_complete

        return shell_complete(program, {}, "titans", COMPLETION, instruction)
    meta = {}
    try:
        with program.make_context("titans", list(arguments)) as context:
            meta = context.meta
            status = program.invoke(context) or 0
            sys.stdout.flush()
            return status
    except click.exceptions.Exit as done:  # --help, --version
        return done.exit_code
    except click.UsageError as error:
        help = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
        return _fail(error.format_message().rstrip(".") + help)
    except UserError as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        command = context.invoked_subcommand
        told = missing(error, f"titans {command}", ["demo" if command == "demo" else "train"])
        if told is None:
            raise
        return _fail(str(told))
    except BrokenPipeError:
        if not _unread():
            raise
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename and error.errno in DISK_FAILED:
            return _fail(f"{error.filename}: {os.strerror(error.errno)}; its disk, or the server that has it, failed; "
                         "the same command continues once it answers", 1)  # fmt: skip
        if error.errno not in _OS_REMEDIES:
            raise
        where = error.filename or meta.get(SUBJECT, "titans")
        remedy, place = _OS_REMEDIES[error.errno]
        writes = program.commands.writes(context.invoked_subcommand)
        other = f", or set {writes} to {place}" if writes and place else ""
        return _fail(f"{where}: {os.strerror(error.errno)}; {remedy}{other}")
    except MemoryError:
        return _fail(f"out of memory (CPU): {_MEMORY}")
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except RuntimeError as error:
        return _runtime_error(error)


def _unread() -> bool:
    """Whether the reader of our output has closed, as in ``titans plan CONFIG | head -1``; drops remaining output."""
    output = select.poll()
    streams = {stream.fileno(): stream for stream in (sys.stdout, sys.stderr)}
    for number in streams:
        output.register(number, 0)
    gone = [streams[number] for number, event in output.poll(0) if event & select.POLLERR]
    for stream in gone:
        drop(stream)  # else Python complains again at exit
    return bool(gone)  # False: another pipe broke


def _runtime_error(error: RuntimeError) -> int:
    """Reports out of memory or a lost peer in one line; raises any other error again."""
    import torch

    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return _fail(f"out of memory ({text.split('. ')[0]}): {_MEMORY}")
    if re.search(_CPU_OUT_OF_MEMORY, text, re.IGNORECASE):
        return _fail(f"out of memory (CPU): {_MEMORY}")
    if place(strict=False).size > 1 and re.search(_LOST_PEER, text, re.IGNORECASE):
        return _fail("another process of this run has stopped; its own message says why", 1, patience=15.0)
    if "EADDRINUSE" in text:
        return _fail("another program took the port that torchrun chose for this start (address already in use); its "
                     "next start chooses another", 1)  # fmt: skip
    raise error


def _fail(message: str, status: int = EXIT_USER, patience: float = 10.0) -> int:
    """Prints ``message`` as one line. Under torchrun, ranks other than 0 wait ``patience`` seconds first.

    Most errors hit all ranks, and torchrun stops the other ranks as soon as one has failed. The line then appears only
    once, and an error of a single rank still appears.
    """
    if rank := place(strict=False).rank:
        time.sleep(patience + min(0.3 * rank, 5.0))
    say(f"titans: error: {' '.join(message.split())}", sys.stderr)
    return status
