"""What a plan says of each part of the model, as the simulator wants it.

So that a plan can be simulated: closed forms say how fast the steady state is, the simulation shows filling, draining
and waiting, and when how much memory is held.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_vpipe.planning.plan import Plan
from ds_vpipe.schedules.counts import StageLoad
from ds_vpipe.simulation.stage_cost import StageCost


def stage_costs(plan: Plan, loads: Sequence[StageLoad], update_s: float = 0.0) -> tuple[StageCost, ...]:
    """Costs of every part of ``plan``, one way of each transfer being half of its round trip.

    Args:
        plan: From :func:`ds_vpipe.planning.planner.plan` or :func:`ds_vpipe.planning.planner.predict`.
        loads: Most that each part holds, for the same pipeline and devices.
        update_s: Seconds of an update of all parts of a rank together, which plans do not count.
    """
    costs = []
    for part, (stage, load) in enumerate(zip(plan.stages, loads, strict=True)):
        memory = stage.memory
        before = plan.stages[part - 1].transfer_s / 2 if part else 0.0
        costs.append(
            StageCost(
                forward_s=stage.forward_s,
                backward_s=stage.backward_s + stage.recompute_s,
                send_activation_s=stage.transfer_s / 2,
                send_gradient_s=before,
                update_s=update_s / plan.pipeline.virtual_stages,
                activation_bytes=memory.activations // load.in_flight,
                static_bytes=memory.static - memory.versions,
                version_bytes=memory.versions // max(1, load.versions - 1),
                recompute_bytes=memory.recompute + memory.workspace,
            )
        )
    return tuple(costs)
