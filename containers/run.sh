#!/usr/bin/env bash
# A command inside an image, with the repository at its own path, whichever of the programs is there:
#   containers/run.sh ds_vpipe.sif deepspeed --num_accelerators 4 models/bert/train.py --deepspeed_config CONFIG
# IMAGE is a file for Apptainer or Singularity, a name for Docker. BIND: further folders, with spaces between them.
set -euo pipefail
[[ $# -ge 2 ]] || { echo "usage: containers/run.sh IMAGE COMMAND [ARGUMENTS]" >&2; exit 2; }
image=$1
shift
read -r -a more <<<"${BIND:-}" || true
folders=("$PWD" "${more[@]}")

if [[ -f $image ]]; then
    for program in apptainer singularity; do
        command -v "$program" >/dev/null || continue
        options=(--pwd "$PWD")
        for folder in "${folders[@]}"; do options+=(--bind "$folder"); done
        if command -v nvidia-smi >/dev/null; then options+=(--nv); fi
        exec "$program" exec "${options[@]}" "$image" "$@"
    done
    echo "run.sh: $image needs apptainer or singularity, and neither is installed" >&2
    exit 2
fi
command -v docker >/dev/null || { echo "run.sh: no file $image, and docker is not installed" >&2; exit 2; }
options=(--rm --ipc=host --network=host --workdir "$PWD")
for folder in "${folders[@]}"; do options+=(--volume "$folder:$folder"); done
if command -v nvidia-smi >/dev/null; then options+=(--gpus all); fi
exec docker run "${options[@]}" "$image" "$@"
