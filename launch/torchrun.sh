#!/usr/bin/env bash
# Trains on one node, one process per GPU:  launch/torchrun.sh CONFIG [KEY=VALUE ...]
# On several nodes, the same line on each, with the same NODES and MASTER (one of them, with a port):
#     NODES=2 MASTER=node1:29500 launch/torchrun.sh CONFIG [KEY=VALUE ...]
# PROCESSES  processes per node (default: one per GPU; set it on a machine without GPUs)
# RESTARTS   how often the job restarts by itself from its newest checkpoint after losing a process (default 3)
# JOB        a name that distinguishes jobs on one MASTER (default: titans)
# HOST       1 on the node that MASTER names, 0 on the others, where their host names do not show it (namespaces, NAT)
# ADDRESS    this node's address, if the others cannot reach it by its host name
set -euo pipefail

# A separate store for every start of the processes: in a shared one, restarted processes find the addresses of those that
# were killed, and never meet (torch 2.13 with gloo).
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
