"""Locks among processes that share a folder.

They are the kernel's (flock): one ends with the processes that hold its descriptor, however they end, and holds between
nodes where the file system passes it on, as NFS and Lustre do. A child that inherits the descriptor also holds it.
"""

import errno
import fcntl
import logging
import os
import platform
import time
from pathlib import Path
from typing import TextIO

log = logging.getLogger(__name__)
# EBADF: NFS locks only what is open for writing, which a folder cannot be.
_NONE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)


def take(descriptor: int, path: Path, without: str, shared: bool = False) -> bool:
    """Locks the open file or folder ``path`` without waiting; False where another process holds it.

    Args:
        without: what a warning says where the file system has no locks, e.g. "start one process only"; the lock then
            counts as taken.
        shared: several processes may hold it that all take it so.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NONE:
            raise
        log.warning("%s: its file system has no locks (%s); %s", path, error.strerror, without)
    return True


def sign(file: TextIO):
    """Writes into a locked file which process holds it, for the message of one that does not get it."""
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
