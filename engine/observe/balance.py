"""Balance of a running pipeline: layers are measured, and all ranks decide alike whether they should move.

Nothing stands still for it. At a look every rank leaves what it has measured in the store; all ranks read it a fixed
number of updates later, by when every rank has made the update of the look and so left its own. That follows from the
order of the passes: a rank that has done update u has an activation or a gradient of every other stage, which that one
has sent after its update ``u - ceil((W_0 + 1) / M)``. What is decided depends on what was left alone
(:mod:`ds_vpipe.planning.replanning`).
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import mean, median
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.utils import logger
from torch.utils._pytree import tree_leaves

from ds_vpipe.config.replan import Replan
from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine
from ds_vpipe.engine.execution.live_moves import LiveMoves
from ds_vpipe.engine.execution.movable_layers import other_options, switches_of, unfit_configuration, unfit_layers
from ds_vpipe.engine.links.groups import Peer
from ds_vpipe.engine.modules.recompute import layer_numbers
from ds_vpipe.engine.modules.split_module import SplitModule
from ds_vpipe.engine.observe.layer_probe import LayerProbe, Sample
from ds_vpipe.engine.stage import Stage
from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.planning.depth_changes import DepthChoice, DepthDecision
from ds_vpipe.planning.devices import Devices
from ds_vpipe.planning.layer_profile import LayerProfile, ModelProfile
from ds_vpipe.planning.meters import Roofline
from ds_vpipe.planning.profiler import parameters_of, profile_layers
from ds_vpipe.planning.replanning import Decision, Looks, Work, decide, in_steps, joined, separated
from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.moves import Move, earliest_cut_over

_PASSES = (Kind.FORWARD, Kind.BACKWARD)
_KEPT = 2  # looks whose measurements stay in the store


class Balance:
    """Watcher of one stage that measures its layers, and the decisions of the pipeline.

    Args:
        engine: DeepSpeed's.
        stage: of this rank.
        moves: which carry out decisions while training goes on.
        settings: when to look, and what a move has to gain.
        devices: budgets and links.
        chooses_ratio: whether recomputation is the planner's to choose.
        depths: what is known of depths that follow the times of passes; None if they are fixed.
        note: gets a line for each event.

    Attributes:
        decisions: on the split made so far, oldest first; the same on all ranks.
        depth_decisions: likewise on depths.
        moves: decisions that were carried out: the update, seconds of the move, and measured seconds per micro-batch
            before and afterwards, None as long as they are not known.
        steps: moves of single layers so far, each with the update after which it was given.

    Raises:
        VPipeConfigError: the layers cannot be timed.
    """

    def __init__(
        self,
        engine: PatchedPipelineEngine,
        stage: Stage,
        moves: LiveMoves,
        settings: Replan,
        devices: Devices,
        chooses_ratio: bool,
        depths: DepthChoice | None,
        note: Callable[[str], None],
    ) -> None:
        self._engine, self._stage, self._settings, self._devices = engine, stage, settings, devices
        self._live = moves
        self.chooses_ratio, self.depths, self._note = chooses_ratio, depths, note
        self._probe = LayerProbe(stage.device)
        self._looks = Looks.of(stage.pipeline, settings.every, engine.global_steps)
        self._counted = 0  # looks so far
        self._batches: list[float] = []  # seconds of calls of train_batch() since then
        self._updates: list[float] = []  # seconds of the optimizer's steps
        self._step_began = 0.0
        self._known: Work | None = None
        self._sizes: dict[Any, ModelProfile] = {}
        self._move_s: float | None = None
        self._splits: set[tuple[int, ...]] = set()  # that layers have moved away from
        self._pace = 0.0  # measured seconds per micro-batch at the last look
        self._under_way: Decision | None = None  # whose steps are being made
        self._begun = 0.0
        self._left: deque[Move] = deque()
        self.decisions: list[Decision] = []
        self.depth_decisions: list[DepthDecision] = []
        self.steps: list[tuple[int, Move]] = []
        self.moves: list[dict[str, Any]] = []
        split = isinstance(stage.module, SplitModule)
        if split and devices.budget is not None:
            raise VPipeConfigError(
                f"vpipe.replan.every: got {settings.every} for a plain module with {devices.budget} bytes of memory "
                f"per stage, allowed is no limit, on the CPU without vpipe.memory_budget, since the activations of "
                f"pieces are not known; remove one of them"
            )
        if not split and type(stage.module).forward is not PipelineModule.forward:
            raise VPipeConfigError(
                f"vpipe.replan.every: got {settings.every} for a {type(stage.module).__name__} with a forward of its "
                f"own, allowed is PipelineModule's, whose layers can be timed one by one; remove the key"
            )

    # Measurement

    def before(self, action: Action) -> None:
        """Begin to measure a pass or an update."""
        if action.kind in _PASSES and self._is_sampled(action.index):
            self._probe.begin(self._stage.module, action.index, action.kind is Kind.FORWARD)
        elif action.kind is Kind.STEP:
            self._step_began = time.perf_counter()

    def after(self, action: Action) -> None:
        """End of what :meth:`before` has begun."""
        if action.kind in _PASSES and self._is_sampled(action.index):
            self._probe.end(self._stage.module, action.index, action.kind is Kind.FORWARD)
        elif action.kind is Kind.STEP:
            self._updates.append(time.perf_counter() - self._step_began)

    def start_over(self) -> None:
        """Forget measurements of what has changed since; all ranks call this after the same update."""
        self._probe.forget()
        self._batches, self._updates = [], []
        self._looks = Looks.of(self._stage.pipeline, self._settings.every, self._engine.global_steps)
        self._under_way = None
        self._left.clear()

    def _is_sampled(self, index: int) -> bool:
        batch, first = divmod(index, self._stage.pipeline.micro_batches)
        return first == 0 and batch % self._looks.stride == 0 and self._under_way is None

    def _profile(self) -> ModelProfile | None:
        """Profile of this stage's layers, the medians of all samples; None without any."""
        stage, module, probe = self._stage, self._stage.module, self._probe
        samples = [sample for sample in probe.samples if probe.is_done(sample)]
        if not samples:
            return None
        newest, numbers, layers = samples[-1], layer_numbers(module), []
        sizes = self._bytes(newest)
        weights = [parameters_of(layer) for layer in module.forward_funcs]
        trained = [_bytes_of(p for p in found if p.requires_grad) for found in weights]
        # In bsp an update also waits for other stages, and on a device it is only queued.
        timed = stage.asynchronous and stage.device.type == "cpu" and self._updates and sum(trained)
        update_s = median(self._updates) / stage.pipeline.micro_batches if timed else 0.0
        for position, layer in enumerate(module.forward_funcs):
            is_last = stage.is_last and position == len(numbers) - 1
            seconds = [probe.seconds(sample, position, is_last) for sample in samples]
            costs = LayerProfile(
                name=type(layer).__name__,
                forward_s=median(forward for forward, _ in seconds),
                backward_s=median(backward for _, backward in seconds),
                parameter_bytes=_bytes_of(weights[position]),
                activation_bytes=0,
                boundary_bytes=newest.output_bytes[position],
                frozen_bytes=_bytes_of(weights[position]) - trained[position],
                largest_weight_bytes=max((_bytes_of([p]) for p in weights[position] if p.requires_grad), default=0),
            )
            if sizes is not None:
                times = {name: getattr(costs, name) for name in ("forward_s", "backward_s", "boundary_bytes")}
                costs = dataclasses.replace(sizes.layers[position], **times)
            share = update_s * trained[position] / sum(trained) if timed else 0.0
            layers.append(dataclasses.replace(costs, backward_s=costs.backward_s + share))
        return ModelProfile(
            layers=tuple(layers),
            input_bytes=_bytes_of(leaf for leaf in tree_leaves(newest.inputs) if isinstance(leaf, torch.Tensor)),
            micro_batch_size=self._engine.train_micro_batch_size_per_gpu(),
            device=stage.device.type,
            dtype="float32",
            source="measured",
        )

    def _bytes(self, sample: Sample) -> ModelProfile | None:
        """Bytes of this stage's layers for such inputs, computed once; None where memory has no limit."""
        if self._devices.budget is None:
            return None
        module, inputs = self._stage.module, sample.inputs
        shapes = [(tuple(leaf.shape), leaf.dtype) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        frozen = tuple(p.requires_grad for layer in module.forward_funcs for p in parameters_of(layer))
        key = (module._local_start, module._local_stop, *shapes, frozen)
        if key not in self._sizes:
            layers = list(module.forward_funcs)
            try:
                self._sizes[key] = profile_layers(layers, inputs, roofline=Roofline())
            except (NotImplementedError, RuntimeError):  # a layer looks at values
                with self._stage.random_states.kept(self._stage.device):
                    self._sizes[key] = profile_layers(
                        layers, inputs, device=self._stage.device, micro_batches=1, warm_up=0
                    )
        return self._sizes[key]

    # Decisions

    def after_batch(self, seconds: float) -> Decision | DepthDecision | None:
        """Count a batch; at a look leave the measurements, some updates later decide, and make steps one by one.

        Returns:
            A decision for which the pipeline has to be emptied, if one has been made.

        Raises:
            PipelinePeerError: another rank has not left its own in time.
        """
        self._batches.append(seconds)
        update = self._engine.global_steps
        if self._under_way is not None:
            self._go_on(self._under_way, update)
            return None
        due = self._looks.next(update)
        if due == "leave":
            self._leave()
        if due != "read":
            return None
        decision = self._decide(update)
        if decision is None or decision.stays or self._settings.dry_run:
            return None
        if isinstance(decision, DepthDecision):
            return decision
        self._splits.add(decision.partition)
        if not decision.steps:
            return decision
        self._begun, self._under_way, self._left = time.perf_counter(), decision, deque(decision.steps)
        self._go_on(decision, update)
        return None

    def carried_out(self, decision: Decision, seconds: float) -> None:
        """Count a move that took so many seconds here."""
        self._move_s = seconds
        self._count(decision, seconds, f"{seconds:.2f} s")

    def _go_on(self, decision: Decision, update: int) -> None:
        """Begin the next step if the one before is done on all ranks, which all know without asking."""
        self._live.settle(update)
        if self._live.move is not None:
            return
        if self._left:
            step, pipeline = self._left.popleft(), self._stage.pipeline
            cut_over = earliest_cut_over(pipeline, step.source, step.target, update)
            move = dataclasses.replace(step, micro_batch=cut_over)
            self._live.begin(move)
            self.steps.append((update, move))
        else:
            self.start_over()
            took = f"{len(decision.steps)} steps and {update - decision.update} updates"
            self._count(decision, time.perf_counter() - self._begun, took)

    def _count(self, decision: Decision, seconds: float, took: str) -> None:
        self.moves.append({"update": decision.update, "seconds": seconds, "before_s": self._pace, "after_s": None})
        self._say(f"replan at update {decision.update}: moved in {took}")

    def _leave(self) -> None:
        profile, rank = self._profile(), self._engine.global_rank
        self._counted += 1
        # The first batch after a change has filled the pipeline.
        filled = int(len(self._batches) > 1 and self._engine.global_steps - len(self._batches) == self._looks.since)
        content = {
            "stage": self._stage.number,
            "profile": None if profile is None else profile.text(),
            "batch_s": median(self._batches),
            "mean_s": mean(self._batches[filled:]),
            "passes": self._passes(),
            "move_s": self._move_s,
            "unfit": self._unfit(),
        }
        self._stage.groups.tell(_key(self._counted, rank), json.dumps(content))
        if self._counted > _KEPT:
            self._stage.groups.forget(_key(self._counted - _KEPT, rank))
        self._probe.samples = []
        self._batches, self._updates = [], []

    def _passes(self) -> list[tuple[float, float]]:
        """Seconds of the passes of measured micro-batches, with their share of an update, if depths follow them."""
        if self.depths is None:
            return []
        timed = self._updates and self._stage.device.type == "cpu"
        update_s = median(self._updates) / self._stage.pipeline.micro_batches if timed else 0.0
        found = (self._probe.passes(sample) for sample in self._probe.samples if self._probe.is_done(sample))
        return [(forward, backward + update_s) for forward, backward in found]

    def _unfit(self) -> tuple[str | None, dict[int, str], dict[str, bool]] | None:
        """What is against moves from this stage while training goes on, if they are wanted."""
        if self._settings.moves != "live":
            return None
        reason = unfit_configuration(self._engine, self._stage)
        if reason is not None:
            return reason, {}, {}
        return None, unfit_layers(self._stage.module), switches_of(self._engine.optimizer.param_groups[0])

    def _with_steps(self, decision: Decision, work: Work, unfit: Sequence[Any]) -> Decision:
        """``decision`` with its steps, or with the reason why the pipeline has to be emptied for it."""
        if decision.stays or self._settings.moves != "live":
            return decision
        reason = next((one for one, *_ in unfit if one is not None), None)
        if reason is None:
            reason = other_options([switches for *_, switches in unfit])
        if reason is not None:
            return dataclasses.replace(decision, empties=reason)
        found = in_steps(decision, work, self._stage.pipeline, self._devices)
        layers = {int(number): why for _, reasons, _ in unfit for number, why in reasons.items()}
        stay = next((layers[step.layer] for step in found.steps if step.layer in layers), None)
        return found if stay is None else dataclasses.replace(decision, empties=stay)

    def _decide(self, update: int) -> Decision | DepthDecision | None:
        engine, stage, pipeline = self._engine, self._stage, self._stage.pipeline
        topology = engine.grid.topology()
        peers = [Peer(topology.get_coord(rank).pipe, rank) for rank in range(engine.grid.world_size)]
        found = [json.loads(stage.groups.ask(_key(self._counted, peer.rank), peer)) for peer in peers]
        self._pace = max(one["batch_s"] for one in found) / pipeline.micro_batches
        if self.moves and self.moves[-1]["after_s"] is None:
            last = self.moves[-1]
            last["after_s"] = self._pace
            self._say(
                f"replan at update {last['update']}: {1e3 * last['before_s']:.2f} -> {1e3 * self._pace:.2f} ms per "
                f"micro-batch measured"
            )
        profiles = [(one["stage"], one["profile"]) for one in found]
        if any(profile is None for _, profile in profiles):
            self._say(f"replan at update {update}: {list(pipeline.partition or ())} stays: nothing was measured")
            return None
        measured = joined((number, ModelProfile.from_text(profile)) for number, profile in profiles)
        self._known = separated(measured, pipeline.partition or (), self._known)
        decision = decide(
            self._known,
            pipeline,
            self._devices,
            update=update,
            every=self._settings.every,
            threshold=self._settings.threshold,
            chooses_ratio=self.chooses_ratio,
            move_s=max((one["move_s"] for one in found if one["move_s"] is not None), default=None),
            left=self._splits,
        )
        decision = self._with_steps(decision, self._known, [one["unfit"] for one in found])
        self.decisions.append(decision)
        self._say(decision.line())
        if engine.global_rank == 0 and engine.monitor.enabled:
            values = {"planned_s": decision.seconds, "better_s": decision.better_seconds, "measured_s": self._pace}
            events = [(f"Train/Pipeline/replan/{name}", value, engine.global_samples) for name, value in values.items()]
            engine.monitor.write_events(events)
        if self.depths is None:
            return decision
        if not decision.stays:
            self.depths.deepened = None  # another split has another pace
            return decision
        return self._decide_depths(self.depths, update, found)

    def _decide_depths(self, choice: DepthChoice, update: int, found: list[dict[str, Any]]) -> DepthDecision:
        assert self._known is not None
        engine, pipeline = self._engine, self._stage.pipeline
        passes = [(one["stage"], one["passes"]) for one in found]
        mean_s = max(one["mean_s"] for one in found) / pipeline.micro_batches
        decision = choice.decide(pipeline, self._known, self._devices, passes, update=update, measured_s=mean_s)
        if self._settings.dry_run:
            choice.deepened = None
        self.depth_decisions.append(decision)
        self._say(decision.line())
        if engine.global_rank == 0 and engine.monitor.enabled:
            engine.monitor.write_events(
                [("Train/Pipeline/replan/depth", decision.better_depths[0], engine.global_samples)]
            )
        return decision

    def _say(self, line: str) -> None:
        self._note(line)
        if self._engine.global_rank == 0:
            logger.info(f"ds_vpipe: {line}")


def _key(look: int, rank: int) -> str:
    return f"replan {look} of rank {rank}"


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
