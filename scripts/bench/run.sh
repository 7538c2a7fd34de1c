#!/usr/bin/env bash
# Measurements of the documents. Usage: scripts/bench/run.sh MEASUREMENT
#   throughput       eleven pipelines and bare, 24 ms per stage and micro-batch
#   data-parallel    a pipeline of two stages against data parallelism on two ranks, real work
#   bare             what the machine itself costs, without an engine
#   throughput-96ms  DeepSpeed's pipeline and ours, 96 ms
#   adapters         the same with LoRA on frozen layers (docs/fine_tuning.md)
#   overhead         processor time of the engine itself
#   links            one-way time of messages, by payload
#   memory           predicted against counted peaks
#   simulation       simulated against measured throughput
#   balance          a pipeline that balances itself (docs/balancing.md)
#   balance-depths   a pipeline whose passes vary, with depths that follow
#   balance-plain    a plain model of Hugging Face's library that balances itself
#   soak             what a long run holds: memory, files, threads (docs/data/performance_notes.md)
#   recorder         the price of a timeline
#   recovery         the price of states kept in host memory, and of a killed rank
#   convergence      mitigations of staleness, K = 4, 8, 16: hours, but only for runs that its file lacks
#   convergence-k32  the recommended mitigation at K = 32
#   convergence-soap the optimizers SOAP and Muon, and weight_sync none
#   convergence-longer  SOAP with more updates, and at K = 32, against itself synchronous
#   convergence-grid  shorter synchronous beginnings, Muon one update late, weight_sync none up to two late
#   forecast         losses of the command forecast against those of four ranks
#   convergence-summary  table and picture of docs/convergence.md, from the files of the three
# PYTHON names another interpreter than that of .venv. Rows are added to the files in docs/data/, from which tables and pictures are drawn anew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [[ -x .venv/bin/python ]]; then python=${PYTHON:-.venv/bin/python}; else python=${PYTHON:-python}; fi
data=docs/data

throughput() {
    local to=(--json $data/throughput.jsonl --plot docs/images/throughput.svg --table /dev/stdout)
    local run=("$python" scripts/bench/schedule.py --repetitions 3 --seconds 2 "${to[@]}")
    "${run[@]}" --stages 4 8 --micro-batches 1 8 --links 0.5 --link-micro-batches 8 --real-micro-batches 1
    "${run[@]}" --links --real-micro-batches --stages 4 --micro-batches 2 4 16
    "${run[@]}" --links --real-micro-batches --stages 2 --micro-batches 1 2 4 8 16
    "${run[@]}" --links --real-micro-batches --stages 8 --micro-batches 2 4 16
    "${run[@]}" --stages --real-micro-batches --links 0.1 1.0 --link-micro-batches 8
}

data-parallel() {
    "$python" scripts/bench/schedule.py --repetitions 3 --seconds 2 --stages --links --real-micro-batches 2 4 16 \
        --arms stock data-parallel asp asp-deeper --json $data/data_parallel.jsonl
}

bare() {
    local arms=(bare stock asp asp-deeper asp-host)
    "$python" scripts/bench/schedule.py --repetitions 5 --seconds 2 --stages 4 8 --micro-batches 1 8 --links \
        --real-micro-batches --arms "${arms[@]}" --json $data/bare.jsonl
}

throughput-96ms() {
    local to=(--json $data/throughput_96ms.jsonl --table /dev/stdout)
    local run=("$python" scripts/bench/schedule.py --stage-ms 96 --seconds 2 --links --real-micro-batches "${to[@]}")
    local arms=(stock bsp asp asp-deeper)
    "${run[@]}" --repetitions 3 --arms "${arms[@]}" --stages 4 8 16 --micro-batches 1
    "${run[@]}" --repetitions 3 --arms "${arms[@]}" --stages 4 8 --micro-batches 8
    "${run[@]}" --repetitions 3 --arms "${arms[@]}" --stages 4 --micro-batches 4
    "${run[@]}" --repetitions 1 --arms stock bsp asp --stages 16 --micro-batches 16
    "${run[@]}" --repetitions 1 --arms stock bsp asp --stages 32 --micro-batches 1
}

adapters() {
    local to=(--json $data/adapters.jsonl --table $data/adapters.md)
    local run=("$python" scripts/bench/schedule.py --work adapters --stage-ms 96 --seconds 2 --repetitions 3 "${to[@]}")
    "${run[@]}" --arms stock bsp asp --links --real-micro-batches --stages 2 4 --micro-batches 1
    "${run[@]}" --arms stock bsp asp --links --real-micro-batches --stages 4 --micro-batches 8
}

overhead() {
    for options in "" "--clip 1" "--optimizer AdamW" "--micro-batches 8"; do
        # shellcheck disable=SC2086 # several words
        "$python" scripts/bench/overhead.py $options
    done
}

links() { "$python" scripts/bench/links.py; }

memory() {
    "$python" scripts/bench/memory.py
    "$python" scripts/bench/memory.py --vocabulary 30528 --layers 4 --batch 4 \
        --cases asp "asp, Lamb" "asp, torch AdamW" "asp, SGD" \
        "asp, bf16" "asp, bf16, ZeRO-1" "asp, ZeRO-1, DeepSpeed Adam" "asp, bf16, ZeRO-1 of two"
}

simulation() { "$python" scripts/bench/simulation.py --repetitions 5; }

balance() {
    "$python" scripts/bench/balance.py --repetitions 3 --at-once 2 --json $data/balance.jsonl --plot docs/images/balance.svg
}

balance-depths() {
    local to=(--json $data/balance_depths.jsonl --plot docs/images/balance_depths.svg)
    "$python" scripts/bench/balance.py --jitter 0 0.1 0.3 0.5 --repetitions 3 --every 32 "${to[@]}"
}

balance-plain() { "$python" scripts/bench/balance.py --plain --layers 8 --updates 80; }

soak() { "$python" scripts/bench/soak.py; }

recorder() { "$python" scripts/bench/recorder.py; }

recovery() {
    "$python" scripts/bench/recovery.py
    "$python" scripts/bench/restarts.py
}

convergence() {
    local to=(--output $data/convergence.jsonl --throughput $data/throughput_96ms.jsonl)
    local one=("$python" scripts/bench/convergence.py "${to[@]}" --methods-of-full-batches) # M = 1
    "${one[@]}" --methods recommended
    "${one[@]}" --methods recommended@3900 --synchronous --rates 1.4e-3
    "${one[@]}" --methods none --synchronous --rates 1.4e-3
    "${one[@]}" --methods none --synchronous --seeds 1
    "${one[@]}" --methods --stages --rates 1.4e-3
    "${one[@]}" --methods nadam sync20% --synchronous --stages 4 8 --rates 1.4e-3 --seeds 1
    local full=("$python" scripts/bench/convergence.py "${to[@]}" --methods --synchronous) # M = K
    "${full[@]}" --stages 4 8 --methods-of-full-batches none nadam --rates 1e-3 1.4e-3 2e-3
    "${full[@]}" --stages 4 --methods-of-full-batches nadam --rates 2e-3
    "${full[@]}" --stages 4 --methods-of-full-batches none nadam --rates 1.4e-3 2e-3 2.8e-3 --seeds 1
    "${full[@]}" --stages 16 --methods-of-full-batches none --rates 2e-3 --seeds 1
    "${full[@]}" --stages 16 --methods-of-full-batches nadam --rates 2e-3
}

convergence-k32() {
    "$python" scripts/bench/convergence.py --output $data/convergence_k32.jsonl --layers 16 --stages 32 \
        --synchronous adamw --methods recommended --methods-of-full-batches --rates 1.4e-3 --seeds 1
}

convergence-soap() {
    local soap=("$python" scripts/bench/convergence.py --output $data/convergence_soap.jsonl --seeds 1)
    soap+=(--throughput $data/throughput_96ms.jsonl --methods soap --methods-of-full-batches)
    "${soap[@]}" --rates 2e-3 2.8e-3 --synchronous soap adamw nadam
    "${soap[@]}" --rates 2.8e-3 --synchronous soap --stages 8 --seeds 2
    local other=("$python" scripts/bench/convergence.py --output $data/convergence_soap.jsonl --seeds 1 --rates 2e-3)
    other+=(--throughput $data/throughput_96ms.jsonl)
    "${other[@]}" --stages 8 --methods muon --synchronous muon --methods-of-full-batches
    other+=(--stages 4 --methods --synchronous)
    "${other[@]}" --methods-of-half-batches nadam nadam+unstashed --methods-of-full-batches nadam+unstashed
}

convergence-longer() {
    local soap=("$python" scripts/bench/convergence.py --tokenizer $data/convergence_vocabulary.txt)
    soap+=(--throughput $data/throughput_96ms.jsonl --methods-of-full-batches --rates 2.8e-3)
    local longer=(--output $data/convergence_longer.jsonl)
    "${soap[@]}" "${longer[@]}" --stages 8 --methods soap@3450 --synchronous soap
    "${soap[@]}" "${longer[@]}" --stages 16 --methods soap@3900 --synchronous
    local deepest=(--output $data/convergence_k32_soap.jsonl --layers 16 --stages 32 --seeds 1)
    "${soap[@]}" "${deepest[@]}" --methods --synchronous soap
    "${soap[@]}" "${deepest[@]}" --methods soap@6000 --synchronous --rates 1.4e-3
}

forecast() { "$python" scripts/bench/forecast.py; }

convergence-grid() {
    local run=("$python" scripts/bench/convergence.py --tokenizer $data/convergence_vocabulary.txt --seeds 1)
    run+=(--throughput $data/throughput_96ms.jsonl --output $data/convergence_grid.jsonl)
    local first=("${run[@]}" --methods-of-full-batches --rates) # M = 1
    "${first[@]}" 2e-3 --synchronous nadam --stages 8 --methods nadam+sync{5,20}%+warmup20%
    "${first[@]}" 2e-3 --synchronous --stages 4 --methods nadam+sync{5,20}%
    "${first[@]}" 2e-3 --synchronous --stages 16 --methods nadam+sync{5,20}%+warmup40%
    "${first[@]}" 2.8e-3 --synchronous soap --stages 8 16 --methods soap soap+sync5%
    "${run[@]}" --rates 2e-3 --synchronous muon --stages 8 --methods --methods-of-full-batches muon nadam nadam+unstashed \
        --methods-of-half-batches nadam nadam+unstashed
}
convergence-summary() { "$python" scripts/bench/convergence_summary.py; }

if declare -F -- "${1:-}" >/dev/null; then "$1"; else sed -n '2,/^set /s/^# //p' "${BASH_SOURCE[0]}" >&2 && exit 2; fi
