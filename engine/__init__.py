"""The part of ds_vpipe that talks to DeepSpeed and torch.distributed. Its import name is ``ds_vpipe.engine``."""

# From the repository root this folder can also be found as "engine", which would make a second copy of every class.
if __name__ != "ds_vpipe.engine":
    raise ImportError(f'import "ds_vpipe.engine", not "{__name__}": that would make a second copy of every class')

import deepspeed
import torch

from ds_vpipe.requirements import refuse_others

refuse_others({"torch": torch.__version__, "deepspeed": deepspeed.__version__})
