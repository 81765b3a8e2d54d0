"""``python -m titans_pt`` and the ``titans`` command."""

import sys

from titans_pt.cli import run


def main() -> None:
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
