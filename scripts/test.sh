#!/usr/bin/env bash
# Sets up, then runs the linters and all tests. Usage: scripts/test.sh [--fast] [arguments of pytest]
#   --fast   leave out the tests that start several processes
set -euo pipefail

"$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fast=false
if [[ ${1:-} == --fast ]]; then
    fast=true
    shift
fi

# The launcher, compilers and tools of the environment are found through PATH.
export PATH="$PWD/.venv/bin:$PATH"
# Several processes with one thread each are faster than several with all cores each.
export OMP_NUM_THREADS=1
# Hundreds of processes import the package, and would each compile it.
unset PYTHONDONTWRITEBYTECODE
# One folder for what the engine builds and for what DeepSpeed alone does, which would build the same operators again.
export TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$PWD/build/torch_extensions}

selected=false
run_pytest() {
    local status=0
    python -m pytest "$@" || status=$?
    # 5: no test was selected, which is right for one part when -k names tests of the other, but not for both.
    if [[ $status == 0 ]]; then
        selected=true
    elif [[ $status != 5 ]]; then
        exit "$status"
    fi
}

ruff check .
mypy -p ds_vpipe
run_pytest -m "not mp" -n 2 "$@"
if [[ $fast == false ]]; then
    # Ranks wait for each other for a third of the time: three worlds at once keep two cores busy. Files begin in the
    # order of collection, in which long ones are first.
    run_pytest -m mp -n 3 --dist loadfile --no-loadscope-reorder "$@"
fi
[[ $selected == true ]] || exit 5
