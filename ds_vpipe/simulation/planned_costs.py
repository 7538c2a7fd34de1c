"""What a plan says of each part of the model, as the simulator wants it.

So that a plan can be simulated: closed forms say how fast the steady state is, the simulation shows filling, draining
and waiting, and when how much memory is held.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_vpipe.planning.plan import Plan
from ds_vpipe.planning.residency import Residency
from ds_vpipe.simulation.stage_cost import StageCost


def stage_costs(plan: Plan, residencies: Sequence[Residency], update_s: float = 0.0) -> tuple[StageCost, ...]:
    """Costs of every part of ``plan``, one way of each transfer being half of its round trip.

    Args:
        plan: From :func:`ds_vpipe.planning.planner.plan` or :func:`ds_vpipe.planning.planner.predict`.
        residencies: What stays on each part, from the same planner's pipeline.
        update_s: Seconds of an update of all parts of a rank together, which plans do not count.
    """
    costs = []
    for part, (stage, there) in enumerate(zip(plan.stages, residencies, strict=True)):
        memory = stage.memory
        before = plan.stages[part - 1].transfer_s / 2 if part else 0.0
        costs.append(
            StageCost(
                forward_s=stage.forward_s,
                backward_s=stage.backward_s + stage.recompute_s,
                send_activation_s=stage.transfer_s / 2,
                send_gradient_s=before,
                update_s=update_s / plan.virtual_stages,
                activation_bytes=memory.activations // there.in_flight,
                static_bytes=memory.static - memory.versions,
                version_bytes=memory.versions // max(1, there.versions - 1),
                recompute_bytes=memory.recompute + memory.workspace,
            )
        )
    return tuple(costs)
