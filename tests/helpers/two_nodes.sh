#!/usr/bin/env bash
# Two "nodes" on one machine: network namespaces joined by a veth pair. Needs root and iproute2.
#     [LAUNCHER=deepspeed] tests/helpers/two_nodes.sh CONFIG [KEY=VALUE ...]
# Trains on both, kills node 2's processes with SIGKILL after step KILL_AT (8), restarts it, and lets the job end.
# LAUNCHER   torchrun (the default): one per node, which restarts by itself. deepspeed: from node 1, over ssh; it
#            needs sshd and pdsh, and is started again after the loss
# PROCESSES  processes per node (1)
set -euo pipefail
config=$(realpath "${1:?CONFIG is missing}")
shift
cd "$(dirname "$0")/../.."
export TITANS_PYTHON=${TITANS_PYTHON:-python}
run=$("$TITANS_PYTHON" -c 'import sys; from titans_pt.config.files import load_config; print(load_config(sys.argv[1], sys.argv[2:]).run.dir)' "$config" "$@")
name=titans$$
scratch=$(mktemp -d)
# Threads of processes that share two cores wait for each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} GLOO_SOCKET_IFNAME=between

# shellcheck disable=SC2329  # called by the trap
clean() {
    for n in 1 2; do
        ip netns pids "$name-$n" 2>/dev/null | xargs -r kill -KILL 2>/dev/null || true
        ip netns del "$name-$n" 2>/dev/null || true
    done
    rm -rf "$scratch"
}
trap clean EXIT

for n in 1 2; do ip netns add "$name-$n"; done
ip link add between netns "$name-1" type veth peer name between netns "$name-2"
for n in 1 2; do
    ip -n "$name-$n" addr add "10.9.0.$n/24" dev between
    ip -n "$name-$n" link set between up
    ip -n "$name-$n" link set lo up
done

node() {  # NUMBER: torchrun in this node's own network
    local n=$1
    shift
    TITANS_NODES=2 TITANS_MASTER=10.9.0.1:29500 TITANS_HOST=$((2 - n)) TITANS_ADDRESS="10.9.0.$n" \
        TITANS_PROCESSES="${PROCESSES:-1}" ip netns exec "$name-$n" launch/torchrun.sh "$config" "$@"
}
both() {  # DeepSpeed's launcher on node 1, with a ~/.ssh that has a key for both nodes
    # shellcheck disable=SC2016  # for the inner shell
    ip netns exec "$name-1" unshare --mount bash -c '
        mkdir -p ~/.ssh && mount --bind "$0" ~/.ssh && exec launch/deepspeed.sh "$0/hosts" "$@"
    ' "$scratch" "$config" "$@"
}
listen() {  # NUMBER: this node's sshd
    ip netns exec "$name-$1" "$(command -v sshd || echo /usr/sbin/sshd)" -D -f "$scratch/sshd" \
        -o "ListenAddress=10.9.0.$1" 2>"$scratch/sshd-$1.log" &
}
steps() {  # the last logged step
    local found
    found=$(grep -ho '"step": [0-9]*' "$run/metrics.jsonl" 2>/dev/null | tail -n 1 | tr -dc 0-9 || true)
    echo "${found:-0}"
}
lose_node_2() {  # PID of the job on node 1
    until (("$(steps)" >= "${KILL_AT:-8}")); do
        sleep 1
        kill -0 "$1"
    done
    echo "== node 2 is lost at step $(steps)"
    ip netns pids "$name-2" | xargs -r kill -KILL
}

if [[ "${LAUNCHER:-torchrun}" == deepspeed ]]; then
    ssh-keygen -q -t ed25519 -N "" -f "$scratch/id_ed25519"
    ssh-keygen -q -t ed25519 -N "" -f "$scratch/host"
    cp "$scratch/id_ed25519.pub" "$scratch/authorized_keys"
    printf '10.9.0.%s slots=%s\n' 1 "${PROCESSES:-1}" 2 "${PROCESSES:-1}" >"$scratch/hosts"
    echo "10.9.0.* $(cat "$scratch/host.pub")" >"$scratch/known_hosts"
    printf '%s\n' "HostKey $scratch/host" "AuthorizedKeysFile $scratch/authorized_keys" "StrictModes no" \
        "PidFile none" "UsePAM no" >"$scratch/sshd"
    # Variables that the launcher passes to the nodes, besides those of Python...
    printf '%s\n' "OMP_NUM_THREADS=$OMP_NUM_THREADS" "GLOO_SOCKET_IFNAME=between" "DS_ACCELERATOR=${DS_ACCELERATOR:-cpu}" \
        >"$scratch/environment"
    export DS_ENV_FILE=$scratch/environment DS_ACCELERATOR=${DS_ACCELERATOR:-cpu}
    mkdir -p /run/sshd
    listen 1
    listen 2
    both "$@" & first=$!
    lose_node_2 "$first"
    wait "$first" || echo "== the job ended with $?"
    echo "== node 2 is back, the job is started again"
    listen 2
    both "$@"
else
    node 1 "$@" & first=$!
    node 2 "$@" & second=$!
    lose_node_2 "$first"
    wait "$second" || true
    sleep 3
    echo "== node 2 is back"
    node 2 "$@" & second=$!
    wait "$first" "$second"
fi
echo "== the job ended; its starts and resumes:"
grep -E "(starting|resuming) at" "$run/log.txt"
