#!/usr/bin/env bash
# Sets up, then trains the same small BERT by DeepSpeed's pipeline engine and by ours in turns, on this machine's cores.
# Usage: scripts/demo.sh [--seconds N] [--output_dir DIR] [--synthetic]
set -euo pipefail

echo "demo: a small BERT by DeepSpeed's pipeline engine and by ds_vpipe, about five minutes without the setup"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." >/dev/null && pwd)
"$root/scripts/setup_env.sh"

export PATH="$root/.venv/bin:$PATH"
# nproc would count OMP_NUM_THREADS.
stages=$(($(env -u OMP_NUM_THREADS nproc) < 4 ? 2 : 4))
# The launcher does not set it, and processes that each use all cores are many times slower.
export OMP_NUM_THREADS=1
# A GPU, if there is one, would be shared by all stages.
export DS_ACCELERATOR=cpu
exec deepspeed --quiet --num_accelerators "$stages" "$root/scripts/demo.py" "$@"
