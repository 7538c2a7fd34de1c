#!/usr/bin/env bash
# Makes the virtual environment .venv in the repository root with the tested versions, or returns at once if it
# is up to date. Usage: scripts/setup_env.sh (environment variable PYTHON: the interpreter to use, default python3)
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv
python=${PYTHON:-python3}
stamp=$venv/ds_vpipe.stamp

fail() {
    echo "setup: $*" >&2
    exit 1
}

# The folder is part of the stamp: neither a virtual environment nor an editable install survives a move.
wanted=$({ pwd -P; cat constraints.txt setup.py; } | cksum)
if [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    exit 0
fi

if ! "$venv/bin/python" -m pip --version &>/dev/null; then # there is none, or its making was interrupted
    command -v "$python" >/dev/null || fail "$python not found; install Python 3.10 or newer, or set PYTHON"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$python is $("$python" -V 2>&1); Python 3.10 or newer is needed, set PYTHON to one"
    "$python" -c 'import ensurepip' 2>/dev/null ||
        fail "$python has no ensurepip; install it (Debian, Ubuntu: python3-venv) or set PYTHON to another Python"
    echo "setup: making $venv with $("$python" -V)"
    [[ -x $venv/bin/python ]] || rm -f "$venv"/bin/python* # links to a Python that is gone
    "$python" -m venv "$venv"
fi

pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check -qq "$@"
}

# torch first and by exact version: what is installed after it must not choose another build. Without an NVIDIA
# GPU the CPU build is tried first, which saves several gigabytes of CUDA libraries where the index has it.
torch=$(sed -n 's/^\(torch==[^;[:space:]]*\).*/\1/p' constraints.txt)
have=$("$venv/bin/python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' 2>/dev/null || true)
if [[ ${have%%+*} != "$torch" ]]; then
    echo "setup: installing $torch"
    if command -v nvidia-smi >/dev/null || ! pip install "$torch+cpu" 2>/dev/null; then
        pip install "$torch"
    fi
fi

echo "setup: installing the packages of constraints.txt (a few minutes at first)"
pip install -c constraints.txt setuptools
# Build isolation would download the build tools once more, and hide torch from the build of deepspeed.
pip install -c constraints.txt --no-build-isolation -e '.[test]'

echo "$wanted" >"$stamp"
echo "setup: done"
