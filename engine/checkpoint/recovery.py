"""States in host memory from which a run goes on after a rank has failed, as if nothing had happened.

A checkpoint is taken in an empty pipeline; a state is taken while micro-batches are in flight, and empties nothing. All
ranks keep theirs at the same calls of ``train_batch()``, each when the call begins, with what the script has done since
the call before. At that moment stage s has run the forward passes of W_s later micro-batches, with the versions of
:func:`ds_vpipe.schedules.one_f_one_b.version_used`. So a state holds

* weights: those versions and the newest, each in a file of its own, written once;
* optimizer with master weights and loss scale, of ZeRO-1 this replica's part; learning rates and counts;
* random states, buffers, settings and extra state of layers and, of fp16, known overflows, as they are and as each
  of those passes has found them;
* sums of those passes' outputs: layers that keep something else give others when they run again, and a line says so.

After a restart all ranks take the newest state that all have kept. The first stage admits the micro-batches in flight
again, every stage runs their forward passes again with the versions, random states and buffers of the first time, and
from there on nothing differs from a run without a failure.

A rank's supervisor has the files (:mod:`ds_vpipe.kept_memory`): they outlive the rank, and end with the supervisor.
Stages are up to ceil((W_0 + 1) / M) updates apart, so the states of as many updates are kept.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import torch
from deepspeed.utils import logger
from torch import nn

from ds_vpipe.engine.checkpoint.parameter_states import load_packed
from ds_vpipe.engine.checkpoint.rank_state import random_of, restore_random
from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine
from ds_vpipe.engine.links.message import leaves
from ds_vpipe.engine.modules.built_layers import Settings, settings_of
from ds_vpipe.engine.stage import Stage
from ds_vpipe.engine.updates.optimizers import reset_of_powers
from ds_vpipe.errors import Refusal, VPipeError, one_line
from ds_vpipe.kept_memory import KeptFiles
from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.counts import kept_states, updates_apart
from ds_vpipe.schedules.one_f_one_b import Progress

_COUNTS = ("global_steps", "global_samples", "skipped_steps")
_BLOCK = 256  # words, whose sum stands for them
_SKIPPED_IN_A_ROW = 3


class Cut(NamedTuple):
    """A moment at which all ranks keep their state: before a call of ``train_batch()``, after an update."""

    update: int
    call: int  # of train_batch(), from 1; more than updates where data have ended


class _PassState(NamedTuple):
    """State of a rank before a forward pass."""

    random: dict[str, Any]
    buffers: dict[str, torch.Tensor]
    settings: Settings  # of layers, such as counters and modes
    extra: dict[str, bytes]  # extra state of layers, by their names
    offset: int  # forward passes so far, which seed layers
    peers: dict[str, Any] | None  # known overflows, which are sent along; with a dynamic loss scale


class Recovery:
    """States of one stage, kept while it trains, every so many updates; a watcher of its actions."""

    def __init__(self, engine: PatchedPipelineEngine, stage: Stage, kept: KeptFiles, every: int) -> None:
        self._engine, self._stage, self._kept, self._every = engine, stage, kept, every
        self._prefix = f"{stage.groups.name}/"
        self._call = 0
        self._states_before: dict[int, _PassState] = {}  # by micro-batch in flight
        self._sums: dict[int, list[int]] = {}  # of their outputs, by micro-batch in flight
        self._buffers: dict[str, torch.Tensor] = {}  # the latest copies
        self._versions: dict[int, str] = {}  # files of weights
        self._frozen: tuple[object, str] = (), ""  # marks of parameters that are not trained, and their file
        self._cuts: dict[Cut, set[str]] = {}  # files of every state
        self._begun = self._told = False
        self._skipped = 0
        self._to_run_again: dict[int, _PassState] = {}  # what the passes that are to be run again found at first
        self._first_sums: dict[int, list[int]] = {}  # of the outputs that those passes gave at first
        self._after_run_again: _PassState | None = None  # to go on from after the last of those passes
        self._recovered = False  # a state has been taken, and no batch has begun since
        self._reset_powers = reset_of_powers(engine)

    # Watching

    def before(self, action: Action) -> None:
        """Note what a forward pass finds; give one that is run again what it has found at first."""
        if action.kind is Kind.FORWARD:
            if action.index in self._to_run_again:
                self._restore_pass_state(self._to_run_again.pop(action.index))
            self._states_before[action.index] = self._pass_state()
        elif action.kind is Kind.STEP:
            self._reset_powers()

    def after(self, action: Action) -> None:
        """Go on from the moment of the state, after the last pass that is run again.

        Raises:
            VPipeError: a pass has changed parameters that are not trained, and has done it twice now.
        """
        if action.kind is Kind.FORWARD:
            self._add_sums(action)
        last = Kind.FORWARD if self._stage.is_last else Kind.SEND_ACT  # of what a pass has found something is sent
        state, passes = self._after_run_again, self._stage.first_after_recovery
        if action.kind is last and action.index + 1 == passes and state is not None:
            self._restore_pass_state(state)
            self._after_run_again = None
            if self._marks() != self._frozen[0]:
                raise VPipeError(
                    "recover(): got layers whose forward passes change parameters that are not trained, allowed are "
                    "buffers; register them with register_buffer()"
                )

    def _add_sums(self, action: Action) -> None:
        stage, size = self._stage, self._stage.pipeline.micro_batches
        output = stage.in_flight[stage.key(action)].output
        in_flight = action.index >= (stage.progress.completed // size + 1) * size  # when the next call begins
        if output is None or not (in_flight or action.index in self._first_sums):
            return  # None is that of the last stage, and of a pass that has failed
        sums = self._sums[action.index] = [_sum(leaf) for leaf in leaves(output) if leaf is not None and _is_sent(leaf)]
        if self._first_sums.pop(action.index, sums) != sums:
            self._first_sums.clear()
            logger.warning(
                f"ds_vpipe: recover(): on {self._stage.links.me} {action} gave another output than before the failure, "
                f"so the run is not what it would have been: its data are others, or a layer here or before it uses "
                f"what no state has, such as a list or a generator of its own, which get_extra_state() has to return"
            )

    def _pass_state(self) -> _PassState:
        module, found = self._stage.module, dict[str, torch.Tensor]()
        unshared = self._stage.weights.unshared
        for name, buffer in module.named_buffers(remove_duplicate=False):
            if unshared(buffer) is not buffer:  # a weight's memory, which has versions
                continue
            copy = self._buffers.get(name)  # changes are not always counted, such as those of normalisations
            if copy is None or copy.dtype != buffer.dtype or not torch.equal(copy, buffer):
                copy = self._buffers[name] = buffer.detach().clone()
            found[name] = copy
        # What has no name is the pipeline module, whose attributes are DeepSpeed's.
        settings = {place: value for place, value in settings_of(module).items() if place[0]}
        extra = {
            name: _as_bytes(name, part)
            for name, part in module.named_modules()
            if type(part).get_extra_state is not nn.Module.get_extra_state
            and type(part).set_extra_state is not nn.Module.set_extra_state
        }
        peers = self._stage.peers
        known = None if peers is None else peers.state()
        return _PassState(random_of(self._stage), found, settings, extra, module.micro_offset, known)

    def _restore_pass_state(self, found: _PassState) -> None:
        module, shared = self._stage.module, dict[int, torch.Tensor]()
        restore_random(self._stage, found.random)
        module.micro_offset = found.offset
        present = dict(module.named_buffers(remove_duplicate=False))
        for name, value in found.buffers.items():
            buffer, (holder, _, key) = present.get(name), name.rpartition(".")
            if buffer is None or buffer.dtype != value.dtype or not torch.equal(buffer, value):
                # Another one, since an earlier pass may need the tensor as it is.
                new = shared.setdefault(id(buffer), value.clone()) if buffer is not None else value.clone()
                module.get_submodule(holder)._buffers[key] = new
        for (name, key), setting in found.settings.items():
            vars(module.get_submodule(name))[key] = setting
        for name, state in found.extra.items():
            module.get_submodule(name).set_extra_state(pickle.loads(state))
        if self._stage.peers is not None and found.peers is not None:
            self._stage.peers.restore(found.peers)

    # Keeping

    def keep(self) -> None:
        """Keep the state of this moment, at the start of a call of ``train_batch()``, if it is one to be kept.

        Raises:
            VPipeError: there is no memory for it.
        """
        self._call += 1
        if self._recovered:  # the state of this moment is kept already, and has passes in flight that are to come
            self._recovered = False
            if self._after_run_again is not None and not self._to_run_again:
                self._restore_pass_state(self._after_run_again)
                self._after_run_again = None
            return
        stage, update = self._stage, self._engine.global_steps
        begin = time.perf_counter()
        with self._handing_over():
            if not self._begun:
                self._drop_all_but(set())
            size = self._write(update)
        if update and size and update % self._every == 0 and not self._told and self._engine.global_rank == 0:
            self._told, seconds = True, time.perf_counter() - begin
            states, _ = kept_states(stage.pipeline, stage.number, self._every)
            print(
                f"ds_vpipe: recovery: {stage.links.me} keeps up to {states} states in host memory; that "
                f"of update {update} is {size / 1e6:.1f} MB and took {seconds:.3f} s",
                flush=True,
            )

    def withdraw(self) -> None:
        """Give up the states of this update: the data have ended, and the script may do something about it."""
        update = self._engine.global_steps
        with self._handing_over():
            self._keep_only(cut for cut in self._cuts if cut.update != update)

    def forget(self) -> None:
        """Give up all states: the script goes on from elsewhere."""
        if not self._begun:
            return  # those of attempts before may still be taken
        self.emptied()
        self._cuts, self._versions, self._frozen = {}, {}, ((), "")
        with self._handing_over():
            self._drop_all_but(set())

    @contextmanager
    def _handing_over(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:  # the latter is torch's, of a file that cannot be written
            raise VPipeError(
                f"vpipe.recovery.every: got {self._every}, but {self._stage.links.me} could not keep its state of "
                f"update {self._engine.global_steps} ({error}); free memory, write a larger number, or remove the key"
            ) from error

    def emptied(self) -> None:
        """The pipeline has been emptied: what was to be run again will be run as if for the first time."""
        if self._recovered:
            self._call += 1  # the next state is another one than that which is kept
        if self._after_run_again is not None:
            self._restore_pass_state(self._after_run_again)
        self._to_run_again.clear()
        self._first_sums.clear()
        self._after_run_again, self._recovered, self._stage.first_after_recovery = None, False, 0
        if not self._stage.pipeline.vertical:
            self._stage.weights.keep_from(None)

    def _write(self, update: int) -> int:
        stage, every, size = self._stage, self._every, 0
        at = update * stage.pipeline.micro_batches
        lag = stage.pipeline.delays[stage.number]
        if (update + lag) // every * every >= update:  # a state that is to be kept will need them
            name = f"{self._prefix}weights {update} {self._call}"
            size += self._save(name, {name: p.detach() for name, p in self._parameters(trained=True)})
            self._versions[update] = name
        oldest = (update - updates_apart(stage.pipeline)) // every * every - every
        self._versions = {v: name for v, name in self._versions.items() if v >= update - lag}
        if update % every == 0:
            if stage.data_end is not None and stage.progress.limit == at:
                # The script's next iterator says what comes next, and may be another after a restart.
                self._skipped += 1
                if self._skipped == _SKIPPED_IN_A_ROW and self._engine.global_rank == 0:
                    logger.warning(
                        f"ds_vpipe: recovery: {self._skipped} states in a row have not been kept, because data ended "
                        f"there; pass one iterator over the whole data set, the same object in every call, or write "
                        f"another number for vpipe.recovery.every"
                    )
            else:
                self._skipped = 0
                size += self._write_state(Cut(update, self._call), at)
        self._keep_only(cut for cut in self._cuts if cut.update >= oldest)
        self._states_before = {index: found for index, found in self._states_before.items() if index >= at}
        self._sums = {index: sums for index, sums in self._sums.items() if index >= at}
        return size

    def _keep_only(self, cuts: Iterable[Cut]) -> None:
        self._cuts = {cut: self._cuts[cut] for cut in list(cuts)}
        self._drop_all_but({self._frozen[1], *self._versions.values()}.union(*self._cuts.values()))

    def _write_state(self, cut: Cut, at: int) -> int:
        engine, stage = self._engine, self._stage
        filled_from = at if stage.progress.limit == at or stage.pipeline.synchronous else stage.progress.filled_from
        # Passes of an incomplete batch at the end of the data have been undone, and will be run and undone again.
        undone = 0 if stage.data_end is None else len(stage.data_end.left_over)
        passes = range(at, stage.progress.forwarded + undone)
        oldest = max(filled_from // stage.pipeline.micro_batches, cut.update - stage.pipeline.delays[stage.number])
        versions = {version: self._versions[version] for version in range(oldest, cut.update + 1)}
        size = self._save_frozen()
        state = {
            "fits": self._form(),
            "filled_from": filled_from,
            "counts": {name: getattr(engine, name) for name in _COUNTS},
            "optimizer": engine.optimizer.state_dict(),
            "scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
            "found": [tuple(self._states_before[index]) for index in passes],
            "sums": {index: self._sums[index] for index in passes if index in self._sums},
            "now": tuple(self._pass_state()),
            "versions": versions,
            "frozen": self._frozen[1],
            "tied": stage.ties.known,
        }
        name = f"{self._prefix}state {cut.update} {cut.call}"
        size += self._save(name, state)
        self._cuts[cut] = {name, self._frozen[1], *versions.values()}
        return size

    def _save(self, name: str, tree: Any) -> int:
        return self._kept.keep(name, partial(torch.save, tree))

    def _save_frozen(self) -> int:
        """Keep the parameters that are not trained, once more if one has been changed or another is not trained."""
        marks = self._marks()
        if self._frozen[1] and marks == self._frozen[0]:
            return 0
        name = f"{self._prefix}frozen {self._engine.global_steps} {self._call}"
        self._frozen = marks, name
        return self._save(name, {name: p.detach() for name, p in self._parameters(trained=False)})

    def _marks(self) -> object:
        """Names and sums of the bytes of parameters that are not trained, since not all changes of them are counted."""
        return [(name, _sum(parameter)) for name, parameter in self._parameters(trained=False)]

    def _parameters(self, *, trained: bool) -> Iterator[tuple[str, nn.Parameter]]:
        mine = {id(parameter) for parameter in self._stage.weights.versions.trained}
        return ((n, p) for n, p in self._stage.module.named_parameters() if (id(p) in mine) is trained)

    def _form(self) -> dict[str, object]:
        """What has to be as it was for a state to fit."""
        module = self._stage.module
        optimizer = self._engine.optimizer, self._engine.basic_optimizer, self._stage.peers
        return {
            **asdict(self._stage.pipeline),
            "parameters": [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters()],
            "optimizer": [type(part).__qualname__ for part in optimizer],
        }

    # Recovery

    def recover(self) -> bool:
        """Take the newest state that all ranks have, on all ranks; False if there is none that fits."""
        words = (name.removeprefix(self._prefix).split() for name in self._kept.found if name.startswith(self._prefix))
        states = {Cut(int(update), int(call)) for kind, update, call in (w for w in words if w[0] == "state")}
        consensus, what = self._stage.consensus, "all ranks in recover()"
        found = consensus.everyone.gather(states, what)
        common = set.intersection(*found)
        cut = max(common, default=None)
        state: dict[str, Any] = {}
        unfit = "a rank has failed before all had kept one" if any(found) else None
        if cut is not None:
            with consensus.all_or_none("recover()"):
                state = self._load(f"{self._prefix}state {cut.update} {cut.call}")
            differ = next((key for key, value in self._form().items() if state["fits"][key] != value), None)
            unfit = next(filter(None, consensus.everyone.gather(differ, what)), None)
        if cut is None or unfit is not None:
            if unfit is not None and self._engine.global_rank == 0:
                why = unfit if cut is None else f"that of update {cut.update} had other {unfit}"
                logger.warning(f"ds_vpipe: recover(): no state fits, {why}; load a checkpoint, or begin anew")
            with self._handing_over():
                self._drop_all_but(set())
            return False
        with consensus.all_or_none("recover()"), torch.no_grad():
            self._restore(cut, state)
        known = consensus.pipeline.gather(state["tied"], "all stages in recover()")
        self._stage.ties.resume(cut.update, known, self._stage.weights.versions.point_to)
        if self._engine.global_rank == 0:
            print(f"ds_vpipe: recover(): on from update {cut.update}, kept in host memory", flush=True)
        return True

    def _drop_all_but(self, needed: set[str]) -> None:
        """Give up other files, what attempts before have left among them."""
        self._kept.drop(lambda name: name.startswith(self._prefix) and name not in needed)
        self._begun = True

    def _load(self, name: str) -> Any:
        with self._kept.open(name) as file:  # a rank of this run has written it
            return torch.load(file, weights_only=False)

    def _restore(self, cut: Cut, state: dict[str, Any]) -> None:
        engine, stage, versions = self._engine, self._stage, sorted(state["versions"])
        for name in (state["frozen"], state["versions"][versions[0]]):
            _copy(stage.module.named_parameters(), self._load(name))
        stage.weights.restart(versions[0])
        if len(versions) > 1:
            stage.weights.keep_from(versions[0])
        for version in versions[1:]:
            with stage.weights.update():
                _copy(stage.module.named_parameters(), self._load(state["versions"][version]))
        load_packed(engine.optimizer, state["optimizer"])
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(state["scheduler"])
        for count, value in state["counts"].items():
            setattr(engine, count, value)
        at = cut.update * stage.pipeline.micro_batches
        stage.progress = Progress(at, at, None, filled_from=state["filled_from"])
        self._to_run_again = {index: _PassState(*found) for index, found in enumerate(state["found"], at)}
        self._first_sums = state["sums"]
        stage.first_after_recovery, self._after_run_again = at + len(self._to_run_again), _PassState(*state["now"])
        self._restore_pass_state(self._after_run_again)  # for what the script does before the first batch
        self._call, self._recovered = cut.call - 1, True
        self._versions, self._frozen = dict(state["versions"]), (self._marks(), state["frozen"])
        self._cuts = {cut: {f"{self._prefix}state {cut.update} {cut.call}", state["frozen"], *self._versions.values()}}
        self._drop_all_but(self._cuts[cut])


def _copy(into: Iterable[tuple[str, torch.Tensor]], values: dict[str, torch.Tensor]) -> None:
    for name, tensor in into:
        if name in values:
            tensor.data.copy_(values[name])


def _is_sent(tensor: torch.Tensor) -> bool:
    """Whether the next stage can get it; else sending it ends the run with a line."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def _sum(tensor: torch.Tensor) -> int:
    """Checksum of the bytes: of the sums of their blocks, which takes a fraction of the time of one of the bytes."""
    content = tensor.detach().resolve_conj().resolve_neg()
    if content.storage_offset() % 4 or not content.is_contiguous():
        content = content.clone(memory_format=torch.contiguous_format)
    whole = content.view(-1).view(torch.uint8)
    words = whole[: len(whole) - len(whole) % (4 * _BLOCK)].view(torch.int32).view(-1, _BLOCK)
    blocks = words.sum(dim=1, dtype=torch.int64)
    return crc32(whole[words.numel() * 4 :].numpy().tobytes(), crc32(blocks.numpy().tobytes()))


def recovery_of(engine: PatchedPipelineEngine, stage: Stage, every: int) -> Recovery:
    """The states that the block asks for, every so many updates.

    Raises:
        VPipeConfigError: they would not be all that is needed to go on, or nobody would have them.
    """
    kept = KeptFiles.of(os.environ)
    for wrong, why, fix in (
        (kept is None, "nothing outlives this rank", "start with ds_vpipe.run --restarts N"),
        (stage.device.type != "cpu", f"the stage computes on {stage.device}, and states are the CPU's", ""),
        (engine.grid.get_slice_parallel_world_size() > 1, "a stage has tensor slices, whose states are not kept", ""),
        (engine.training_dataloader is not None, "training_data would begin anew", "pass an iterator to train_batch()"),
    ):
        if wrong:
            remedy = f"{fix}, or write 0" if fix else "write 0"
            raise Refusal("vpipe.recovery.every", every, "0 here", remedy, why).error()
    assert kept is not None
    return Recovery(engine, stage, kept, every)


def _as_bytes(name: str, layer: nn.Module) -> bytes:
    """Extra state of the layer ``name``."""
    try:
        return pickle.dumps(layer.get_extra_state())
    except Exception as error:
        raise VPipeError(
            f"vpipe.recovery: got extra state of {name} that cannot be kept ({one_line(error)}), allowed are values "
            f"that pickle takes; let get_extra_state() return such, or write 0 for vpipe.recovery.every"
        ) from error


def refuse_with_recovery(recovery: Recovery | None, call: str, given: object) -> None:
    """Refuse calls after which states would be of another pipeline."""
    if recovery is not None:
        why = "states are those of one split"
        raise Refusal(call, given, "no such call next to vpipe.recovery", "remove one of the two", why).error()
