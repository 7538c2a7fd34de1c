"""ds_vpipe: asynchronous pipeline-parallel training for DeepSpeed.

The process-free part (configuration, schedules, partitions) imports neither torch nor DeepSpeed; the
engine is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ds_vpipe.errors import PipelinePeerError, PipelineProtocolError, VPipeConfigError, VPipeError
from ds_vpipe.uncollected import uncollected

if TYPE_CHECKING:
    from ds_vpipe.engine.engine import VPipeEngine
    from ds_vpipe.engine.modules.partitioned import VPipeModule
    from ds_vpipe.engine.observe.statistics import StageStatistics
    from ds_vpipe.engine.weights.stashing import WeightStashingOptimizer
    from ds_vpipe.initialization import initialize
    from ds_vpipe.run import pipelines

__version__ = "0.1.0"

_HOMES = {
    "StageStatistics": "ds_vpipe.engine.observe.statistics",
    "VPipeEngine": "ds_vpipe.engine.engine",
    "VPipeModule": "ds_vpipe.engine.modules.partitioned",
    "WeightStashingOptimizer": "ds_vpipe.engine.weights.stashing",
    "initialize": "ds_vpipe.initialization",
    "pipelines": "ds_vpipe.run",
}
__all__ = [
    "PipelinePeerError",
    "PipelineProtocolError",
    "StageStatistics",
    "VPipeConfigError",
    "VPipeEngine",
    "VPipeError",
    "VPipeModule",
    "WeightStashingOptimizer",
    "initialize",
    "pipelines",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with uncollected(for_good=False):  # the script may have made anything before
        return getattr(importlib.import_module(_HOMES[name]), name)
