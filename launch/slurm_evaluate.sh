#!/usr/bin/env bash
# Evaluates a run under SLURM. An array of one-GPU jobs shares the samples; the jobs have only the run's folder in common.
# Submit from any folder, which then gets the logs:
#     sbatch --array 0-15 PATH/launch/slurm_evaluate.sh RUN [titans evaluate's words ...]
#     sbatch --array 0-15 launch/slurm_evaluate.sh runs/mac --suite needle \
#         'evaluation.needle.lengths=[2048,16384,131072,1048576,10485760]' 'evaluation.needle.tasks=[niah_single_1]'
# A task that was stopped continues when it is queued again, even within a long sample (evaluation.save_every). The rank
# that finds all samples done writes the summary and the figures. To submit some of an array of 0-15 again:
#     TITANS_RANKS=16 sbatch --array 3,7 launch/slurm_evaluate.sh RUN ...
# If the run still trains, name the step (--checkpoint STEP): tasks that start later would find a newer checkpoint. It must
# be one that the run keeps (train.keep_every).
#SBATCH --job-name titans-evaluate
#SBATCH --ntasks 1
#SBATCH --gpus 1
#SBATCH --cpus-per-task 8
#SBATCH --time 12:00:00
#SBATCH --requeue
#SBATCH --open-mode append
#SBATCH --output titans-evaluate-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
rank=$(((${SLURM_ARRAY_TASK_ID:-0} - ${SLURM_ARRAY_TASK_MIN:-0}) / ${SLURM_ARRAY_TASK_STEP:-1}))
if [[ -n ${TITANS_RANKS:-} ]]; then
    rank=${SLURM_ARRAY_TASK_ID:-0}
fi
export RANK=$rank WORLD_SIZE="${TITANS_RANKS:-${SLURM_ARRAY_TASK_COUNT:-1}}" LOCAL_RANK=0
echo "== rank $RANK of $WORLD_SIZE, task ${SLURM_ARRAY_TASK_ID:-0} of job ${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID:-none}}"
exec "${TITANS_PYTHON:-python}" -m titans_pt evaluate "$@"
