#!/usr/bin/env bash
# Two "nodes" on one machine: network namespaces joined by a veth pair, one torchrun in each. Needs root and iproute2.
#     tests/two_nodes.sh CONFIG [KEY=VALUE ...]
# Trains on both, kills everything of node 2 with SIGKILL after some steps, brings it back, and lets the job end.
set -euo pipefail
config=$(realpath "${1:?CONFIG is missing}")
shift
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
run=$("$python" -c 'import sys; from titans_pt.config import load_config; print(load_config(sys.argv[1], sys.argv[2:]).run.dir)' "$config" "$@")
name=titans$$

# shellcheck disable=SC2329  # called by the trap
clean() {
    for n in 1 2; do
        ip netns pids "$name-$n" 2>/dev/null | xargs -r kill -KILL 2>/dev/null || true
        ip netns del "$name-$n" 2>/dev/null || true
    done
}
trap clean EXIT

for n in 1 2; do ip netns add "$name-$n"; done
ip link add "v$$-1" netns "$name-1" type veth peer name "v$$-2" netns "$name-2"
for n in 1 2; do
    ip -n "$name-$n" addr add "10.9.0.$n/24" dev "v$$-$n"
    ip -n "$name-$n" link set "v$$-$n" up
    ip -n "$name-$n" link set lo up
done

node() {  # NUMBER: this node's launcher, in its own network
    local n=$1
    shift
    GLOO_SOCKET_IFNAME="v$$-$n" NODES=2 MASTER=10.9.0.1:29500 HOST=$((2 - n)) ADDRESS="10.9.0.$n" \
        PROCESSES="${PROCESSES:-1}" ip netns exec "$name-$n" launch/torchrun.sh "$config" "$@"
}
steps() { "$python" -c 'import sys; print(max([0] + [r["step"] for r in __import__("titans_pt.training.metrics", fromlist=["x"]).read_metrics(__import__("pathlib").Path(sys.argv[1], "metrics.jsonl"))]))' "$run"; }

node 1 "$@" & first=$!
node 2 "$@" & second=$!
until (("$(steps)" >= "${KILL_AT:-8}")); do
    sleep 1
    kill -0 "$first"
done
echo "== node 2 is lost at step $(steps)"
ip netns pids "$name-2" | xargs -r kill -KILL
wait "$second" || true
sleep 3
echo "== node 2 is back"
node 2 "$@" & second=$!
wait "$first" "$second"
echo "== both ended; starts and resumes of the job:"
grep -E "(starting|resuming) at" "$run/log.txt"
