"""Checkpoints of a training run: when they are written, and going on from them.

The engine's checkpoint holds weights, optimizer, schedule, random states and the data position. What is added here says
which data the position counts in, so that a run does not go on at the right place of the wrong samples.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

from ds_vpipe.errors import VPipeConfigError, show

_STATE = "bert_pretraining"


class RunCheckpoints:
    """Saves a run's engine and takes it up again; on every rank alike.

    Args:
        engine: DeepSpeed's pipeline engine or ours.
        folder: where checkpoints go.
        strategy: when to save: "no", "epoch" or "steps".
        steps: updates between two saves of "steps".
        identity: JSON values that name the samples and their order.
        model: says which model a checkpoint is of, for its export; see `models.architecture.model_state`.
    """

    def __init__(
        self, engine: Any, folder: Path, strategy: str, steps: int, identity: dict[str, Any], model: dict[str, Any]
    ) -> None:
        self._engine = engine
        self._folder = folder
        self._strategy = strategy
        self._steps = steps
        self._identity = identity
        self._model = model
        self._saved_at = -1

    def resume(self, folder: Path) -> None:
        """Go on from the latest checkpoint in a folder.

        Raises:
            VPipeConfigError: there is none, or it is of a run on other samples.
            VPipeError: it does not fit the model, or files are lost.
        """
        state = _load(self._engine, folder, "--resume_from_checkpoint", load_module_only=False)
        before = state.get(_STATE)
        if before is None:
            raise VPipeConfigError(
                f"--resume_from_checkpoint: the checkpoint in {folder} is not of this training script; take its"
                " weights with --model_name_or_path"
            )
        for key, value in self._identity.items():
            if before.get(key) != value:
                raise VPipeConfigError(
                    f"--resume_from_checkpoint: the run in {folder} had {key} {show(before.get(key))}, now it is"
                    f" {show(value)}: it would go on with other samples; give the same, or begin"
                    " anew with --model_name_or_path"
                )
        self._saved_at = self._engine.global_steps if folder == self._folder else -1

    def after(self, epoch_ended: bool) -> None:
        """Save after an update if it is time to."""
        if epoch_ended if self._strategy == "epoch" else self._engine.global_steps % self._steps == 0:
            self.save()

    def save(self) -> None:
        """Save, unless the run saves nothing or nothing has been trained since the last time.

        Raises:
            VPipeError: files cannot be written.
        """
        if self._strategy == "no" or self._saved_at == self._engine.global_steps:
            return
        self._engine.save_checkpoint(str(self._folder), client_state={_STATE: self._identity, **self._model})
        self._saved_at = self._engine.global_steps


def load_weights(engine: Any, folder: Path) -> None:
    """Take the weights of the latest checkpoint in a folder, and nothing else of it.

    Raises:
        VPipeConfigError: there is none.
        VPipeError: it does not fit the model, or files are lost.
    """
    _load(engine, folder, "--model_name_or_path", load_module_only=True)


def identity_of(arguments: Namespace, digest: str) -> dict[str, Any]:
    """What names the samples of a run and their order: the text or shards, and how samples are drawn from them."""
    names = ("seed", "max_seq_length", "max_predictions_per_seq", "keep_order")
    return {"data": digest} | {name: getattr(arguments, name) for name in names}


def _load(engine: Any, folder: Path, option: str, load_module_only: bool) -> dict[str, Any]:
    options = {"load_optimizer_states": False, "load_lr_scheduler_states": False} if load_module_only else {}
    path, state = engine.load_checkpoint(str(folder), load_module_only=load_module_only, **options)
    if path is None:
        raise VPipeConfigError(f"{option}: there is no checkpoint in {folder}, or no file 'latest' that names one")
    return dict(state)
