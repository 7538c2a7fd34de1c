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

ruff check .
mypy -p ds_vpipe
if [[ $fast == true ]]; then
    exec python -m pytest -m "not mp" -n 2 "$@"
fi
# Ranks wait for each other for a third of the time: three worlds at once keep two cores busy. Files begin in the order
# of collection, in which long ones are first.
exec python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
