"""The user's cache folder, for compiled kernels and data from packages."""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache folder for titans-pt, which may not exist yet: ``~/.cache/titans-pt`` on Linux.

    Raises:
        RuntimeError: the user has no home.
    """
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/titans-pt"
    given = os.environ.get("XDG_CACHE_HOME", "").strip()
    return Path(given).expanduser() / "titans-pt" if given else Path.home() / ".cache/titans-pt"
