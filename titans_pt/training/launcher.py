"""torchrun as a cluster needs it: ``python -m titans_pt.training.launcher CONFIG [KEY=VALUE ...]`` trains on one node.

What it takes from the environment says launch/torchrun.sh. It is PyTorch's torchrun but for three things:

- A process that ended on purpose is not started again: after an error that the user has to fix (status 2), and after a
  stop that was asked for (128 + the signal). torchrun would repeat both, ``max_restarts`` times.
- After SIGTERM or SIGINT the processes have GRACE seconds for their last checkpoint; torchrun kills them after 30.
- Its exit status is that of the process that ended first, without a traceback.
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence

import torch
from torch.distributed import run
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api

from titans_pt.errors import EXIT_USER, UserError

GRACE = 300
"""Seconds, where GRACE is not set."""
FINAL = (EXIT_USER, 128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit statuses of processes that are not started again."""


class Agent(LocalElasticAgent):
    """What starts a node's processes and watches them. torch 2.11 to 2.13 call these two methods."""

    def _monitor_workers(self, worker_group):
        result = super()._monitor_workers(worker_group)
        if result.is_failed() and _cause(result.failures)[1].exitcode in FINAL:
            self._remaining_restarts = 0
        return result

    def _shutdown(self, death_sig: signal.Signals | None = None, timeout: float = 30):
        """Ends the processes; a signal is named only when the agent itself was sent one."""
        if death_sig is not None and self._pcontext:
            for number in (signal.SIGINT, signal.SIGTERM):  # a second Ctrl-C is for them, too
                signal.signal(number, self._pass_on)
            self._pcontext.close(death_sig, grace(os.environ))
        super()._shutdown()

    def _pass_on(self, number: int, _frame):
        for process in self._pcontext.pids().values():
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue


def _cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """(rank, failure) of the first of them; the others lost a peer, or were ended by the agent then."""
    # Times are whole seconds. Within one, a process that ended on purpose was first.
    return min(failures.items(), key=lambda item: (item[1].timestamp, item[1].exitcode not in FINAL))


def grace(environment: Mapping[str, str]) -> int:
    """Seconds between SIGTERM and SIGKILL."""
    return _number(environment, "GRACE", GRACE)


def options(environment: Mapping[str, str]) -> list[str]:
    """torchrun's options.

    Raises:
        UserError: a variable is missing or not a number; no GPU, and no number of processes.
    """
    processes = _number(environment, "PROCESSES", torch.cuda.device_count())
    if not processes:
        raise UserError("PROCESSES is not set, and this machine has no GPU; set it to the number of processes per node")
    found = ["--nproc_per_node", str(processes), "--max_restarts", str(_number(environment, "RESTARTS", 3))]
    nodes = _number(environment, "NODES", 1)
    if nodes == 1:
        return [*found, "--standalone"]
    if not (master := environment.get("MASTER")):
        raise UserError(f"NODES={nodes}: several nodes need MASTER=host:port, the same on each")
    found += ["--nnodes", str(nodes), "--rdzv_backend", "c10d", "--rdzv_id", environment.get("JOB", "titans")]
    found += ["--rdzv_endpoint", master]
    if host := environment.get("HOST"):
        found += ["--rdzv_conf", f"is_host={host}"]
    if address := environment.get("ADDRESS"):
        found += ["--local_addr", address]
    return found


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal():
        raise UserError(f"{name}: given {text!r}; must be a whole number")
    return int(text)


def launch(program: Sequence[str]) -> int:
    """Runs ``program``, a script or "-m" and a module with its words, on a node; returns the exit status."""
    # A separate store for every start of the processes: in a shared one, restarted processes find the addresses of
    # those that were killed, and never meet (torch 2.13 with gloo).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    api.LocalElasticAgent = Agent
    try:
        grace(os.environ)  # its errors now rather than at a stop
        run.run(run.parse_args([*options(os.environ), *program]))
    except UserError as error:
        return _fail(str(error), EXIT_USER)
    except SignalException as stop:
        return 128 + stop.sigval
    except ChildFailedError as error:
        rank, failure = _cause(error.failures)
        if failure.exitcode in FINAL:
            return failure.exitcode
        killed = failure.exitcode < 0
        what = f"was killed by {signal.Signals(-failure.exitcode).name}" if killed else "failed"
        message = f"rank {rank} {what}, and no restart is left (RESTARTS); the same command continues from the newest "
        return _fail(message + "checkpoint", 128 - failure.exitcode if killed else failure.exitcode)
    except RendezvousError as error:
        return _fail(f"the nodes of this job do not meet (any more): {error}; the others' messages say why", 1)
    return 0


def _fail(message: str, status: int) -> int:
    print(f"titans: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(launch(["-m", "titans_pt", "train", *sys.argv[1:]]))
