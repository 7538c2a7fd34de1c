"""Run a DeepSpeed script unchanged, with ds_vpipe's engine where its JSON has a ``"vpipe"`` block.

Usage::

    deepspeed --module ds_vpipe.run train.py --deepspeed_config cfg.json

The launcher puts ``--local_rank=N`` before the script's name; the script gets it as its first argument,
where it is without ds_vpipe.
"""

from __future__ import annotations

import functools
import runpy
import sys
from pathlib import Path

USAGE = "usage: deepspeed [launcher options] --module ds_vpipe.run SCRIPT [script arguments]"


def main(argv: list[str]) -> int:
    """Run the script named in ``argv``; the exit status for a wrong command line or configuration is 2."""
    position = next((at for at, argument in enumerate(argv) if not argument.startswith("--local_rank")), None)
    if position is None:
        print(f"ds_vpipe.run: no script given; {USAGE}", file=sys.stderr)
        return 2
    script = Path(argv[position])
    if not script.is_file():
        print(f"ds_vpipe.run: got script {str(script)!r}, which is not a file; {USAGE}", file=sys.stderr)
        return 2

    import deepspeed

    from ds_vpipe.build_lock import limited_builds
    from ds_vpipe.errors import VPipeConfigError, VPipeError
    from ds_vpipe.initialization import deepspeed_initialize, initialize

    deepspeed.initialize = functools.wraps(deepspeed_initialize())(initialize)
    sys.argv = [str(script), *argv[:position], *argv[position + 1 :]]
    sys.path[0] = str(script.resolve().parent)
    try:
        with limited_builds():  # the script may build before it comes to initialize()
            runpy.run_path(str(script), run_name="__main__")
    except VPipeError as error:
        import os

        print(f"[rank {os.environ.get('RANK', '0')}] ds_vpipe: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, VPipeConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
