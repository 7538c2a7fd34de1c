"""ds_vpipe: asynchronous pipeline-parallel training for DeepSpeed.

The process-free part (configuration, schedules, partitions) imports neither torch nor DeepSpeed; the
engine is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ds_vpipe.errors import PipelinePeerError, PipelineProtocolError, VPipeConfigError, VPipeError

if TYPE_CHECKING:
    from ds_vpipe.engine.engine import VPipeEngine
    from ds_vpipe.engine.modules.partitioned import VPipeModule
    from ds_vpipe.engine.observe.statistics import StageStatistics
    from ds_vpipe.engine.weights.stashing import WeightStashingOptimizer
    from ds_vpipe.initialization import initialize

__version__ = "0.1.0"

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
]


def __getattr__(name: str) -> Any:
    if name == "initialize":
        from ds_vpipe.initialization import initialize

        return initialize
    if name == "VPipeEngine":
        from ds_vpipe.engine.engine import VPipeEngine

        return VPipeEngine
    if name == "VPipeModule":
        from ds_vpipe.engine.modules.partitioned import VPipeModule

        return VPipeModule
    if name == "WeightStashingOptimizer":
        from ds_vpipe.engine.weights.stashing import WeightStashingOptimizer

        return WeightStashingOptimizer
    if name == "StageStatistics":
        from ds_vpipe.engine.observe.statistics import StageStatistics

        return StageStatistics
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
