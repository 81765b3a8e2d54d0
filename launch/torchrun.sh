#!/usr/bin/env bash
# Trains on one node, one process per GPU:  launch/torchrun.sh CONFIG [KEY=VALUE ...]
# On several nodes, the same line on each, with the same NODES and MASTER (one of them, with a port):
#     NODES=2 MASTER=node1:29500 launch/torchrun.sh CONFIG [KEY=VALUE ...]
# PROCESSES  processes per node (default: one per GPU; set it on a machine without GPUs)
# RESTARTS   how often the job restarts by itself from its newest checkpoint after losing a process (default 3); it does
#            not after an error that you must fix first, nor after a stop that was asked for
# GRACE      seconds for a last checkpoint after SIGTERM or Ctrl-C, before what is left is killed (default 300); set it
#            a little below what your scheduler gives
# JOB        a name that distinguishes jobs on one MASTER (default: titans)
# HOST       1 on the node that MASTER names, 0 on the others, where their host names do not show it (namespaces, NAT)
# ADDRESS    this node's address, if the others cannot reach it by its host name
# PYTHON     the interpreter (default: python)
set -euo pipefail
exec "${PYTHON:-python}" -m titans_pt.training.launcher "$@"
