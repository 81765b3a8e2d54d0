"""``python -m titans_pt`` and the ``titans`` command."""

import os
import sys

from titans_pt.cli import run


def main() -> None:
    # Without this, pydantic reads the metadata of every installed package in search of plugins; our settings need none.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
