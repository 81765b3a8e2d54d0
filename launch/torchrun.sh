#!/usr/bin/env bash
# Trains on one node, one process a GPU:  launch/torchrun.sh CONFIG [KEY=VALUE ...]
# On several nodes, the same line on each, with NODES and MASTER (a host of theirs, with a port) set alike:
#     NODES=2 MASTER=node1:29500 launch/torchrun.sh CONFIG [KEY=VALUE ...]
# PROCESSES  processes a node (default: one a GPU; say 2 on a machine without)
# RESTARTS   times that the job goes on from its newest checkpoint by itself after a process was lost (default 3)
# JOB        a name that tells jobs on one MASTER apart (default: titans)
# HOST       1 on the node that MASTER names, 0 on the others, where their host names do not tell (namespaces, NAT)
# ADDRESS    this node's own address, where its host name is not one that the others can reach
set -euo pipefail

# A store of its own for every start of the processes: in the shared one, those that are started again find the addresses
# of those that were killed, and never meet (torch 2.13 with gloo).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
options=(--nproc_per_node "${PROCESSES:-gpu}" --max_restarts "${RESTARTS:-3}")
if [[ "${NODES:-1}" == 1 ]]; then
    options+=(--standalone)
else
    options+=(--nnodes "$NODES" --rdzv_backend c10d --rdzv_id "${JOB:-titans}")
    options+=(--rdzv_endpoint "${MASTER:?several nodes need MASTER=host:port}")
    if [[ -n "${HOST:-}" ]]; then options+=(--rdzv_conf "is_host=$HOST"); fi
    if [[ -n "${ADDRESS:-}" ]]; then options+=(--local_addr "$ADDRESS"); fi
fi
exec "${PYTHON:-python}" -m torch.distributed.run "${options[@]}" -m titans_pt train "$@"
