#!/usr/bin/env bash
# Evaluates a run under SLURM, its samples shared over an array of one-GPU jobs:
#     sbatch --array 0-7 launch/slurm_evaluate.sh RUN [evaluation.KEY=VALUE ...]
# Each record is written once; a task that is preempted is queued again and does what is left.
#SBATCH --job-name titans-evaluate
#SBATCH --ntasks 1
#SBATCH --gpus 1
#SBATCH --cpus-per-task 8
#SBATCH --time 04:00:00
#SBATCH --requeue
#SBATCH --open-mode append
#SBATCH --output titans-evaluate-%A-%a.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
export RANK=$((SLURM_ARRAY_TASK_ID - SLURM_ARRAY_TASK_MIN)) WORLD_SIZE=$SLURM_ARRAY_TASK_COUNT LOCAL_RANK=0
exec "${PYTHON:-python}" -m titans_pt evaluate "$@"
