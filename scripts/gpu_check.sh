#!/usr/bin/env bash
# Everything that needs a GPU, on one: tests, throughput against DeepSpeed and memory against the plan, as a Markdown
# block for docs/performance.md. Usage: scripts/gpu_check.sh [--cpu] [STEP...]
#   steps   tests exactness bert-2 bert-4 gpt2-2 gpt2-4 mps-2 mps-4; default: all that can be run here. Each has a time
#           limit, and one that fails stops no other. exactness compares updates with the replay bit for bit; mps-K is
#           BERT with a share of the GPU's multiprocessors for each rank, by NVIDIA's multi-process service, if it is
#           installed. Ranks that share a GPU get an NCCL_HOSTID each, and NCCL connects them over the loopback.
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
    tests=(-m cuda)
    sizes=()
    steps=(tests exactness bert-2 bert-4 gpt2-2 gpt2-4)
    command -v nvidia-cuda-mps-control >/dev/null && steps+=(mps-2 mps-4)
fi
[[ $# -eq 0 ]] || steps=("$@")

# Runs a command with a service of its own, and a K-th of the multiprocessors for each client.
with_mps() {
    local stages=$1 status=0
    shift
    CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
    export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
    nvidia-cuda-mps-control -d || return
    CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$((100 / stages)) "$@" || status=$?
    echo quit | timeout 20 nvidia-cuda-mps-control
    rm -rf "$CUDA_MPS_PIPE_DIRECTORY"
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    return "$status"
}

failed=()
errors=$(mktemp)
for step in "${steps[@]}"; do
    run=(timeout --kill-after=10 "$limit")
    pytest=("$python" -m pytest -q -p no:cacheprovider)
    bench=("$python" scripts/bench/device.py --stages "${step#*-}" "${sizes[@]}" --models)
    case $step in
        tests) command=("${run[@]}" "${pytest[@]}" tests/exactness/test_cuda.py "${tests[@]}") ;;
        exactness)
            chosen="stashed_version or bit_identical or shares_and_recomputation or against_the_replay or test_bf16"
            files=(tests/exactness/test_{exactness,swap_exactness,ties,precision}.py)
            command=(env DS_VPIPE_TEST_DEVICE=cuda "${run[@]}" "${pytest[@]}" -k "$chosen" "${files[@]}")
            ;;
        bert-[1-9] | gpt2-[1-9]) command=("${run[@]}" "${bench[@]}" "${step%-*}") ;;
        mps-[1-9])
            # The service has connections for few clients that ask for so many: without links over NCCL.
            arms=(stock bsp asp "asp, recomputing" "asp, swapping")
            run=(env CUDA_DEVICE_MAX_CONNECTIONS=8 "${run[@]}")
            command=(with_mps "${step#*-}" "${run[@]}" "${bench[@]}" bert --arms "${arms[@]}")
            ;;
        *)
            echo "gpu_check: got the step $step; allowed are tests, exactness, bert-K, gpt2-K and mps-K, such as bert-2" >&2
            exit 1
            ;;
    esac
    printf '\n### %s\n\n' "$step"
    # Messages of libraries are shown if the step fails.
    if ! "${command[@]}" 2>"$errors"; then
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
