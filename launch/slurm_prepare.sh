#!/usr/bin/env bash
# Prepares token files on many nodes under SLURM: first every shard, one array task each, then the merge.
#     id=$(sbatch --parsable --array 0-15 PATH/launch/slurm_prepare.sh CONFIG [KEY=VALUE ...])
#     sbatch --dependency afterok:$id PATH/launch/slurm_prepare.sh CONFIG [KEY=VALUE ...]
# Submit both from any folder, which then gets the logs; the first line of a log names its shard. data.dir must be on a
# file system that all nodes see. A killed task keeps its finished parts. To run tasks 3 and 7 of 16 again:
#     TITANS_SHARDS=16 sbatch --array 3,7 PATH/launch/slurm_prepare.sh CONFIG [KEY=VALUE ...]
#SBATCH --job-name titans-prepare
#SBATCH --ntasks 1
#SBATCH --cpus-per-task 32
#SBATCH --mem-per-cpu 2G
#SBATCH --time 08:00:00
#SBATCH --requeue
#SBATCH --open-mode append
#SBATCH --output titans-prepare-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
shard=()
if [[ -n "${SLURM_ARRAY_TASK_ID:-}" ]]; then
    if [[ -n ${TITANS_SHARDS:-} ]]; then
        shard=(--shard "$SLURM_ARRAY_TASK_ID/$TITANS_SHARDS")
    else
        place=$(((SLURM_ARRAY_TASK_ID - ${SLURM_ARRAY_TASK_MIN:-0}) / ${SLURM_ARRAY_TASK_STEP:-1}))
        shard=(--shard "$place/$SLURM_ARRAY_TASK_COUNT")
    fi
    echo "== shard ${shard[1]}, task $SLURM_ARRAY_TASK_ID of job $SLURM_ARRAY_JOB_ID"
else
    echo "== no shard: the merge of all, or all of the work"
fi
exec "${TITANS_PYTHON:-python}" -m titans_pt prepare "$@" --workers "${SLURM_CPUS_PER_TASK:-1}" ${shard[@]+"${shard[@]}"}
