"""Claims on work among processes that share a folder."""

import errno
import fcntl
import logging
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


@contextmanager
def claim(path: Path) -> Iterator[int | None]:
    """Locks ``path`` for this process and yields the file's descriptor, or None where another process holds it.

    The lock is the kernel's (flock): it ends with the processes that hold the descriptor, however they end, and holds
    between nodes if the file system supports it. A child that inherits the descriptor also holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            log.warning("%s: its file system has no locks (%s); start one process only", path, error.strerror)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        file.flush()
        yield file.fileno()
