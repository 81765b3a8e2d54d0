#!/usr/bin/env bash
# A worker of a study under SLURM. Any number of workers share the runs; `titans reproduce ... --submit N` queues workers:
#     sbatch --array 0-7 launch/slurm_reproduce.sh table1 --size 340m --out /shared/340m [titans reproduce's words ...]
# Each worker takes a run that no other is working on, trains it on all GPUs of its node, and evaluates it. Shortly before
# the time is up the training gets SIGTERM and writes a checkpoint, and the worker queues itself again.
#SBATCH --job-name titans-reproduce
#SBATCH --nodes 1
#SBATCH --ntasks 1
#SBATCH --gpus-per-node 8
#SBATCH --cpus-per-task 64
#SBATCH --time 24:00:00
#SBATCH --signal B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode append
#SBATCH --output titans-reproduce-%A-%a.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"

# Below the 300 s, so that there is time to queue again if a checkpoint was not done and processes had to be killed.
export TITANS_GRACE=${TITANS_GRACE:-270}

# One task of an array has the array's number in SLURM_JOB_ID, and commands with that number would act on all tasks.
own=$SLURM_JOB_ID
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then own=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi

asked=0
# SIGUSR1: time is nearly up. SIGTERM: preempted.
# shellcheck disable=SC2329  # called by the trap
end() {
    asked=1
    scancel --signal TERM "$own"  # the job's steps, not this script
}
trap end USR1 TERM

# Since SLURM 22.05 srun does not inherit --cpus-per-task from sbatch: a task would have one CPU.
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
srun "${TITANS_PYTHON:-python}" -m titans_pt reproduce "$@" &
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
