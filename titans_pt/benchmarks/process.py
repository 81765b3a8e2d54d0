"""What Linux says of this process."""

from pathlib import Path


def memory_mib(field: str) -> float:
    """A line of the process's account in MiB: VmRSS, resident now; VmHWM, the most so far.

    (getrusage's ru_maxrss would start at the parent's peak.)
    """
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field)) / 1024
