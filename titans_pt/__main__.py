"""``python -m titans_pt`` and the ``titans`` command."""

import os
import sys

from titans_pt.cli import run


def main() -> None:
    # OpenMP's threads wait for each other spinning, by default for many milliseconds: on cores that other work shares,
    # a hundred times as long as they compute. Read by GNU's OpenMP (torch's on Linux) when torch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
