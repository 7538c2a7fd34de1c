"""Checkpoints of an asynchronous pipeline: one version per stage, written whole or not at all, resumed exactly.

The files are DeepSpeed's own. Beside them every rank writes what they leave out: random states, the
number of forward passes (which seeds layers), and what is known of other stages' updates. So going on
after a save and going on from the saved checkpoint are the same training, bit for bit.

A checkpoint is written into a folder of another name and renamed when it is complete, and ``latest`` is replaced
after that, so that a run that is killed at any moment leaves the one before. One that it replaces is set aside for the
moment in between. Files are on the disk before they are renamed, so that this holds for a machine that loses its power.
"""

import os
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from deepspeed.pipe import PipelineModule
from deepspeed.utils import logger

from ds_vpipe.checkpoints.damage import files_of, refuse_damage, share_of
from ds_vpipe.checkpoints.pipeline_checkpoint import names_layer, previous_folder
from ds_vpipe.engine.checkpoint import rank_state, reshape
from ds_vpipe.engine.checkpoint.parameter_states import with_owners_states
from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine
from ds_vpipe.engine.execution.drain import restart_at
from ds_vpipe.engine.modules.recompute import layer_numbers
from ds_vpipe.engine.stage import Stage
from ds_vpipe.engine.updates.tied import tied_stages
from ds_vpipe.errors import PipelinePeerError, Refusal, VPipeError

# Written by an engine; other entries of a checkpoint's folder are the script's.
_WRITTEN = ("layer_*.pt", "mp_rank_*.pt", "*zero_pp_rank_*.pt", "vpipe-stage_*.pt", "offloaded_tensors")


class Checkpoints:
    """Checkpoints of one stage, saved and loaded at rest. DeepSpeed's engine writes and reads most files."""

    def __init__(self, engine: PatchedPipelineEngine, stage: Stage) -> None:
        self._engine, self._stage = engine, stage
        self._unwritten: Exception | None = None
        self._began = time.time()

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

        Returns:
            The tag.

        Raises:
            VPipeConfigError: a tag or a key of ``client_state`` that is refused. Nothing is written.
            VPipeError: files cannot be written; the checkpoint before is still there, and training may go on.
            PipelinePeerError: the same on another rank; or one is lost, or did not answer in time.
        """
        engine, stage, all_or_none = self._engine, self._stage, self._stage.consensus.all_or_none
        self._equalize_scale()
        with all_or_none(f"save_checkpoint({str(save_dir)!r})"):
            mine = str(save_dir), _checked(f"global_step{engine.global_steps}" if tag is None else str(tag))
            _refuse_own_keys(client_state or {})
            _refuse_own_names(stage.module)
        save_dir, tag = stage.consensus.of_all(mine, "the first rank to name the folder of a checkpoint")[0]
        folder = Path(save_dir, tag)
        with all_or_none(f"save_checkpoint({str(folder)!r})"):
            if mine[1] != tag and engine.checkpoint_tag_validation_fail():
                allowed = f"the tag of rank 0, {tag!r}, as checkpoint.tag_validation is Fail"
                raise Refusal("save_checkpoint(tag)", mine[1], allowed, "give all ranks the same").error()
        if mine[0] != save_dir or (mine[1] != tag and engine.checkpoint_tag_validation_enabled()):
            logger.warning(
                f"ds_vpipe: save_checkpoint: got the folder {str(Path(*mine))!r} on rank {engine.global_rank} and "
                f"{str(folder)!r} on rank 0, which is used; allowed is one folder; give all ranks the same"
            )
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        what = f"save_checkpoint({str(folder)!r})"
        with all_or_none(what):
            if engine.local_rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
        with all_or_none(what):
            if engine.global_rank == 0:
                unfinished.mkdir(parents=True)
        name = os.path.join(os.path.dirname(tag), unfinished.name)
        self._unwritten = None
        try:
            with all_or_none(what):
                states = with_owners_states(engine, stage.ties, stage.consensus.of_replicas)
            with nullcontext() if states is None else patch.object(engine.optimizer, "state_dict", lambda: states):
                deepspeed_save(save_dir, name, client_state or {}, False, exclude_frozen_parameters)
            self.write(rank_state.save, engine, stage, unfinished, exclude_frozen_parameters)
            self.write(_to_disk, unfinished)
            with all_or_none(what):
                self._raise_unwritten(unfinished)
        except BaseException:
            if engine.local_rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)  # what filled the disk should not stay there
            raise
        latest = Path(save_dir, "latest") if save_latest else None
        with all_or_none(what):
            if engine.global_rank == 0:
                _put_in_place(unfinished, folder, latest)
        with all_or_none(what):
            if engine.local_rank == 0 and engine.global_rank != 0:
                _put_own_in_place(unfinished, folder, latest, engine.global_rank)
        with all_or_none(what):
            if engine.local_rank == 0:
                _clean(folder, self._began)
        return tag

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
        follow: Callable[..., None] | None = None,
        **options: Any,
    ) -> Any:
        """Load by DeepSpeed's ``load_checkpoint()``, or by parameter a checkpoint of another layout.

        Args:
            deepspeed_load: DeepSpeed's.
            load_dir: folder of checkpoints.
            tag: name of one; None for the latest.
            follow: is given what :func:`.rank_state.saved_split` finds, before the checkpoint is loaded.
            options: DeepSpeed's.

        Raises:
            VPipeError: the checkpoint is of another model, or files are lost or damaged.
            PipelinePeerError: the same on another rank; or one is lost, or did not answer in time.
        """
        engine, stage, consensus = self._engine, self._stage, self._stage.consensus
        stage.feed.start_over()
        what = f"load_checkpoint({str(load_dir)!r})"
        latest = Path(load_dir, "latest_universal" if engine.load_universal_checkpoint() else "latest")
        with consensus.all_or_none(what):
            _refuse_own_names(stage.module)
            if tag is None and latest.is_file():
                tag = latest.read_text().strip()
        tags = set(consensus.of_all(tag, f"all ranks in {what}"))
        if len(tags) > 1 and None in tags:
            raise VPipeError(
                f"{what}: got a file {latest.name!r} on some machines only, allowed is one on each; copy it there"
            )
        if len(tags) > 1:
            given = " and ".join(sorted(tags))
            raise VPipeError(f"{what}: got {given} by rank, allowed is one checkpoint; give all ranks the same tag")
        with consensus.all_or_none(what):
            if tag is not None and engine.local_rank == 0:
                _recover(Path(load_dir, tag))
        if tag is not None:
            self._refuse_damage(Path(load_dir, tag), what)
        with consensus.all_or_none(what):
            checkpoint = reshape.checked(engine, load_dir, tag, **options)
        if follow is not None and tag is not None:
            with consensus.all_or_none(what):
                mine = rank_state.saved_split(engine, Path(load_dir, tag))
            split = next(filter(None, consensus.of_all(mine, f"all ranks in {what}")), None)
            if split is not None:
                follow(*split)
        try:
            with consensus.all_or_none(what):
                path, client_state = reshape.load(engine, deepspeed_load, load_dir, tag, checkpoint, **options)
        except VPipeError:  # on every rank; some may have loaded their weights
            with suppress(PipelinePeerError):
                stage.half_loaded = consensus.any_has(stage.half_loaded, f"all ranks after {what}")
            raise
        if path is None:
            return path, client_state
        if tied_stages(stage.module):
            stage.module._synchronize_tied_weights()
        with consensus.all_or_none(what):
            rank_state.restore_outside(engine, Path(load_dir, str(tag)))
            weights_only = options["load_module_only"] or not options["load_optimizer_states"]
            if weights_only and hasattr(engine.optimizer, "refresh_fp32_params"):
                engine.optimizer.refresh_fp32_params()  # it may keep the old, which the next update would restore
            # Loading may have replaced what the versions point to.
            stage.weights.restart(engine.global_steps)
            restart_at(stage, engine.global_steps)
            if not options["load_module_only"]:
                rank_state.restore(engine, stage, Path(load_dir, str(tag)))
        stage.half_loaded = False
        return path, client_state

    def _refuse_damage(self, folder: Path, what: str) -> None:
        """Refuse files that are not as they were written. Each is read by one of the ranks that see the same."""
        with self._stage.consensus.all_or_none(what):
            files = files_of(folder)
            facts = [(str(file), (found := file.stat()).st_ino, found.st_size, found.st_mtime_ns) for file in files]
        seen = self._stage.consensus.of_all(facts, f"all ranks in {what}")
        with self._stage.consensus.all_or_none(what):
            refuse_damage(share_of(self._engine.global_rank, seen, files))

    def load_module(self, deepspeed_load: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Load weights by DeepSpeed's ``load_module_state_dict()``, on all ranks or on none."""
        module, stage = self._stage.module, self._stage
        stage.half_loaded = True
        with (
            stage.consensus.all_or_none("load_checkpoint(): weights"),
            patch.object(module, "_synchronize_tied_weights", lambda: None),  # it would wait for a rank that failed
        ):
            deepspeed_load(*args, **kwargs)
        module._synchronize_tied_weights()

    def _equalize_scale(self) -> None:
        """Give every stage the last one's loss scaler, as DeepSpeed expects it."""
        stage = self._stage
        if stage.pipeline.num_stages > 1 and stage.asynchronous and stage.loss_scaling is not None:
            what = "all stages to agree on what a checkpoint holds"
            stage.loss_scaling.restore(stage.consensus.of_stages(stage.loss_scaling.state(), what)[-1])


def _checked(tag: str) -> str:
    """The tag without what names no folder of its own, such as a slash at its end.

    Raises:
        VPipeConfigError: it would be another folder than one in the folder of checkpoints.
    """
    found = os.path.normpath(tag)
    first = found.split(os.sep)[0]
    if first in ("", ".", "latest") or first.startswith(".."):
        allowed = "the name of a folder in save_dir"
        raise Refusal("save_checkpoint(tag)", tag, allowed, "name one, or leave the tag out").error()
    return found


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


def _put_in_place(unfinished: Path, folder: Path, latest: Path | None) -> None:
    """Rename a complete checkpoint and let ``latest`` name it. One of the same name stays until then."""
    previous = previous_folder(folder)
    if folder.exists():
        _remove(previous, folder)
        os.replace(folder, previous)
    os.replace(unfinished, folder)
    _sync(folder.parent)
    if latest is not None:
        new = latest.with_name(f".{latest.name}.unfinished")
        new.write_text(str(folder.relative_to(latest.parent)))
        _sync(new)
        os.replace(new, latest)
        _sync(latest.parent)


def _to_disk(folder: Path) -> None:
    """Wait until all files of a folder are on the disk, this rank's among them; others add theirs meanwhile."""
    for path in (*folder.rglob("*"), folder):
        with suppress(FileNotFoundError):
            _sync(path)


def _sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder where a file system can say so."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError) if path.is_dir() else nullcontext():
            os.fsync(handle)
    finally:
        os.close(handle)


def _put_own_in_place(unfinished: Path, folder: Path, latest: Path | None, rank: int) -> None:
    """:func:`_put_in_place` on a machine whose file system the first rank does not share. Where it does, nothing.

    Whether ``unfinished`` is still there is not asked, since a network file system may answer from memory: a
    renaming is done or refused where the folder is.
    """
    mine = unfinished.with_name(f".{folder.name}.rank{rank}.unfinished")
    try:
        os.replace(unfinished, mine)
    except FileNotFoundError:
        return
    _put_in_place(mine, folder, latest)


def _clean(folder: Path, began: float) -> None:
    """Remove checkpoints that were replaced, and folders of saves that were interrupted before this run ``began``.

    One that has been written to since is another job's, which saves into the same folder at this moment. Times of
    files are those of a clock that may be another machine's: the folder's own is that of the renaming just before.
    """
    began += folder.parent.stat().st_mtime - time.time()
    for left in folder.parent.glob(".*.previous"):
        replacing = left.with_name(left.name.removeprefix(".").removesuffix(".previous"))
        if replacing.is_dir():
            _remove(left, replacing)
    for left in folder.parent.glob(".*.unfinished"):
        with suppress(FileNotFoundError):  # it has been renamed, or another rank removes it
            if max(path.stat().st_mtime for path in (left, *left.rglob("*"))) < began:
                shutil.rmtree(left, ignore_errors=True)


def _remove(previous: Path, folder: Path) -> None:
    """Remove a checkpoint that ``folder`` has replaced, which keeps what scripts have put there.

    Several ranks may call it at the same time.
    """
    with suppress(FileNotFoundError):
        for path in previous.iterdir():
            if not any(map(path.match, _WRITTEN)) and not (folder / path.name).exists():
                with suppress(FileNotFoundError):
                    os.replace(path, folder / path.name)
    shutil.rmtree(previous, ignore_errors=True)


def _recover(folder: Path) -> None:
    """Undo a renaming that was interrupted half-way. Several ranks may call it at the same time."""
    if not folder.exists():
        with suppress(FileNotFoundError):
            os.replace(previous_folder(folder), folder)
