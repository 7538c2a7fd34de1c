#!/usr/bin/env bash
# Everything that needs a GPU, on one: tests, throughput against DeepSpeed and memory against the plan, as a Markdown
# block for docs/performance.md. Usage: scripts/gpu_check.sh [--cpu] [STEP...]
#   steps   tests nccl bert-2 bert-4 gpt2-2 gpt2-4 nccl-2 nccl-4; default: all, with --cpu without those over NCCL. Each
#           has a time limit, and one that fails stops no other. nccl are the tests of links over NCCL, nccl-K is BERT
#           over both links of GPUs; ranks that share a GPU get an NCCL_HOSTID each, and talk over the loopback.
#   --cpu   the same steps on the CPU, with tiny sizes: whether this script works
# PYTHON names another interpreter than that of .venv, LIMIT_S another limit of a step. Exit status: 0 if all is well,
# 1 if a step failed, 2 if there is no GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -x .venv/bin/python ]]; then python=${PYTHON:-.venv/bin/python}; else python=${PYTHON:-python3}; fi
limit=${LIMIT_S:-240}
export CUDA_DEVICE_MAX_CONNECTIONS=32 # which links over NCCL need
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

on_cpu=false
if [[ ${1:-} == --cpu ]]; then
    on_cpu=true
    shift
    export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES=
    tests=(-k "simulated and resume and host")
    steps=(tests bert-2 bert-4 gpt2-2 gpt2-4)
    sizes=(--cpu --hidden 64 --layers 2 --vocabulary 64 --batch 1 --sequence 16 --batches 2 --at-once 1 --repetitions 1)
elif ! "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())" 2>/dev/null; then
    echo "gpu_check: no GPU was at hand, nothing was run"
    exit 2
else
    tests=(-m cuda -k "not nccl")
    sizes=()
    steps=(tests nccl bert-2 bert-4 gpt2-2 gpt2-4 nccl-2 nccl-4)
fi
[[ $# -eq 0 ]] || steps=("$@")

failed=()
errors=$(mktemp)
for step in "${steps[@]}"; do
    case $step in
        tests) command=("$python" -m pytest -q -p no:cacheprovider tests/exactness/test_cuda.py "${tests[@]}") ;;
        nccl) command=("$python" -m pytest -q -p no:cacheprovider tests/exactness/test_cuda.py -m cuda -k nccl) ;;
        nccl-[1-9])
            arms=(asp "asp, NCCL")
            command=("$python" scripts/bench/device.py --models bert --stages "${step#*-}" --arms "${arms[@]}")
            ;;
        bert-[1-9] | gpt2-[1-9])
            command=("$python" scripts/bench/device.py --models "${step%-*}" --stages "${step#*-}" "${sizes[@]}")
            ;;
        *)
            echo "gpu_check: got the step $step; allowed are tests, nccl, bert-K, gpt2-K and nccl-K, such as bert-2" >&2
            exit 1
            ;;
    esac
    printf '\n### %s\n\n' "$step"
    # Messages of libraries are shown if the step fails.
    if ! timeout --kill-after=10 "$limit" "${command[@]}" 2>"$errors"; then
        failed+=("$step")
        printf '\n%s failed:\n\n```\n%s\n```\n' "$step" "$(tail -n 40 "$errors")"
    fi
done
rm -f "$errors"

echo
if [[ $on_cpu == true ]]; then
    echo "gpu_check: a rehearsal on the CPU; no number means anything"
fi
if [[ ${#failed[@]} -gt 0 ]]; then
    echo "gpu_check: failed: ${failed[*]}"
    exit 1
fi
echo "gpu_check: all steps are well: ${steps[*]}"
