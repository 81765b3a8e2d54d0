"""A SLURM cluster of two nodes on one machine, made of network namespaces. Needs root and Debian's packages.

    python -m tests.helpers.slurm_cluster [COMMAND ...]

starts the cluster, runs a command on node 1 (by default a shell), and stops the cluster. Missing packages are installed
with apt-get. Each node reports 64 CPUs and 8 GPUs, so that launch/*.sh can be submitted without changes.
Partitions: ``work``, whose jobs are preempted with ``GRACE`` seconds of grace, and ``urgent``, whose jobs preempt them.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare")
GRACE = 60
"""Seconds between a preemption's SIGTERM and its SIGKILL."""

# KillWait, SlurmdTimeout: SLURM kills processes that do not end, or gives a node up, after seconds, not minutes.
# SchedulerParameters: a queued job starts within seconds.
CONFIGURATION = """
ClusterName=titans
SlurmctldHost=node1(10.9.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=5,bf_interval=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=10
SlurmdTimeout=20
MinJobAge=3600
ReturnToService=2
GresTypes=gpu
JobCompType=jobcomp/none
NodeName=node[1-2] NodeAddr=10.9.0.[1-2] CPUs=64 RealMemory=1000000 Gres=gpu:8
PartitionName=work Nodes=node[1-2] Default=YES PriorityTier=1 GraceTime={grace}
PartitionName=urgent Nodes=node[1-2] PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """Reason why no cluster can be started here; None if all programs are installed or can be."""
    if os.geteuid():
        return "a SLURM cluster needs root, for network namespaces"
    if any(shutil.which(program) is None for program in PROGRAMS) and shutil.which("apt-get") is None:
        return "SLURM is not installed, and there is no apt-get to install it with"
    return None


def install():
    """Install SLURM and munge if they are missing, without starting them."""
    if all(shutil.which(program) for program in PROGRAMS):
        return
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for words in (["update"], ["install", "--yes", "--no-install-recommends", "iproute2", *PACKAGES]):
        subprocess.run(["apt-get", "--quiet", *words], env=environment, check=True, stdout=subprocess.DEVNULL)


class Cluster:
    """``with Cluster() as cluster``: two nodes, 1 and 2, with the controller on node 1."""

    def __init__(self):
        self._name = f"titans-slurm{os.getpid()}"
        self.folder = Path(tempfile.mkdtemp(prefix="titans-slurm-"))
        self.environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self):
        install()
        try:
            self._connect()
            self._configure()
            munge = ["munged", "--force", "--foreground", f"--key-file={self.folder}/munge.key",
                     f"--socket={self.folder}/munge.socket", f"--pid-file={self.folder}/munge.pid",
                     f"--log-file={self.folder}/munge.log", f"--seed-file={self.folder}/munge.seed"]  # fmt: skip
            self._start(1, *munge)
            self._wait("munge answers", lambda: (self.folder / "munge.socket").exists())
            self._start(1, "slurmctld", "-D")
            for node in (1, 2):
                self.bring(node)
            self.wait_for_nodes("idle", "idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        for node in (1, 2):
            self.lose(node)
            subprocess.run(["ip", "netns", "del", self._netns(node)], stderr=subprocess.DEVNULL)
            shutil.rmtree(f"/etc/netns/{self._netns(node)}", ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _netns(self, node: int) -> str:
        return f"{self._name}-{node}"

    def _connect(self):
        for node in (1, 2):
            subprocess.run(["ip", "netns", "add", self._netns(node)], check=True)
            names = Path("/etc/netns", self._netns(node))  # ip netns exec mounts these files over /etc
            names.mkdir(parents=True)
            (names / "hosts").write_text("127.0.0.1 localhost\n10.9.0.1 node1\n10.9.0.2 node2\n")
        pair = ["between", "netns", self._netns(1), "type", "veth", "peer", "name", "between", "netns", self._netns(2)]
        subprocess.run(["ip", "link", "add", *pair], check=True)
        for node in (1, 2):
            for words in (["addr", "add", f"10.9.0.{node}/24", "dev", "between"], ["link", "set", "between", "up"],
                          ["link", "set", "lo", "up"]):  # fmt: skip
                subprocess.run(["ip", "-n", self._netns(node), *words], check=True)

    def _configure(self):
        self.folder.chmod(0o755)
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(folder=self.folder, grace=GRACE))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # unused, but slurmd looks for one
        for number in range(8):
            (self.folder / f"gpu{number}").touch()
        (self.folder / "gres.conf").write_text(f"NodeName=node[1-2] Name=gpu File={self.folder}/gpu[0-7]\n")

    def command(self, node: int, *words: str) -> list[str]:
        """Command line that runs ``words`` on a node, under its name and in its network."""
        name = f'hostname node{node} && exec "$@"'
        return ["ip", "netns", "exec", self._netns(node), "unshare", "--uts", "bash", "-c", name, "bash", *words]

    def run(self, *words: str, folder: Path | None = None, **variables: str) -> str:
        """Run a command on node 1 and return its output.

        Raises:
            subprocess.CalledProcessError: the command failed.
        """
        result = subprocess.run(self.command(1, *words), env=self.environment | variables, cwd=folder, check=False,
                                capture_output=True, text=True, timeout=120)  # fmt: skip
        if result.returncode:
            print(result.stdout, result.stderr, file=sys.stderr)
            result.check_returncode()
        return result.stdout

    def _start(self, node: int, *words: str):
        with (self.folder / "output.log").open("a") as log:
            subprocess.Popen(self.command(node, *words), env=self.environment, stdin=subprocess.DEVNULL, stdout=log,
                             stderr=log, start_new_session=True)  # fmt: skip

    def bring(self, node: int):
        """Start a node's slurmd."""
        (self.folder / f"spool-node{node}").mkdir(exist_ok=True)
        self._start(node, "slurmd", "-D", "-N", f"node{node}")

    def lose(self, node: int):
        """Kill all processes on a node, like a loss of power."""
        found = subprocess.run(["ip", "netns", "pids", self._netns(node)], capture_output=True, text=True).stdout
        for process in found.split():
            subprocess.run(["kill", "-KILL", process], stderr=subprocess.DEVNULL)

    def wait_for_nodes(self, *states: str):
        """Wait until node 1 and node 2 have these states."""
        command = ("sinfo", "--noheader", "--Node", "--partition", "work", "--format", "%T")

        def reached():
            try:
                return self.run(*command).split() == list(states)
            except subprocess.CalledProcessError:  # the controller is not up yet
                return False

        self._wait(f"nodes are {states}", reached, seconds=90)

    def _wait(self, what: str, condition, seconds: float = 30):
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                logs = [path.read_text()[-3000:] for path in sorted(self.folder.glob("*.log"))]
                raise TimeoutError(f"not within {seconds} s: {what}\n" + "\n".join(logs))
            time.sleep(0.5)

    def job(self, number: str) -> dict[str, str]:
        """Return the entries of ``scontrol show job`` for a job, by name."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


if __name__ == "__main__":
    if reason := why_not():
        sys.exit(reason)
    with Cluster() as cluster:
        sys.exit(subprocess.run(cluster.command(1, *(sys.argv[1:] or ["bash"])), env=cluster.environment).returncode)
