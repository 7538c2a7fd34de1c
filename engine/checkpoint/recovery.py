"""States in host memory from which a run goes on after a rank has failed, as if nothing had happened.

A checkpoint is taken in an empty pipeline; a state is taken while micro-batches are in flight, and empties nothing. All
ranks keep theirs for the same updates, each when its call of ``train_batch()`` after the update begins, with what the
script has done in between. At that moment stage s has run the forward passes of W_s later micro-batches, with the
versions of :func:`ds_vpipe.schedules.one_f_one_b.version_used`. So a state holds

* weights: those versions and the newest, each in a file of its own, written once;
* the rest: optimizer, learning rates, counts; buffers as they were before the first of those passes, and the random
  states before each of them.

After a restart all ranks take the newest update that all have kept. The first stage admits the micro-batches in flight
again, every stage runs their forward passes again with the versions, random states and buffers of the first time, and
from there on nothing differs from a run without a failure.

A rank's supervisor has the files (:mod:`ds_vpipe.kept_memory`), so that they outlive the rank and no supervisor.
Stages are up to ceil((W_0 + 1) / M) updates apart, for which states are kept back.
"""

from __future__ import annotations

import time
from dataclasses import astuple
from functools import partial
from typing import Any, NamedTuple

import torch
from deepspeed.utils import logger

from ds_vpipe.engine.checkpoint.rank_state import random_of, restore_random
from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine
from ds_vpipe.engine.stage import Stage
from ds_vpipe.errors import Refusal, VPipeConfigError, VPipeError
from ds_vpipe.kept_memory import KeptFiles
from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.one_f_one_b import Progress, version_used

_COUNTS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


class Cut(NamedTuple):
    """A moment at which all ranks keep their state: after an update, with the refill that versions follow from."""

    update: int
    refill: int


class _Before(NamedTuple):
    """What a forward pass has found."""

    random: dict[str, Any]
    offset: int  # forward passes so far, which seed layers
    buffers: dict[str, torch.Tensor]  # where the first pass of a batch is; else empty


class Recovery:
    """States of one stage, kept while it trains; a watcher of its actions.

    Args:
        engine: of the stage.
        stage: whose state it is.
        kept: files that outlive this process.
        every: updates between two states.
    """

    def __init__(self, engine: PatchedPipelineEngine, stage: Stage, kept: KeptFiles, every: int) -> None:
        self._engine, self._stage, self._kept, self._every = engine, stage, kept, every
        self._prefix = f"{stage.groups.name}/"
        self._before: dict[int, _Before] = {}  # by micro-batch in flight
        self._again: dict[int, dict[str, Any]] = {}  # random states before passes that are to be run again
        self._now: dict[str, Any] | None = None  # and after them
        self._recovered = False  # and no batch has begun since
        self._versions: dict[int, str] = {}  # files of weights
        self._frozen: tuple[tuple[tuple[int, int], ...], str] = (), ""
        self._cuts: dict[Cut, set[str]] = {}  # files of every state
        self._begun = False

    # Watching

    def before(self, action: Action) -> None:
        """Note what a forward pass finds; give one that is run again what it has found at first."""
        if action.kind is Kind.FORWARD:
            stage, index = self._stage, action.index
            if index in self._again:
                restore_random(stage, self._again.pop(index))
            buffers = {} if index % stage.pipeline.micro_batches else self._buffers()
            self._before[index] = _Before(random_of(stage), stage.module.micro_offset, buffers)

    def after(self, action: Action) -> None:
        """Go on from the random states of the state's moment, after the last pass that is run again."""
        if action.kind is Kind.FORWARD and action.index + 1 == self._stage.again and self._now is not None:
            restore_random(self._stage, self._now)
            self._now = None

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {name: buffer.clone() for name, buffer in self._stage.module.named_buffers()}

    # Keeping

    def keep(self) -> None:
        """Keep the state of this moment, between two batches, if it is one that is to be kept.

        Raises:
            VPipeError: there is no memory for it.
        """
        if self._recovered:  # the state of this moment is kept already, and it has passes in flight that are to come
            self._recovered = False
            if self._now is not None and not self._again:
                restore_random(self._stage, self._now)
                self._now = None
            return
        if not self._begun:
            self._begin(None)
        stage, update = self._stage, self._engine.global_steps
        at = update * stage.pipeline.micro_batches
        if stage.data_end is not None and stage.progress.limit == at:
            return  # the script's next iterator says what comes next, and may be another one after a restart
        begin = time.perf_counter()
        try:
            size = self._write(update, at)
        except OSError as error:
            raise VPipeError(
                f"vpipe.recovery.every: got {self._every}, but {stage.links.me} could not keep its state of update "
                f"{update} ({error}); free memory, write a larger number, or remove the key"
            ) from error
        if size and len(self._cuts) == 1 and self._engine.global_rank == 0:
            states, seconds = self._kept_back // self._every + 2, time.perf_counter() - begin
            print(
                f"ds_vpipe: recovery: {stage.links.me} keeps up to {states} states in host memory, the first of "
                f"{size / 1e6:.1f} MB, in {seconds:.3f} s",
                flush=True,
            )

    @property
    def _kept_back(self) -> int:
        """Updates for which other stages may be behind this one."""
        pipeline = self._stage.pipeline
        return -(-(pipeline.depths[0] + 1) // pipeline.micro_batches)

    def _write(self, update: int, at: int) -> int:
        stage, every = self._stage, self._every
        refill = at if stage.progress.limit == at or stage.pipeline.synchronous else stage.progress.refill
        lag = -(-self._depth // stage.pipeline.micro_batches)
        size = 0
        if (update + lag) // every * every >= update:  # a state that is to be kept will need them
            name = f"{self._prefix}weights {update} {refill}"
            size += self._save(name, self._trained())
            self._versions[update] = name
        if update % every == 0:
            size += self._write_state(Cut(update, refill), at)
        oldest = (update - self._kept_back) // every * every - every
        self._cuts = {cut: files for cut, files in self._cuts.items() if cut.update >= oldest}
        self._versions = {version: name for version, name in self._versions.items() if version >= update - lag}
        needed = {*self._versions.values(), *(name for files in self._cuts.values() for name in files)}
        self._kept.drop(lambda name: name.startswith(self._prefix) and name not in needed)
        self._before = {index: before for index, before in self._before.items() if index >= at}
        return size

    def _write_state(self, cut: Cut, at: int) -> int:
        engine, stage = self._engine, self._stage
        before = [self._before[index] for index in range(at, stage.progress.forwarded)]
        oldest = version_used(at, self._depth, stage.pipeline.micro_batches, cut.refill)
        versions = {version: self._versions[version] for version in range(oldest, cut.update + 1)}
        size = self._save_frozen()
        state = {
            "pipeline": astuple(stage.pipeline),
            "counts": {name: getattr(engine, name) for name in _COUNTS},
            "optimizer": engine.optimizer.state_dict(),
            "scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
            "buffers": before[0].buffers if before else self._buffers(),
            "offset": before[0].offset if before else stage.module.micro_offset,
            "random": [*(one.random for one in before), random_of(stage)],
            "versions": versions,
            "frozen": self._frozen[1],
            "tied": stage.ties.known,
        }
        name = f"{self._prefix}state {cut.update} {cut.refill}"
        size += self._save(name, state)
        self._cuts[cut] = {name, self._frozen[1], *versions.values()}
        return size

    def _save(self, name: str, tree: Any) -> int:
        return self._kept.keep(name, partial(torch.save, tree))

    def _save_frozen(self) -> int:
        """Keep the parameters that are not trained, once more if one has been changed or another is not trained."""
        trained = {id(parameter) for parameter in self._stage.weights.versions.trained}
        found = {name: p.detach() for name, p in self._stage.module.named_parameters() if id(p) not in trained}
        marks = tuple((value.untyped_storage()._cdata, value._version) for value in found.values())
        if self._frozen[1] and marks == self._frozen[0]:
            return 0
        name = f"{self._prefix}frozen {self._engine.global_steps}"
        self._frozen = marks, name
        return self._save(name, found)

    def _trained(self) -> dict[str, torch.Tensor]:
        trained = {id(parameter) for parameter in self._stage.weights.versions.trained}
        return {name: p.detach() for name, p in self._stage.module.named_parameters() if id(p) in trained}

    @property
    def _depth(self) -> int:
        """Forward passes that may lie between a version and its use."""
        pipeline = self._stage.pipeline
        return 0 if pipeline.synchronous else pipeline.depths[0 if pipeline.vertical else self._stage.number]

    # Recovery

    def recover(self) -> bool:
        """Take the newest state that all ranks have, on all ranks; False if there is none.

        Raises:
            VPipeError: sizes or the split are others than the state's.
            PipelinePeerError: this happened on another rank, or a rank is lost or did not answer in time.
        """
        words = (name.removeprefix(self._prefix).split() for name in self._kept.found if name.startswith(self._prefix))
        states = {Cut(int(update), int(refill)) for kind, update, refill in (w for w in words if w[0] == "state")}
        found = self._stage.consensus.of_all(states, "all ranks in recover()")
        common = set.intersection(*found)
        if not common:
            if any(found) and self._engine.global_rank == 0:
                logger.warning("ds_vpipe: recover(): no state that all ranks have; load a checkpoint, or begin anew")
            self._begin(None)
            return False
        cut = max(common)
        with self._stage.consensus.all_or_none("recover()"), torch.no_grad():
            received = self._restore(cut)
        known = self._stage.consensus.of_stages(received, "all stages in recover()")
        self._stage.ties.resume(cut.update, known, self._stage.weights.versions.point_to)
        if self._engine.global_rank == 0:
            print(f"ds_vpipe: recover(): on from update {cut.update}, kept in host memory", flush=True)
        return True

    def _begin(self, cut: Cut | None) -> None:
        """Give up what attempts before have left, but for one state."""
        needed = set() if cut is None else self._cuts[cut]
        self._kept.drop(lambda name: name.startswith(self._prefix) and name not in needed)
        self._begun = True

    def _load(self, name: str) -> Any:
        with self._kept.open(name) as file:  # a rank of this run has written it
            return torch.load(file, weights_only=False)

    def _restore(self, cut: Cut) -> dict[int, int]:
        """Take a state; returns what copies of tied weights had received."""
        engine, stage = self._engine, self._stage
        module, pipeline = stage.module, stage.pipeline
        name = f"{self._prefix}state {cut.update} {cut.refill}"
        state = self._load(name)
        if state["pipeline"] != astuple(pipeline):
            raise VPipeError(
                f"recover(): got a state of {state['pipeline']}, allowed is one of this pipeline, {astuple(pipeline)}; "
                f"set batch size and depths before the call as they were"
            )
        parameters, versions = dict(module.named_parameters()), sorted(state["versions"])
        for file in (state["frozen"], state["versions"][versions[0]]):
            _copy(parameters, self._load(file))
        _copy(dict(module.named_buffers()), state["buffers"])
        stage.weights.restart(versions[0])
        if len(versions) > 1:
            stage.weights.keep_from(versions[0])
        for version in versions[1:]:
            with stage.weights.update():
                _copy(parameters, self._load(state["versions"][version]))
        engine.optimizer.load_state_dict(state["optimizer"])
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(state["scheduler"])
        for count, value in state["counts"].items():
            setattr(engine, count, value)
        at = cut.update * pipeline.micro_batches
        module.micro_offset = state["offset"]
        stage.progress = Progress(at, at, None, refill=cut.refill)
        *again, self._now = state["random"]
        stage.again, self._again = at + len(again), dict(enumerate(again, at))
        self._versions, self._frozen = dict(state["versions"]), ((), "")
        self._cuts = {cut: {name, state["frozen"], *state["versions"].values()}}
        self._recovered = True
        self._begin(cut)
        tied: dict[int, int] = state["tied"]
        return tied


def _copy(into: dict[str, Any], values: dict[str, torch.Tensor]) -> None:
    for name, value in values.items():
        into[name].data.copy_(value)


def recovery_of(engine: PatchedPipelineEngine, stage: Stage, every: int, kept: KeptFiles | None) -> Recovery | None:
    """The states that the block asks for; None if it asks for none.

    Raises:
        VPipeConfigError: they would not be all that is needed to go on, or nobody would have them.
    """
    if not every:
        return None
    for wrong, there, allowed in (
        (stage.device.type != "cpu", f"stages on {stage.device}", "the CPU"),
        (engine.grid.get_slice_parallel_world_size() > 1, "tensor slices", "none"),
    ):
        if wrong:
            line = f"vpipe.recovery.every: got {every} and {there}, allowed next to it: {allowed}; write 0"
            raise VPipeConfigError(line)
    if kept is None:
        why, fix = "nothing outlives this rank", "start with ds_vpipe.run --restarts N, or write 0"
        raise Refusal("vpipe.recovery.every", every, "a rank with a supervisor", fix, why).error()
    return Recovery(engine, stage, kept, every)


def refuse_with_recovery(recovery: Recovery | None, call: str, given: object) -> None:
    """Refuse calls after which states would be of another pipeline.

    Raises:
        VPipeConfigError: states are kept.
    """
    if recovery is not None:
        why = "states are those of one split"
        raise Refusal(call, given, "no such call next to vpipe.recovery", "remove one of the two", why).error()
