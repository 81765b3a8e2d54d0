#!/usr/bin/env bash
# Trains under SLURM, submitted from any folder:  sbatch --nodes 4 PATH/launch/slurm_train.sh CONFIG [KEY=VALUE ...]
# One task per node, which starts one process per GPU. Five minutes before the time is up, or on preemption, every process
# gets SIGTERM and writes a checkpoint; then the job queues itself again and continues from there. scancel ends it, after a
# checkpoint if KillWait is long enough. launch/torchrun.sh lists the variables. With another --signal, USR1@S
# or B:USR1@S, set TITANS_GRACE a little below S.
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

TITANS_NODES=$SLURM_JOB_NUM_NODES
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")  # not through head: its early end is a SIGPIPE to scontrol
TITANS_MASTER=${hosts%%$'\n'*}:$((20000 + SLURM_JOB_ID % 20000))
TITANS_JOB=$SLURM_JOB_ID
# Below the 300 s, so that there is time to queue again if the checkpoint was not done and the processes had to be killed.
TITANS_GRACE=${TITANS_GRACE:-270}
export TITANS_NODES TITANS_MASTER TITANS_JOB TITANS_GRACE
# Since SLURM 22.05 srun does not inherit --cpus-per-task from sbatch: a task would have one CPU.
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi

# One task of an array has the array's number in SLURM_JOB_ID, and commands with that number would act on all tasks.
own=$SLURM_JOB_ID
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then own=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi

asked=0
# SIGUSR1: time is nearly up. SIGTERM: the job is cancelled, or preempted and at its end.
# shellcheck disable=SC2329  # called by the trap
end() {
    asked=1
    scancel --signal TERM "$own"  # the job's steps, not this script
}
trap end USR1 TERM

srun --kill-on-bad-exit=1 "${TITANS_PYTHON:-python}" -m titans_pt.training.launcher "$@" &
step=$!
status=0
wait "$step" || status=$?
while kill -0 "$step" 2>/dev/null; do  # a trap cuts wait short
    status=0
    wait "$step" || status=$?
done

# --signal USR1@S without B: sends SIGUSR1 to the steps alone, which end with 128 + 10. A preemption sends them SIGTERM: ask
# scontrol. A job that is cancelled, or that SLURM itself is queueing again, is not RUNNING any more.
job=" $(scontrol --oneliner show job "$own") "
if [[ $job == *" JobState=RUNNING "* ]] && [[ $asked == 1 || $status == 138 || $job =~ " PreemptTime="[0-9] ]]; then
    trap '' USR1 TERM  # the signals of requeueing must not end the queued job
    scontrol requeue "$own"
fi
exit "$status"
