#!/usr/bin/env bash
# On a machine with a GPU: the gpu-marked tests, the kernels' benchmark, a profile; under ten minutes.
#   launch/gpu_check.sh [FOLDER]     everything is written to FOLDER (runs/gpu), one file of output a step
# PYTHON=... for another interpreter. A step that fails does not stop the others; the exit status tells.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
out=$(mkdir -p "${1:-runs/gpu}" && cd "${1:-runs/gpu}" && pwd)
python=${PYTHON:-python3}
status=0

step() {  # step NAME SECONDS COMMAND...
    local name=$1 limit=$2
    shift 2
    echo "== $name"
    timeout "$limit" "$@" >"$out/$name.log" 2>&1 || { status=1; echo "   failed ($?): $out/$name.log"; }
    tail -n 4 "$out/$name.log"
}

step tests 240 "$python" -m pytest -m gpu -q
step benchmark 210 "$python" -m titans_pt benchmark kernels --out "$out"
step profile 60 "$python" -m titans_pt.benchmarks.profile "$out"
if command -v ncu >/dev/null; then
    step counters 60 ncu --clock-control none --set basic --kernel-name 'regex:^(scan|read|coefficients)' --launch-count 12 \
        "$python" -m titans_pt.benchmarks.profile "$out" --once
fi
exit $status
