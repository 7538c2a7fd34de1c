"""Evaluation of one micro-batch for scripts that call the engine in ``eval()`` mode or without gradients.

Scripts compute metrics of what their model returns, on every rank, with the labels that they have there. So every rank
gets everything that the last stage's forward returned. Where the ranks of a pipeline have different micro-batches, as
loaders that deal the data out to all ranks give them, each rank's is run through all stages in turn, and each rank gets
the result of its own.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ds_vpipe.engine.engine import VPipeEngine
from ds_vpipe.engine.links.message import Tree, leaves
from ds_vpipe.engine.links.pickled import as_bytes, from_bytes
from ds_vpipe.engine.loop.rounds import Rounds
from ds_vpipe.errors import VPipeError, one_line


class ScriptEvaluation:
    """Evaluation between two rounds, of an engine that has been drained."""

    def __init__(self, engine: VPipeEngine, rounds: Rounds) -> None:
        self._engine, self._stage, self._rounds = engine, engine.stage, rounds
        self._evaluations = 0  # since the last round

    def round_begins(self) -> None:
        """Evaluations are counted from here on."""
        self._evaluations = 0

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's output for this rank's micro-batch, by the newest weights of all stages.

        In a pipeline random states are put back afterwards.
        """
        self._evaluations += 1
        # Buffers and weights that an evaluation touches are used in training afterwards.
        with torch.inference_mode(False), torch.no_grad():
            stage = self._stage
            stage.action = "evaluation"
            packed = stage.module.stage_model.pack(args, kwargs)
            if self.alike(packed):
                return self._evaluated(packed)
            what = "the micro-batches of all ranks to evaluate"
            calls = self._stage.links.of_all_stages(as_bytes((args, kwargs)), what)
            given = [from_bytes(call, stage.device) for call in calls]
            return [self._evaluated(stage.module.stage_model.pack(*call)) for call in given][stage.number]

    def alike(self, packed: Any) -> bool:
        """Whether all stages of this pipeline have been handed the same micro-batch. All of them ask."""
        if self._stage.pipeline.num_stages == 1:
            return True
        what = "all stages to compare what they are handed"
        first, *others = self._stage.links.of_all_stages(digest(packed), what)
        return all(torch.equal(first, other) for other in others)

    def _evaluated(self, packed: Any) -> Any:
        engine, evaluation = self._engine, self._engine.evaluation
        iterator = engine.data_iterator
        engine._compute_loss, engine.eval_return_logits = True, False
        try:
            with self._states_kept(), evaluation.newest_weights(), torch.no_grad():
                engine.data_iterator = iter([(packed, None)])
                evaluation.run(1)
                stage_model = self._stage.module.stage_model
                output = self._everywhere(stage_model.take_output() if self._stage.is_last else None)
            evaluation.flush()
        finally:
            engine.data_iterator = iterator
            engine.fwd_outputs = []
        return output

    @contextmanager
    def _states_kept(self) -> Iterator[None]:
        """Random numbers that are others in every evaluation and on every stage. Afterwards all states are as before.

        Without other stages they are the script's, as with DeepSpeed.
        """
        if self._stage.pipeline.num_stages == 1:
            yield
            return
        kept = self._stage.random_states.kept(self._stage.device)
        with kept, self._rounds.random_numbers("evaluation", self._evaluations):
            yield

    def _everywhere(self, output: Any) -> Any:
        """The last stage's ``output`` on all stages."""
        stage = self._stage
        if stage.pipeline.num_stages == 1:
            return output
        if not stage.is_last:
            return from_bytes(stage.links.from_last_stage(None), stage.device)
        try:
            copied = as_bytes(output)
        except Exception as error:  # whatever pickle makes of classes of the user's
            raise VPipeError(
                f"evaluation: forward returned a {type(output).__name__} that cannot be copied to the other stages "
                f"({one_line(error)}); allowed is what pickle copies; return tensors, tuples and dicts"
            ) from error
        stage.links.from_last_stage(copied)
        return output


def digest(tree: Tree) -> torch.Tensor:
    """Hash, on the CPU, of types, shapes and values of the tensors in a tree."""
    found = hashlib.sha256()
    for leaf in leaves(tree):
        found.update(repr(None if leaf is None else (leaf.dtype, leaf.shape)).encode())
        if leaf is not None and leaf.numel():
            found.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return torch.frombuffer(bytearray(found.digest()), dtype=torch.uint8)
