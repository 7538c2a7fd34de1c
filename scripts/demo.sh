#!/usr/bin/env bash
# Sets up, then trains a small BERT on four pipeline stages, on this machine and without a GPU.
# Usage: scripts/demo.sh [arguments of models/bert/train.py]
set -euo pipefail

"$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export PATH="$PWD/.venv/bin:$PATH"
# The launcher does not set it, and four processes that each use all cores are many times slower.
export OMP_NUM_THREADS=1

started=$(mktemp)
trap 'rm -f "$started"' EXIT

# 3000 updates of 16 samples: five minutes on two cores, and well past the plateau of the unigram loss.
deepspeed --num_accelerators 4 models/bert/train.py --deepspeed_config ds_configs/bert_tiny_cpu.json --max_steps 3000 "$@"

# Whatever was written under runs/, the default place for outputs; with --output_dir or the like it is elsewhere.
if [[ -d runs ]]; then
    echo "demo: outputs:"
    find "$PWD/runs" -type f -newer "$started"
fi
