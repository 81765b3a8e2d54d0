#!/usr/bin/env bash
# Trains under SLURM:  sbatch --nodes 4 launch/slurm_train.sh CONFIG [KEY=VALUE ...]
# One task per node, which starts one process per GPU. Five minutes before the time is up, or on preemption, every process
# gets SIGTERM and writes a checkpoint; then the job queues itself again and continues from there.
#SBATCH --job-name titans
#SBATCH --ntasks-per-node 1
#SBATCH --gpus-per-node 8
#SBATCH --cpus-per-task 64
#SBATCH --time 24:00:00
#SBATCH --signal B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode append
#SBATCH --output titans-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"

NODES=$SLURM_JOB_NUM_NODES
HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST")  # not through head: its early end is a SIGPIPE to scontrol
MASTER=${HOSTS%%$'\n'*}:$((20000 + SLURM_JOB_ID % 20000))
JOB=$SLURM_JOB_ID
export NODES MASTER JOB

asked=0
# SIGUSR1: time is nearly up. SIGTERM: preempted. Either way: write a checkpoint, then queue again.
# shellcheck disable=SC2329  # called by the trap
end() {
    asked=1
    scancel --signal TERM "$SLURM_JOB_ID"  # the job's steps, not this script
}
trap end USR1 TERM

srun --kill-on-bad-exit=1 launch/torchrun.sh "$@" &
step=$!
status=0
wait "$step" || status=$?
while kill -0 "$step" 2>/dev/null; do  # a trap cuts wait short
    status=0
    wait "$step" || status=$?
done
if [[ $asked == 1 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
