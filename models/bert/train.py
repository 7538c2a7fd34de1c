"""Pre-train a BERT over pipeline stages that never drain.

From the repository root, on four pipeline stages, without a GPU or any data of your own::

    deepspeed --num_accelerators 4 models/bert/train.py --deepspeed_config ds_configs/bert_tiny_cpu.json
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    # Python puts the folder of a script first on its search path; our modules must not hide others of the same name.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    if find_spec("ds_vpipe") is None:  # not installed: use the checkout this file lies in
        sys.path.append(str(here.parents[1]))
    from ds_vpipe.errors import VPipeConfigError
    from ds_vpipe.uncollected import uncollected

    try:
        with uncollected(for_good=True):
            from ds_vpipe.models.bert.training import main
    except VPipeConfigError as error:  # versions of packages
        print(f"[Rank {os.environ.get('RANK', '0')}] ds_vpipe: {error}", file=sys.stderr)
        sys.exit(2)

    sys.exit(main())
