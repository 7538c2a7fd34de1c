#!/usr/bin/env bash
# Everything that needs a GPU, on one: tests, throughput against DeepSpeed and memory against the plan, as a Markdown
# block for docs/performance.md. Usage: scripts/gpu_check.sh [--cpu] [STEP...]
#   steps   tests exactness bert-2 bert-4 gpt2-2 gpt2-4; default: all, with --cpu without exactness. Each has a time
#           limit, and one that fails stops no other. exactness compares updates with a replay on the same GPU. Where
#           NVIDIA's multi-process service is installed, ranks that share a GPU have a share of its multiprocessors each
#           in the measurements. They get an NCCL_HOSTID each, and NCCL connects them over the loopback.
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
    sizes=(--seconds 2 --repetitions 2)
    steps=(tests exactness bert-2 bert-4 gpt2-2 gpt2-4)
fi
[[ $# -eq 0 ]] || steps=("$@")

errors=$(mktemp)
trap 'rm -f "$errors"' EXIT

# Runs a command with a K-th of the multiprocessors for each of its processes, by a service that ends with it. It has too
# few connections for four processes that ask for 32 each, as links over NCCL do.
with_mps() (
    CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
    export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
    trap 'rm -rf "$CUDA_MPS_PIPE_DIRECTORY"' EXIT
    trap 'exit 130' INT TERM
    nvidia-cuda-mps-control -d || exit
    trap 'echo quit | timeout 20 nvidia-cuda-mps-control && rm -rf "$CUDA_MPS_PIPE_DIRECTORY"' EXIT
    export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$((100 / $1)) CUDA_DEVICE_MAX_CONNECTIONS=$((64 / $1))
    "${@:2}"
)

failed=()
for step in "${steps[@]}"; do
    run=(timeout --kill-after=10 "$limit")
    pytest=("${run[@]}" "$python" -m pytest -q -p no:cacheprovider)
    case $step in
        tests) command=("${pytest[@]}" tests/exactness/test_cuda.py "${tests[@]}") ;;
        exactness)
            chosen="(stashed_version and SGD) or bit_identical or shares_and_recomputation or tied_weights or test_bf16"
            files=(tests/exactness/test_{exactness,swap_exactness,ties,precision}.py)
            command=(env DS_VPIPE_TEST_DEVICE=cuda "${pytest[@]}" -k "$chosen" "${files[@]}")
            ;;
        bert-[1-9] | gpt2-[1-9])
            stages=${step#*-}
            command=("${run[@]}" "$python" scripts/bench/device.py --models "${step%-*}" --stages "$stages" "${sizes[@]}")
            if [[ $on_cpu == false ]] && command -v nvidia-cuda-mps-control >/dev/null &&
                [[ $("$python" -c "import torch; print(torch.cuda.device_count())") -lt $stages ]]; then
                command=(with_mps "$stages" "${command[@]}")
                [[ $stages -le 2 ]] || command+=(--arms stock bsp asp "asp, recomputing" "asp, swapping" "asp, gloo")
            fi
            ;;
        *)
            echo "gpu_check: got the step $step; allowed are tests, exactness, bert-K and gpt2-K, such as bert-2" >&2
            exit 1
            ;;
    esac
    if [[ $on_cpu == true && $step == exactness ]]; then
        echo "gpu_check: got the step exactness with --cpu; allowed are the others; it needs a GPU" >&2
        exit 1
    fi
    printf '\n### %s\n\n' "$step"
    # Messages of libraries are shown if the step fails.
    if ! "${command[@]}" 2>"$errors"; then
        failed+=("$step")
        printf '\n%s failed:\n\n```\n%s\n```\n' "$step" "$(tail -n 40 "$errors")"
    fi
done

echo
if [[ $on_cpu == true ]]; then
    echo "gpu_check: a rehearsal on the CPU; no number means anything"
fi
if [[ ${#failed[@]} -gt 0 ]]; then
    echo "gpu_check: failed: ${failed[*]}"
    exit 1
fi
echo "gpu_check: all steps are well: ${steps[*]}"
