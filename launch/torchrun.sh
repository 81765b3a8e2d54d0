#!/usr/bin/env bash
# Trains on one node, one process a GPU:  launch/torchrun.sh CONFIG [KEY=VALUE ...]
# PROCESSES=2 for a number of processes of its own (on a machine without GPUs, say).
set -euo pipefail
exec torchrun --standalone --nproc_per_node "${PROCESSES:-gpu}" -m titans_pt train "$@"
