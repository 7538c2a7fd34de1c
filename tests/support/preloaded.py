"""What ranks import, imported once: they are forked from a process that has done so.

Ranks collect garbage after every engine, and need not look at a million objects that are none of it, nor copy the pages
that these are on.
"""

import gc

import deepspeed.runtime.zero.muon.muon_optimizer  # torch's compiler: an optimizer imports it
import numpy
import pytest
import transformers.models.bert.modeling_bert

import ds_vpipe.initialization
import ds_vpipe.models

__all__ = ["deepspeed", "ds_vpipe", "numpy", "pytest", "transformers"]

gc.collect()
gc.freeze()
