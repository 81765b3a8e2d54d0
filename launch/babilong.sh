#!/usr/bin/env bash
# Fine-tunes a run on BABILong's stories of growing length, each stage with the weights of the one before (the first with
# RUN's), then evaluates the last one at all lengths:
#     launch/babilong.sh RUN OUT [KEY=VALUE ...]
# OUT/text/LENGTH.jsonl has the stories, OUT/data/LENGTH their token files, and OUT/LENGTH is the run of that stage.
# KEY=VALUE: settings over RUN's, such as train.lr=1e-4 or evaluation.babilong.haystack.path=pg19/
# After a stop, run the same line again: what is done stays.
# TITANS_LENGTHS    tokens of a story, one stage each (512 1024 2048 4096)
# TITANS_STEPS      training steps of a stage, a tenth of them warm-up (1000)
# TITANS_DOCUMENTS  stories of each length and task (1000)
# TITANS_PROCESSES, TITANS_NODES, TITANS_MASTER, ... are those of torchrun.sh
set -euo pipefail
launch=$(dirname "$0")
python=${TITANS_PYTHON:-python}
if [[ -z ${TITANS_PYTHON:-} && -n ${PYTHON:-} ]] && "$PYTHON" -c 'import titans_pt.cli' 2>/dev/null; then python=$PYTHON; fi
run=${1:?RUN is missing} out=${2:?OUT is missing}
read -ra lengths <<<"${TITANS_LENGTHS:-${LENGTHS:-512 1024 2048 4096}}"
steps=${TITANS_STEPS:-${STEPS:-1000}}
evaluation=() settings=()
for word in "${@:3}"; do
    if [[ $word == evaluation.* ]]; then evaluation+=("$word"); fi
    settings+=("$word")
done
tokenizer=$run/tokenizer.model
if [[ ! -f $tokenizer ]]; then tokenizer=$run/tokenizer.json; fi

before=$run
for length in "${lengths[@]}"; do
    echo "== $length tokens"
    if [[ ! -f $out/text/$length.jsonl ]]; then
        "$python" -m titans_pt babilong "$run" --out "$out/text" --samples "${TITANS_DOCUMENTS:-${DOCUMENTS:-1000}}" \
            ${evaluation[@]+"${evaluation[@]}"} "evaluation.babilong.lengths=[$length]"
    fi
    stage=(
        "$run/config.yaml" "run.dir=$out/$length" "data.dir=$out/data/$length" "data.seq_len=$length"
        "data.sources=[{kind: files, path: '$out/text/$length.jsonl'}]" "data.tokenizer.path=$tokenizer"
        "train.init_from=$before" "train.init_fresh=[]" train.resume=auto train.stop_at=null
        "train.max_steps=$steps" "train.warmup_steps=$((steps / 10))" ${settings[@]+"${settings[@]}"}
    )
    "$python" -m titans_pt prepare "${stage[@]}"
    "$launch/torchrun.sh" "${stage[@]}"
    before=$out/$length
done
echo "== evaluation"
exec "$python" -m titans_pt evaluate "$before" --suite babilong ${evaluation[@]+"${evaluation[@]}"} \
    evaluation.babilong.wording=plain "evaluation.babilong.lengths=[$(IFS=,; echo "${lengths[*]}")]"
