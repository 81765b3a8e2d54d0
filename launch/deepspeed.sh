#!/usr/bin/env bash
# Trains on the nodes of a hostfile, started from one of them over ssh:
#     launch/deepspeed.sh HOSTFILE CONFIG [KEY=VALUE ...]
# Each line of the hostfile is "HOST slots=PROCESSES". The environment and the folder in which you start must have the same
# path on every node.
# TITANS_PORT  port of the first node (default 29500)
# deepspeed passes on the variables of Python, NCCL and UCX; write others, such as WANDB_API_KEY=KEY, into .deepspeed_env
# in the home folder or where you start.
# After losing a process, run the same line again: it continues from the newest checkpoint.
set -euo pipefail
hostfile=${1:?HOSTFILE is missing}
shift
exec deepspeed --hostfile "$hostfile" --master_port "${TITANS_PORT:-29500}" --no_local_rank --module titans_pt train "$@"
