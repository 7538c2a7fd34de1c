"""Checkpoints of an asynchronous pipeline: one version per stage, written whole or not at all, resumed exactly.

The files are DeepSpeed's own. Beside them every rank writes what they leave out: random states, the
number of forward passes (which seeds layers), and what is known of other stages' updates. So going on
after a save and going on from the saved checkpoint are the same training, bit for bit.
"""

import os
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from copy import deepcopy
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

from deepspeed.pipe import PipelineModule
from deepspeed.utils import logger

from ds_vpipe.checkpoints.damage import files_of, refuse_damage, share_of
from ds_vpipe.checkpoints.pipeline_checkpoint import names_layer
from ds_vpipe.engine.checkpoint import rank_state, reshape
from ds_vpipe.engine.checkpoint.folders import clean, put_in_place, put_own_in_place, recover, to_disk, write_latest
from ds_vpipe.engine.checkpoint.parameter_states import with_owners_states
from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine
from ds_vpipe.engine.execution.drain import restart_at
from ds_vpipe.engine.modules.recompute import layer_numbers
from ds_vpipe.engine.stage import Stage
from ds_vpipe.engine.updates.tied import tied_stages
from ds_vpipe.errors import PipelinePeerError, Refusal, VPipeError


class Checkpoints:
    """Checkpoints of one stage, saved and loaded at rest. DeepSpeed's engine writes and reads most files."""

    def __init__(self, engine: PatchedPipelineEngine, stage: Stage) -> None:
        self._engine, self._stage = engine, stage
        self._unwritten: Exception | None = None
        self._began = time.time()
        self._loaded: dict[str, Any] = {}  # what the latest load has returned of the engine's own

    def save(
        self,
        deepspeed_save: Callable[..., bool],
        save_dir: str,
        tag: str | None,
        client_state: dict[str, Any] | None,
        save_latest: bool,
        exclude_frozen_parameters: bool,
    ) -> str:
        """Save by DeepSpeed's ``save_checkpoint()``, under another name until the folder is complete.

        Errors are those of :meth:`.VPipeEngine.save_checkpoint`.

        Returns:
            The tag.
        """
        engine, stage, all_or_none = self._engine, self._stage, self._stage.consensus.all_or_none
        if stage.pipeline.num_stages > 1 and stage.asynchronous and stage.loss_scaling is not None:
            # DeepSpeed expects the same loss scaler on every stage: the last one's.
            what = "all stages to agree on what a checkpoint holds"
            stage.loss_scaling.restore(stage.consensus.pipeline.gather(stage.loss_scaling.state(), what)[-1])
        # A script may pass back what load_checkpoint() returned, with the engine's ds_config and ds_version in it.
        given, loaded = client_state or {}, self._loaded
        client_state = {key: value for key, value in given.items() if key not in loaded or value != loaded[key]}
        save_dir, tag, mark = self._agreed_folder(save_dir, tag, client_state)
        folder = Path(save_dir, tag)
        unfinished, what = folder.with_name(f".{folder.name}.{mark}.unfinished"), f"save_checkpoint({str(folder)!r})"
        with all_or_none(what):
            if engine.global_rank == 0:
                unfinished.mkdir(parents=True)
                clean(folder, self._began)  # what was interrupted may fill the disk
        name = os.path.join(os.path.dirname(tag), unfinished.name)
        write = partial(deepspeed_save, save_dir, name, client_state, False, exclude_frozen_parameters)
        try:
            self._write_files(write, unfinished, exclude_frozen_parameters, what)
        except BaseException:
            if engine.local_rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)  # what filled the disk should not stay there
            raise
        with all_or_none(what):
            if in_place := engine.global_rank == 0:
                put_in_place(unfinished, folder)
        with all_or_none(what):
            if engine.local_rank == 0 and not in_place:
                in_place = put_own_in_place(unfinished, folder, engine.global_rank)
        with all_or_none(what):
            if in_place and save_latest:
                write_latest(Path(save_dir, "latest"), folder, mark)
            if engine.local_rank == 0:
                clean(folder, self._began)
        return tag

    def _agreed_folder(self, save_dir: str, tag: str | None, client_state: dict[str, Any]) -> tuple[str, str, str]:
        """The first rank's folder of checkpoints and tag, which all use, where nothing speaks against a save.

        Also a mark of this save: another job may write a checkpoint of the same name at this moment.
        """
        engine, consensus = self._engine, self._stage.consensus
        with consensus.all_or_none(f"save_checkpoint({str(save_dir)!r})"):
            mine = str(save_dir), _checked(f"global_step{engine.global_steps}" if tag is None else str(tag))
            _refuse_own_keys(client_state)
            _refuse_own_names(self._stage.module)
            if engine.optimizer is not None and engine.basic_optimizer is None:
                allowed = "one with an optimizer, as DeepSpeed saves states of half precision"
                remedy = "add one to the JSON, or use engine.full_state_dict()"
                raise Refusal("save_checkpoint()", "an engine without an optimizer", allowed, remedy).error()
        what = "the first rank to name the folder of a checkpoint"
        save_dir, tag, mark = consensus.everyone.gather((*mine, uuid4().hex[:8]), what)[0]
        folder = str(Path(save_dir, tag))
        with consensus.all_or_none(f"save_checkpoint({folder!r})"):
            if mine[1] != tag and engine.checkpoint_tag_validation_fail():
                allowed = f"the tag of rank 0, {tag!r}, as checkpoint.tag_validation is Fail"
                raise Refusal("save_checkpoint(tag)", mine[1], allowed, "give all ranks the same").error()
            if Path(folder).is_file():
                allowed = "the name of a folder, and there is a file"
                raise Refusal("save_checkpoint(tag)", tag, allowed, "rename one of them").error()
        if mine[0] != save_dir or (mine[1] != tag and engine.checkpoint_tag_validation_enabled()):
            logger.warning(
                f"ds_vpipe: save_checkpoint: got the folder {str(Path(*mine))!r} on rank {engine.global_rank} and "
                f"{folder!r} on rank 0, which is used; allowed is one folder; give all ranks the same"
            )
        return save_dir, tag, mark

    def _write_files(
        self, deepspeed_save: Callable[[], bool], folder: Path, exclude_frozen_parameters: bool, what: str
    ) -> None:
        """Write DeepSpeed's files and this rank's own; they are on the disk afterwards, on all ranks or on none."""
        engine, stage, all_or_none = self._engine, self._stage, self._stage.consensus.all_or_none
        self._unwritten = None
        with all_or_none(what):
            states = with_owners_states(engine, stage.ties, stage.consensus.of_replicas)
        try:
            with nullcontext() if states is None else patch.object(engine.optimizer, "state_dict", lambda: states):
                deepspeed_save()
        finally:
            engine._curr_ckpt_path = None  # of a failed save too, for module_state_dict()
        self.write(rank_state.save, engine, stage, folder, exclude_frozen_parameters)
        self.write(to_disk, folder)
        with all_or_none(what):
            self._raise_unwritten(folder)

    def write(self, work: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Write files. A failure is kept until all ranks are past DeepSpeed's barriers."""
        try:
            work(*args, **kwargs)
        except Exception as error:
            self._unwritten = self._unwritten or error

    def _raise_unwritten(self, folder: Path) -> None:
        if self._unwritten is not None:
            error, self._unwritten = self._unwritten, None
            if not isinstance(error, OSError | RuntimeError):  # such as of a client_state with DeepSpeed's own keys
                raise error
            free = shutil.disk_usage(folder).free / 2**20  # torch says of a full disk that a position is unexpected
            raise OSError(f"a file could not be written whole ({error}); {free:.0f} MiB are free there") from error

    def load(
        self,
        deepspeed_load: Callable[..., Any],
        load_dir: str,
        tag: str | None,
        follow: Callable[[rank_state.SavedSplit], None] | None = None,
        **options: Any,
    ) -> Any:
        """Load by DeepSpeed's ``load_checkpoint()``, or by parameter a checkpoint of another layout.

        ``follow`` is given the checkpoint's split before it is loaded. Errors are those of
        :meth:`.VPipeEngine.load_checkpoint`.
        """
        engine, stage, consensus = self._engine, self._stage, self._stage.consensus
        stage.feed.start_over()
        what = f"load_checkpoint({str(load_dir)!r})"
        tag = self._agreed_tag(load_dir, tag, what)
        if tag is not None:
            self._refuse_damage(Path(load_dir, tag), what)
        with consensus.all_or_none(what):
            checkpoint = reshape.checked(engine, load_dir, tag, **options)
        if follow is not None and tag is not None:
            with consensus.all_or_none(what):
                mine = rank_state.saved_split(engine, Path(load_dir, tag))
            split = next(filter(None, consensus.everyone.gather(mine, f"all ranks in {what}")), None)
            if split is not None:
                follow(split)
        try:
            with consensus.all_or_none(what):
                path, client_state = reshape.load(engine, deepspeed_load, load_dir, tag, checkpoint, **options)
        except VPipeError:  # on every rank; some may have loaded their weights
            with suppress(PipelinePeerError):
                stage.half_loaded = consensus.any_has(stage.half_loaded, f"all ranks after {what}")
            raise
        finally:
            engine._curr_ckpt_path = None  # as after a save: module_state_dict() would write there
        if path is None:
            return path, client_state
        if tied_stages(stage.module):
            stage.module._synchronize_tied_weights()
        with consensus.all_or_none(what):
            weights_only = options["load_module_only"] or not options["load_optimizer_states"]
            if weights_only and hasattr(engine.optimizer, "refresh_fp32_params"):
                engine.optimizer.refresh_fp32_params()  # it may keep the old, which the next update would restore
            # Loading may have replaced what the versions point to.
            stage.weights.restart(engine.global_steps)
            restart_at(stage, engine.global_steps)
            if not options["load_module_only"]:
                rank_state.restore(engine, stage, Path(load_dir, str(tag)))
        stage.half_loaded = False
        self._loaded = {key: deepcopy(client_state[key]) for key in reshape.RETURNED & client_state.keys()}
        return path, client_state

    def _agreed_tag(self, load_dir: str, tag: str | None, what: str) -> str | None:
        """The tag that all ranks have given, or that ``latest`` names; None if there is neither."""
        engine, consensus = self._engine, self._stage.consensus
        latest = Path(load_dir, "latest_universal" if engine.load_universal_checkpoint() else "latest")
        with consensus.all_or_none(what):
            _refuse_own_names(self._stage.module)
            if tag is None and latest.is_file():
                tag = latest.read_text(errors="replace").strip()
                if len(tag.splitlines()) > 1:
                    allowed = f"the name of a checkpoint in {str(latest)!r}"
                    raise Refusal("load_checkpoint()", tag[:80], allowed, "write it there, or give a tag").error()
            tag = tag if tag is None or tag == "" else _plain(str(tag))
        tags = set(consensus.everyone.gather(tag, f"all ranks in {what}"))
        if len(tags) > 1 and None in tags:
            raise VPipeError(
                f"{what}: got a file {latest.name!r} on some machines only, allowed is one on each; copy it there"
            )
        if len(tags) > 1:
            given = " and ".join(sorted(tags))
            raise VPipeError(f"{what}: got {given} by rank, allowed is one checkpoint; give all ranks the same tag")
        with consensus.all_or_none(what):
            if tag is not None and engine.local_rank == 0:
                recover(Path(load_dir, tag))
        return tag

    def _refuse_damage(self, folder: Path, what: str) -> None:
        """Refuse files that are not as they were written. Each is read by one of the ranks that see the same."""
        with self._stage.consensus.all_or_none(what):
            files = files_of(folder)
            facts = [(str(file), (found := file.stat()).st_ino, found.st_size, found.st_mtime_ns) for file in files]
        seen = self._stage.consensus.everyone.gather(facts, f"all ranks in {what}")
        with self._stage.consensus.all_or_none(what):
            refuse_damage(folder, share_of(self._engine.global_rank, seen, files))

    def load_module(self, deepspeed_load: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Load weights by DeepSpeed's ``load_module_state_dict()``, on all ranks or on none."""
        module, stage, folder = self._stage.module, self._stage, vars(self._engine).get("_curr_ckpt_path")
        before, stage.half_loaded = stage.half_loaded, True
        # DeepSpeed reads the folder's name as a glob pattern, in which brackets do not stand for themselves.
        as_pattern = nullcontext() if folder is None else patch.object(self._engine, "_curr_ckpt_path", escape(folder))
        with (
            as_pattern,
            stage.consensus.all_or_none("load_checkpoint(): weights"),
            patch.object(module, "_synchronize_tied_weights", lambda: None),  # it would wait for a rank that failed
        ):
            deepspeed_load(*args, **kwargs)
            if folder is not None:  # else the script gives the weights
                rank_state.restore_outside(self._engine, Path(folder))
        module._synchronize_tied_weights()
        if folder is None:
            stage.half_loaded = before


def _checked(tag: str) -> str:
    """The tag without what names no folder of its own, such as a slash at its end, or is lost in ``latest``.

    Raises:
        VPipeConfigError: it would be another folder than one in the folder of checkpoints.
    """
    found = _plain(tag)
    if found.split(os.sep)[0] in ("", ".", "..", "latest") or len(found.splitlines()) > 1:
        allowed = "the name of a folder in save_dir"
        raise Refusal("save_checkpoint(tag)", tag, allowed, "name one, or leave the tag out").error()
    return found


def _plain(tag: str) -> str:
    return os.path.normpath(tag.strip())


def _refuse_own_keys(client_state: dict[str, Any]) -> None:
    """Refuse keys under which the engine saves its own state, which the script's value would replace."""
    for key in sorted(reshape.OWN_KEYS.intersection(client_state)):
        allowed = "keys under which the engine saves nothing"
        raise Refusal("save_checkpoint(client_state)", key, allowed, "rename it").error()


def _refuse_own_names(module: PipelineModule) -> None:
    """Refuse names of the script's for files of layers, which a checkpoint is read by in any split."""
    for position, number in enumerate(layer_numbers(module)):
        file = os.path.relpath(module.ckpt_layer_path("folder", position), "folder")
        if not names_layer(file, number):
            allowed = f"DeepSpeed's names, such as layer_{number:02d}-model_states.pt"
            reason = "checkpoints are read by the names of their files, in any split"
            name = f"{type(module).__name__}.ckpt_layer_path()"
            raise Refusal(name, file, allowed, "leave the method out", reason).error()
