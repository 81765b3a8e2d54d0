"""Locks among processes that share a folder.

They are the kernel's locks (flock). A lock ends when all processes that hold its descriptor end, in whatever way. It
also works between nodes on file systems that forward it, such as NFS and Lustre. A child process that inherits the
descriptor also holds the lock.
"""

import contextlib
import errno
import fcntl
import logging
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from titans_pt.errors import UserError
from titans_pt.tools.files import naming

log = logging.getLogger(__name__)
# EBADF: NFS locks only files that are open for writing, which a folder cannot be.
_NONE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)


def take(descriptor: int, path: Path, without: str, shared: bool = False) -> bool:
    """Locks the open file or folder ``path`` without waiting; returns False if another process holds the lock.

    Args:
        without: advice in the warning if the file system has no locks, e.g. "start one process only"; the lock then
            counts as taken.
        shared: take a shared lock, which several processes may hold at once.
    """
    try:
        with naming(path):
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NONE:
            raise
        log.warning("%s: its file system has no locks (%s); %s", path, error.strerror, without)
    return True


@contextlib.contextmanager
def folder_locked(folder: Path, setting: str, command: str, shared: bool = False) -> Iterator[None]:
    """Locks an existing folder for one process, or with ``shared`` for all that share it. It gets no file for this.

    Args:
        setting: the setting or option that names the folder, and ``command`` what writes there, for messages.

    Raises:
        UserError: another process holds the lock.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not take(handle, folder, f"a second {command} there would not be noticed", shared):
            raise UserError(f"{setting}: another {command} is at work in {folder}; wait for it, or name another folder")
        yield
    finally:
        os.close(handle)


def sign(file: TextIO):
    """Writes into a locked file which process holds the lock, for other processes to read, also on other nodes.

    The lock does not depend on this text: on a full disk it is missing, and ``titans checkpoint prune`` can free space.
    """
    text = f"process {os.getpid()} on {platform.node()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
    handle = file.fileno()  # not by way of the file's buffer, which would be written again when it is closed
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.write(handle, text.encode())
        os.fsync(handle)  # NFS sends the text of an open file to its server half a minute later
