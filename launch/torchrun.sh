#!/usr/bin/env bash
# Trains on one node, one process per GPU:  launch/torchrun.sh CONFIG [KEY=VALUE ...]
# On several nodes, run the same line on each, with the same TITANS_NODES and TITANS_MASTER (one of the nodes, with a port):
#     TITANS_NODES=2 TITANS_MASTER=node1:29500 launch/torchrun.sh CONFIG [KEY=VALUE ...]
# TITANS_PROCESSES  processes per node (default: one per GPU; set it on a machine without GPUs)
# TITANS_RESTARTS   how often the job restarts by itself from its newest checkpoint after losing a process (default 3),
#                   counted from each new checkpoint; it does not restart after an error that you must fix first, or after
#                   a requested stop
# TITANS_GRACE      seconds for a last checkpoint after SIGTERM, SIGUSR1, Ctrl-C or SIGHUP, before remaining processes are
#                   killed (default 300); set it a little below the time that your scheduler gives
# TITANS_JOB        a name, the same on all nodes, for jobs that share the port of one TITANS_MASTER on purpose
# TITANS_HOST       1 on the node that TITANS_MASTER names, 0 on the others; needed if host names do not show it
#                   (namespaces, NAT)
# TITANS_ADDRESS    this node's address, if the others cannot reach it by its host name
# TITANS_PYTHON     the interpreter (default: python)
# Under nohup the run outlives its terminal.
set -euo pipefail
exec "${TITANS_PYTHON:-python}" -m titans_pt.training.launcher "$@"
