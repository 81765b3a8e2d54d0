"""torchrun for tests: forks the ranks after the imports, which take longer than most trainings of the tests.

python -m tests.helpers.forked FD reads jobs from stdin, runs them one after the other and writes a line with the
status of each to the descriptor FD. A job is a line of JSON: {"ranks": N, "program": a module or FILE.py, "words": its
arguments, "out" and "err": files}.
"""

import json
import os
import runpy
import signal
import socket
import sys

# Modules that every rank imports sooner or later.
import deepspeed.ops.op_builder.all_ops  # noqa: F401
import deepspeed.runtime.engine  # noqa: F401
import matplotlib.figure  # noqa: F401
import torch._dynamo  # noqa: F401

import titans_pt.training.loop  # noqa: F401


def main(ranks: int, program: str, *words: str) -> int:
    """Run ``program`` in ``ranks`` processes and return a status; if one fails, the others are killed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    running = set()
    for rank in range(ranks):
        if not (process := os.fork()):
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            os.environ.update({name: str(value) for name, value in numbers.items()})
            os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
            sys.argv[:] = [program, *words]
            (runpy.run_path if program.endswith(".py") else runpy.run_module)(program, run_name="__main__")
            return 0
        running.add(process)
    failed = False
    while running:
        process, status = os.wait()
        running.remove(process)
        if status and not failed:
            failed = True
            for other in running:
                os.kill(other, signal.SIGKILL)
    return int(failed)


def serve(descriptor: int) -> int:
    for line in sys.stdin:
        job = json.loads(line)
        if not (process := os.fork()):
            for name, stream in (("out", 1), ("err", 2)):
                os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT), stream)
            return main(job["ranks"], job["program"], *job["words"])
        os.write(descriptor, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    return 0


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1])))
