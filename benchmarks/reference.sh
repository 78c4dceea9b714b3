#!/usr/bin/env bash
# Measures again what the results say of the reference pair, after it was trained: bash benchmarks/reference.sh OUT humaneval.jsonl
# Needs bundles/reference and bundles/draft-model, and leaves a file for each command in OUT. Half an hour of a quiet machine.
set -uo pipefail
out=$1 prompts=$2 bin=${BIN:-.venv/bin} bundle=bundles/reference
mkdir -p "$out"

measure() {
    local name=$1
    shift
    "$@" >"$out/$name.txt" 2>"$out/$name.err" || echo "$name failed: see $out/$name.err" >&2
}

measure scenarios "$bin/ondevice" bench $bundle --scenarios --wide
humaneval=("$bin/ondevice" bench $bundle --drafts --wide --prompts "$prompts" --max-new-tokens 128)
measure humaneval-greedy "${humaneval[@]}" --limit 40 --temperature 0
measure humaneval-sampled "${humaneval[@]}" --limit 40 --temperature 0.8
measure humaneval-ort "${humaneval[@]}" --limit 20 --temperature 0 --engine ort --lengths 2,4,auto
measure draft-model "$bin/ondevice" bench $bundle --drafts --wide --drafters mtp,bundles/draft-model --lengths 2,4,auto --temperature 1
measure coupling "$bin/python" -m benchmarks.drafts.coupling $bundle
measure heads "$bin/python" -m benchmarks.drafts.heads $bundle --nodes 8 16 --tokens 300
measure grammar "$bin/python" -m benchmarks.speed.grammar $bundle --pair $bundle
measure own-layers "$bin/python" -m benchmarks.drafts.own_layers $bundle --threads 1
measure attention "$bin/python" -m benchmarks.quality.attention $bundle --sequences 2
measure batch "$bin/python" -m benchmarks.speed.batch $bundle --tokens 200
measure start "$bin/python" -m benchmarks.memory.start $bundle --cold-runs 1 --runs 3
measure tune "$bin/ondevice" tune $bundle --seconds 40
measure busy "$bin/python" -m benchmarks.speed.busy $bundle --seconds 1.2 --repeats 3
