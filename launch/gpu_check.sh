#!/usr/bin/env bash
# On a machine with a GPU: what can only be checked and measured there, in parts of under ten minutes each.
#   launch/gpu_check.sh [PART ...]
# PART  kernels   the gpu-marked tests, the memory kernels' benchmark, a profile of them
#       training  the whole training step at 4K: Titans, Transformer++ and baselines
#       lengths   the same from 2K to 32K for some of them (Titans, Figure 9)
#       sweeps    memory depth 1 to 4 and chunk sizes (Figure 8), with and without torch.compile
#       hierarchy the same with several memories instead of one (TNT), and with a large, stale one alone
#       long      training at 32K and 128K tokens per sequence; a stream of 10 million; layers side by side in both
# Without a PART: kernels. A step that fails does not stop the others, but the exit status reports it.
# TITANS_OUT     folder of all results, one log per step (runs/gpu)
# TITANS_PYTHON  another interpreter
set -uo pipefail
cd "$(dirname "$0")/.." || exit
out=${TITANS_OUT:-${OUT:-runs/gpu}}
out=$(mkdir -p "$out" && cd "$out" && pwd)
python=${TITANS_PYTHON:-python3}
if [[ -z ${TITANS_PYTHON:-} && -n ${PYTHON:-} ]] && "$PYTHON" -c 'import titans_pt.cli' 2>/dev/null; then python=$PYTHON; fi
status=0

step() {  # step NAME SECONDS COMMAND...
    local name=$1 limit=$2
    shift 2
    echo "== $name"
    timeout "$limit" "$@" >"$out/$name.log" 2>&1 || { status=1; echo "   failed ($?): $out/$name.log"; }
    tail -n 4 "$out/$name.log"
}
benchmark() {  # benchmark NAME SECONDS WHAT ARGUMENTS...: results in a folder of that name
    step "$1" "$2" "$python" -m titans_pt benchmark "$3" --out "$out/$1" "${@:4}"
}

for part in "${@:-kernels}"; do
    case $part in
    kernels)
        # Named, so that a package that other tests need is not needed here; side by side, since most of it is compiling.
        step tests 280 "$python" -m pytest -m gpu -q -n 8 tests/kernels tests/titans_pt/models tests/titans_pt/training
        benchmark kernels 180 kernels
        step profile 60 "$python" -m titans_pt.benchmarks.profile "$out"
        if command -v ncu >/dev/null; then
            step counters 60 ncu --clock-control none --set basic --kernel-name 'regex:^(scan|read|coefficients)' \
                --launch-count 12 "$python" -m titans_pt.benchmarks.profile "$out" --once
        fi
        ;;
    training)
        benchmark training 580 training --lengths 4096
        ;;
    lengths)
        benchmark lengths 580 training --models lmm,mag,transformer,gated_deltanet --lengths 2048,16384,32768
        ;;
    sweeps)
        benchmark sweeps 300 training --models lmm,mag --lengths 4096 --sweeps
        benchmark uncompiled 200 training --models lmm,mac,mag,transformer --lengths 4096 train.compile=false
        ;;
    hierarchy)
        benchmark hierarchy 290 training --models lmm,mag --lengths 4096,32768 --tokens 32768 model.memory.hierarchy={}
        benchmark stale 290 training --models lmm,mag --lengths 4096,32768 --tokens 32768 \
            model.memory.hierarchy.locals=[]
        ;;
    long)
        benchmark train-32k 200 training --models mag --lengths 32768 --tokens 32768
        benchmark train-128k 200 training --models mag --lengths 131072 --tokens 131072
        benchmark train-32k-wavefront 200 training --models mag --lengths 32768 --tokens 32768 train.wavefront=2048
        benchmark stream 180 stream configs/170m/mag.yaml evaluation.prefill_tokens=32768
        benchmark stream-wavefront 180 stream configs/170m/mag.yaml evaluation.prefill_tokens=32768 \
            evaluation.wavefront=2048
        ;;
    *)
        echo "no such part: $part (kernels, training, lengths, sweeps, hierarchy, long)" >&2
        exit 2
        ;;
    esac
done
exit $status
