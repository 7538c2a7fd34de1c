"""Settings of a run: the ``"vpipe"`` block, and the DeepSpeed JSON around it.

Nothing here needs torch, DeepSpeed or a process group, so that a configuration can be checked before anything is
launched.
"""

from ds_vpipe.config.block import VPipeConfig

__all__ = ["VPipeConfig"]
