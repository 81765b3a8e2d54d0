#!/usr/bin/env bash
# Runs the checks and measurements that need a GPU, in parts of under eight minutes each.
#   launch/gpu_check.sh [PART ...]
# PART  check     what is installed and which tests would run; needs no GPU, takes seconds
#       kernels   the kernels' tests, again under a second assembler
#       speed     the kernels' benchmark, and a profile of them
#       tuning    the kernels with other warps and slices of the hidden layer
#       models    the tests of models and training on a GPU
#       training  the whole training step at 4K: Titans, Transformer++ and baselines
#       lengths   the same from 2K to 32K for some of them (Titans, Figure 9)
#       sweeps    memory depth 1 to 4 and chunk sizes (Figure 8), with and without torch.compile
#       hierarchy training with several memories instead of one (TNT), and with a large, stale memory alone
#       long      training at 32K and 128K tokens per sequence; a stream of 10 million; layers side by side in both
# Without a PART: kernels and speed. A failed step does not stop the others, but the exit status reports it.
#
# A machine with only PyTorch, Triton, pytest (pytest-timeout, pytest-xdist, hypothesis), PyYAML, click and matplotlib
# also needs these wheels; `check` says which are missing:
#   kernels        pydantic pydantic-core annotated-types typing-inspection
#   other parts    deepspeed hjson einops msgpack ninja psutil py-cpuinfo tqdm safetensors tokenizers, and those above
#   rows of flash-linear-attention, and baselines made of it: fla-core
#
# TITANS_OUT      folder of all results, one log per step (runs/gpu)
# TITANS_ARCHIVE  one file with all results (TITANS_OUT.tar.gz), packed every few seconds: a run that is cut off keeps
#                 its results
# TITANS_PYTHON   another interpreter
# TITANS_PTXAS    the second assembler (default: the newest other one in Triton's wheel or CUDA). The ptxas 12.8 of
#                 Triton 3.6 is reported to miscompile some products; the wheel of Triton 3.9 has 13.4:
#                 unzip -j triton-3.9*.whl '*/ptxas-blackwell'
set -uo pipefail
cd "$(dirname "$0")/.." || exit
out=${TITANS_OUT:-runs/gpu}
out=$(mkdir -p "$out" && cd "$out" && pwd)
archive=${TITANS_ARCHIVE:-$out.tar.gz}
python=${TITANS_PYTHON:-python3}
status=0
export PYTHONUNBUFFERED=1

pack() {
    tar -czf "$archive.part" -C "$(dirname "$out")" "$(basename "$out")" 2>/dev/null
    mv "$archive.part" "$archive"
}
while sleep 10; do pack; done &
packer=$!
running=
trap 'kill $packer $running 2>/dev/null; wait $packer 2>/dev/null; pack' EXIT
trap 'exit 143' TERM INT

step() {  # step NAME SECONDS COMMAND...
    local name=$1 limit=$2
    shift 2
    echo "== $name"
    timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1 &
    running=$!  # in the background, since bash answers a signal only while it waits
    wait "$running"
    local code=$?
    running=
    [ $code = 0 ] || { status=1; echo "   failed ($code): $out/$name.log"; }
    tail -n 4 "$out/$name.log"
}
tests() {  # tests NAME SECONDS ARGUMENTS...: one line a test, as it ends
    step "$1" "$2" "$python" -m pytest -v -n "${TITANS_WORKERS:-8}" --continue-on-collection-errors "${@:3}"
}
benchmark() {  # benchmark NAME SECONDS WHAT ARGUMENTS...: results in a folder of that name
    step "$1" "$2" "$python" -m titans_pt benchmark "$3" --out "$out/$1" "${@:4}"
}
need() {  # need PART MODULE...: says in one line what a part lacks
    "$python" - "$@" <<'CHECK'
import sys
from importlib.util import find_spec

part, *modules = sys.argv[1:]
missing = [name for name in modules if find_spec(name) is None]
if missing:
    named = {"yaml": "pyyaml", "xdist": "pytest-xdist", "cpuinfo": "py-cpuinfo", "fla": "fla-core"}
    wheels = " ".join(named.get(name, name.replace("_", "-")) for name in missing)
    sys.exit(f"{part}: {sys.executable} lacks {wheels}; python3 -m pip install {wheels}, or carry the wheels that the "
             "head of launch/gpu_check.sh names")
CHECK
}
kernels=(torch triton numpy pytest pytest_timeout xdist hypothesis yaml click matplotlib
    pydantic pydantic_core annotated_types typing_inspection)
training=("${kernels[@]}" deepspeed hjson einops msgpack ninja psutil cpuinfo tqdm safetensors tokenizers)
# Listed by file: other tests of these folders import packages that are not needed here.
memory=(tests/kernels/memory/fused/test_{operators,equality,traffic}.py)
mapfile -t others < <(grep -rl 'pytest.mark.gpu' tests/kernels --include='test_*.py' | grep -v memory/fused | sort)
mapfile -t models < <(grep -rl 'pytest.mark.gpu' tests/titans_pt --include='test_*.py' | sort)

[ $# -gt 0 ] || set -- kernels speed
for part in "$@"; do
    case $part in
    check)
        need kernels "${kernels[@]}" || status=2
        need "other parts" "${training[@]}" || status=2
        need "rows of flash-linear-attention" fla || true
        [ $status = 0 ] || exit $status
        step collected 280 "$python" -m pytest --collect-only -q -m gpu "${memory[@]}" "${others[@]}" "${models[@]}"
        step commands 120 "$python" -m titans_pt benchmark kernels --help
        continue
        ;;
    kernels | speed | tuning) need "$part" "${kernels[@]}" || exit 2 ;;
    *) need "$part" "${training[@]}" || exit 2 ;;
    esac
    case $part in
    kernels)
        tests memory 170 -m "gpu or not slow" "${memory[@]}"
        if ptxas=$("$python" -m titans_pt.benchmarks.assemblers 2>"$out/assembler.txt"); then
            export TRITON_PTXAS_PATH=$ptxas TRITON_PTXAS_BLACKWELL_PATH=$ptxas
            cache=$(mktemp -d)
            TRITON_CACHE_DIR=$cache tests assembler 70 -m "gpu or not slow" "${memory[@]}" -k bf16
            rm -r "$cache"
            unset TRITON_PTXAS_PATH TRITON_PTXAS_BLACKWELL_PATH
            step assemblers 10 "$python" -m titans_pt.benchmarks.assemblers "$out/memory.log" "$out/assembler.log"
        fi
        cat "$out/assembler.txt"
        tests kernels 90 -m gpu "${others[@]}"
        ;;
    speed)
        benchmark benchmark 130 kernels
        step profile 30 "$python" -m titans_pt.benchmarks.profile "$out"
        if command -v ncu >/dev/null; then
            step counters 30 ncu --clock-control none --set basic --kernel-name 'regex:^(scan|read|coefficients|chunk)' \
                --launch-count 12 "$python" -m titans_pt.benchmarks.profile "$out" --once
        fi
        ;;
    tuning)
        step tuning 400 "$python" -m titans_pt.benchmarks.tuning "$out/tuning"
        ;;
    models)
        tests models 450 -m gpu "${models[@]}"
        ;;
    training)
        benchmark training 450 training --lengths 4096
        ;;
    lengths)
        benchmark lengths 450 training --models lmm,mag,transformer,gated_deltanet --lengths 2048,16384,32768
        ;;
    sweeps)
        benchmark sweeps 260 training --models lmm,mag --lengths 4096 --sweeps
        benchmark uncompiled 190 training --models lmm,mac,mag,transformer --lengths 4096 train.compile=false
        ;;
    hierarchy)
        benchmark hierarchy 225 training --models lmm,mag --lengths 4096,32768 --tokens 32768 model.memory.hierarchy={}
        benchmark stale 225 training --models lmm,mag --lengths 4096,32768 --tokens 32768 \
            model.memory.hierarchy.locals=[]
        ;;
    long)
        benchmark train-32k 90 training --models mag --lengths 32768 --tokens 32768
        benchmark train-128k 100 training --models mag --lengths 131072 --tokens 131072
        benchmark train-32k-wavefront 90 training --models mag --lengths 32768 --tokens 32768 train.wavefront=2048
        benchmark stream 90 stream configs/170m/mag.yaml evaluation.prefill_tokens=32768
        benchmark stream-wavefront 90 stream configs/170m/mag.yaml evaluation.prefill_tokens=32768 \
            evaluation.wavefront=2048
        ;;
    *)
        echo "no such part: $part (check, kernels, speed, tuning, models, training, lengths, sweeps, hierarchy, long)" >&2
        exit 2
        ;;
    esac
done
exit $status
