"""torchrun as a cluster needs it: ``python -m titans_pt.training.launcher CONFIG [KEY=VALUE ...]`` trains on one node.

launch/torchrun.sh lists the environment variables that it reads. It differs from PyTorch's torchrun in four ways:

- It does not restart a process that ended on purpose: after an error that the user has to fix (status 2), or after a
  requested stop (128 + the signal). torchrun would repeat both, ``max_restarts`` times.
- A new checkpoint gives it all its restarts back. torchrun counts them over the whole run, which in weeks uses them up.
- After a signal that asks for a stop (signals.py) the processes have GRACE seconds for their last checkpoint; torchrun
  kills them after 30.
- It exits with the status of the process that ended first, without a traceback.
"""

import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

from titans_pt.tools.interrupts import quiet_imports

if __name__ == "__main__":
    quiet_imports()  # before torch is imported

import torch
from torch.distributed import TCPStore, run
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api

from titans_pt.errors import EXIT_USER, UserError
from titans_pt.tools.processes import check_alone, made_progress, number
from titans_pt.tools.screen import say
from titans_pt.training.background import within
from titans_pt.training.signals import STOPS, hangs_up

GRACE = 300
"""Default of TITANS_GRACE, in seconds."""
FINAL = (EXIT_USER, *(128 + number for number in STOPS))
"""Exit statuses of processes that are not started again."""
MEETING = 10.0
"""Seconds within which a running store must answer, and must know the job of the node that created it."""


class Agent(LocalElasticAgent):
    """Agent that starts a node's processes and watches them. torch 2.11 to 2.13 call these methods."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._allowed = self._remaining_restarts
        signal.signal(signal.SIGUSR2, self._pass_on)  # processes write their stacks; unhandled, it would end the agent

    def _monitor_workers(self, worker_group):
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            spec = worker_group.spec
            if _cause(result.failures)[1].exitcode in FINAL:
                self._remaining_restarts = 0
            elif self._pcontext and any(map(made_progress, self._pcontext.error_files.values())):
                used = spec.max_restarts - self._remaining_restarts  # the number of restarts, which torch shows
                self._remaining_restarts, spec.max_restarts = self._allowed, self._allowed + used
        return result

    def _shutdown(self, death_sig: signal.Signals | None = None, timeout: float = 30):
        """Ends the processes; ``death_sig`` is set only if the agent itself received a signal."""
        if death_sig is not None and self._pcontext:
            for each in STOPS:  # pass a second Ctrl-C on to the workers
                if each != signal.SIGHUP or hangs_up():
                    signal.signal(each, self._pass_on)
            self._pcontext.close(death_sig, grace(os.environ))
        super()._shutdown()

    def _pass_on(self, number: int, _frame):
        for process in self._pcontext.pids().values() if self._pcontext else ():
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue


def _cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """(rank, failure) of the process that failed first; the others lost a peer, or the agent ended them."""
    # Times are whole seconds. Within the same second, a process that ended on purpose counts as the first.
    return min(failures.items(), key=lambda item: (item[1].timestamp, item[1].exitcode not in FINAL))


def grace(environment: Mapping[str, str]) -> int:
    """Seconds between SIGTERM and SIGKILL."""
    return _number(environment, "TITANS_GRACE", GRACE)


def options(environment: Mapping[str, str], program: Sequence[str] = ()) -> list[str]:
    """torchrun's options.

    Args:
        program: the command that runs on all nodes; its words distinguish jobs that have no name.

    Raises:
        UserError: a variable is missing or not a number; no GPU, and no number of processes.
    """
    processes = _number(environment, "TITANS_PROCESSES", torch.cuda.device_count(), least=1)
    if not processes:
        raise UserError("TITANS_PROCESSES is not set, and this machine has no GPU; set it to the number of processes "
                        "per node")  # fmt: skip
    found = ["--nproc_per_node", str(processes), "--max_restarts", str(_number(environment, "TITANS_RESTARTS", 3))]
    # Under nohup not SIGHUP: torchrun's own handler would end the processes that nohup protects.
    heard = [each.name for each in (*STOPS, signal.SIGQUIT) if each != signal.SIGHUP or hangs_up()]
    found += ["--signals_to_handle", ",".join(heard)]
    nodes = _number(environment, "TITANS_NODES", 1, least=1)
    if nodes == 1:
        return [*found, "--nnodes", "1", "--standalone"]
    master = environment.get("TITANS_MASTER", "")
    if not master:
        raise UserError(f"TITANS_NODES={nodes}: several nodes need TITANS_MASTER=host:port, the same on each")
    address(master)
    found += ["--nnodes", str(nodes), "--rdzv_backend", "c10d", "--rdzv_id", _job(environment, program)]
    found += ["--rdzv_endpoint", master]
    host = environment.get("TITANS_HOST", "")
    if host not in ("", "0", "1"):
        raise UserError(
            f"TITANS_HOST: given {host!r}; must be 1 on the node that TITANS_MASTER names and 0 on the others"
        )
    if host:
        found += ["--rdzv_conf", f"is_host={host}"]
    if own := environment.get("TITANS_ADDRESS"):
        found += ["--local_addr", own]
    return found


def address(master: str) -> tuple[str, int]:
    """
    Raises:
        UserError: ``master``, the value of TITANS_MASTER, is not host:port.
    """
    host, _, port = master.rpartition(":")
    if not host or not 0 < (number(port) or 0) < 65536:
        raise UserError(f"TITANS_MASTER: given {master!r}; must be host:port, of one of the nodes, e.g. node1:29500")
    return host.strip("[]"), int(port)


def check_master(environment: Mapping[str, str], program: Sequence[str]):
    """Refuses a port on which another job, or another program, listens: torchrun would wait there for ten minutes.

    Raises:
        UserError: the port is taken. Jobs that share a port on purpose have names (TITANS_JOB).
    """
    master = environment["TITANS_MASTER"]
    host, port = address(master)
    try:
        socket.create_connection((host, port), timeout=MEETING).close()
    except OSError:
        return  # nothing listens there yet
    job, nodes = _job(environment, program), _number(environment, "TITANS_NODES", 1)
    key, end = f"torch.rendezvous.{job}", time.monotonic() + MEETING
    answer = timedelta(seconds=MEETING)
    try:  # torch would wait forever for a program that says nothing
        store = within(MEETING, lambda: TCPStore(host, port, is_master=False, timeout=answer))
    except (RuntimeError, TimeoutError):
        raise UserError(
            f"TITANS_MASTER={master}: another program listens on this port; choose a free port of {host}"
        ) from None
    if environment.get("TITANS_JOB"):
        return
    while not store.check([key]):  # the job's first node may have created the store but not yet entered its key
        if time.monotonic() > end:
            raise UserError(
                f"TITANS_MASTER={master}: another job uses this port, or the nodes of this job were started with "
                f"different words: give each job on {host} a port of its own, and each of its {nodes} nodes the same "
                "words"
            )
        time.sleep(0.5)


def _job(environment: Mapping[str, str], program: Sequence[str]) -> str:
    """Name that tells this job from others on the same port."""
    words = "\0".join(program).encode()
    return environment.get("TITANS_JOB") or f"titans-{hashlib.sha256(words).hexdigest()[:12]}"


def _number(environment: Mapping[str, str], name: str, default: int, least: int = 0) -> int:
    text = environment.get(name)
    if not text:
        return default
    if (value := number(text)) is None or value < least:
        raise UserError(f"{name}: given {text!r}; must be a whole number of at least {least}")
    return value


def launch(program: Sequence[str]) -> int:
    """Runs ``program`` on this node: a script, or "-m" and a module, with its arguments. Returns the exit status."""
    # Every start of the processes gets its own store: in a shared store, restarted processes find the addresses of
    # killed ones and never connect (torch 2.13 with gloo).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    signal.signal(signal.SIGUSR2, lambda *_: None)  # until there are processes to pass it on to
    api.LocalElasticAgent = Agent  # type: ignore[misc]  # torch has no other place for an agent of one's own
    try:
        grace(os.environ)  # report a wrong value now rather than at a stop
        words = options(os.environ, program)
        nodes = _number(os.environ, "TITANS_NODES", 1)
        check_alone("Start one on each node: sbatch --nodes N launch/slurm_train.sh CONFIG does that", allowed=nodes)
        if nodes > 1:
            check_master(os.environ, program)
        run.run(run.parse_args([*words, *program]))
    except UserError as error:
        return _fail(str(error), EXIT_USER)
    except KeyboardInterrupt:  # before there are processes, which this node starts once it has met the others
        return _fail("interrupted", 128 + signal.SIGINT)
    except SignalException as stop:
        return 128 + stop.sigval
    except ChildFailedError as error:
        rank, failure = _cause(error.failures)
        if failure.exitcode in FINAL:
            return failure.exitcode
        killed = failure.exitcode < 0
        what = f"was killed by {signal.Signals(-failure.exitcode).name}" if killed else "failed"
        message = f"rank {rank} {what}, and no restart is left (TITANS_RESTARTS); the same command continues from the "
        return _fail(message + "newest checkpoint", 128 - failure.exitcode if killed else failure.exitcode)
    except RendezvousError as error:
        why = error.__cause__ or error
        return _fail(f"the nodes of this job do not meet (any more): {why}; the others' messages say why", 1)
    return 0


def _fail(message: str, status: int) -> int:
    say(f"titans: error: {' '.join(message.split())}", sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(launch(["-m", "titans_pt", "train", *sys.argv[1:]]))
