"""A second assembler for Triton's kernels, and a comparison of test results under both.

    python -m titans_pt.benchmarks.assemblers               prints its path; both paths and versions go to stderr
    python -m titans_pt.benchmarks.assemblers LOG LOG       compares two logs of pytest -v; exit code 1 if they differ

A kernel can be right under one version and wrong under another: see kernels/assembler.py.
"""

import os
import re
import sys
from pathlib import Path

from titans_pt.kernels.assembler import choose, installed, version


def second(used: str, others: list[str]) -> str | None:
    """The newest of ``others`` with another version than ``used``, the assembler in use; None if there is none."""
    there = [path for path in others if os.access(path, os.X_OK) and version(path) not in ((), version(used))]
    return max(there, key=version, default=None)


def verdicts(log: str) -> dict[str, str]:
    """Test -> PASSED, FAILED or ERROR, from the lines of pytest -v, with or without workers."""
    before = re.findall(r"^(tests/\S.*?) (PASSED|FAILED|ERROR)(?: +\[ *\d+%\])?$", log, re.M)
    after = re.findall(r"^\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR) (tests/.*?) *$", log, re.M)
    return dict(before) | {test: verdict for verdict, test in after}


def differences(one: str, other: str) -> tuple[list[str], int]:
    """Lines about the tests that ended differently in two logs, and the number of tests in both."""
    first, then = verdicts(one), verdicts(other)
    both = [test for test in then if test in first]
    return [f"{first[t]} -> {then[t]}: {t}" for t in both if first[t] != then[t]], len(both)


def main(words: list[str]) -> int:
    if words:
        found, both = differences(*(Path(word).read_text() for word in words))
        print("\n".join(found) or f"{both} tests end alike under both assemblers")
        return bool(found) or not both
    from triton.backends.nvidia.compiler import get_ptxas

    choose()
    used = get_ptxas(90).path
    given = os.environ.get("TITANS_PTXAS")
    chosen = second(used, [given] if given else installed(used))
    if chosen is None:
        print(f"no second assembler beside {used} {version(used)}: TITANS_PTXAS names one", file=sys.stderr)
        return 1
    print(f"first: {used} {version(used)}\nsecond: {chosen} {version(chosen)}", file=sys.stderr)
    print(chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
