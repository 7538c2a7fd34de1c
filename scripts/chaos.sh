#!/usr/bin/env bash
# Kills and stops ranks of small runs at any moment, and compares what becomes of them. Every event is drawn from the
# seed and logged. Usage:
# scripts/chaos.sh [--minutes N] [--events N] [--seed S] [--restarted SHARE] [--kinds KIND ...] [--shapes SHAPE ...]
#                  [--folder FOLDER] [--few | --record LINE]
#   --restarted  of the events that end ranks, the share after which ds_vpipe.run --restarts starts them; default 0.3
#   --few        the events that are part of the tests
#   --record     a line of the log: that event once more
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH" PYTHONPATH="$PWD:$PWD/tests/support"
export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
export RES_OPTIONS="${RES_OPTIONS:-timeout:1 attempts:3}"  # torch's store waits for the names of all addresses
exec python tests/chaos/chaos.py "$@"
