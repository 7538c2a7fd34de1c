#!/usr/bin/env bash
# One rank of a Slurm step, without any launcher: srun starts a task per rank, and this tells it who it is.
#
#   srun --nodes 2 --ntasks-per-node 4 scripts/slurm_rank.sh models/bert/train.py --deepspeed_config CONFIG ...
#
# PYTHON       the interpreter; default: the repository's environment, else python
# MASTER_PORT  default: from the job's number
set -euo pipefail
: "${SLURM_PROCID:?start this with srun}"

export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
# With --gpus-per-task each task sees one GPU, its own, as number 0.
[[ ${CUDA_VISIBLE_DEVICES:-} =~ ^([0-9]+|(GPU|MIG)-[^,]+)$ ]] && LOCAL_RANK=0
export LOCAL_SIZE=${SLURM_NTASKS_PER_NODE:-$((SLURM_NTASKS / SLURM_NNODES))}
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
if [[ -z ${MASTER_ADDR:-} ]]; then
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    export MASTER_ADDR
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." >/dev/null && pwd)
python=$here/.venv/bin/python
[[ -x $python ]] || python=python
exec "${PYTHON:-$python}" -u "$@"
