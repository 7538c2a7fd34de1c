"""Evaluation of one micro-batch for scripts that call the engine in ``eval()`` mode or without gradients.

Scripts compute metrics of what their model returns, on every rank, with the labels that they have there. So every rank
gets everything that the last stage's forward returned. Where the ranks of a pipeline have different micro-batches, as
loaders that deal the data out to all ranks give them, each rank's is run through all stages in turn, and each rank gets
the result of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ds_vpipe.engine.links.copies import as_bytes, digest, from_bytes
from ds_vpipe.engine.loop.drain import LoopRestMixin
from ds_vpipe.errors import VPipeError


class LoopEvaluationMixin(LoopRestMixin):
    """Evaluation between two rounds."""

    fwd_outputs: list[Any]
    _evaluations = 0  # since the last round

    def _begin_round(self, packed: Any) -> int:
        self._evaluations = 0
        return super()._begin_round(packed)

    def _evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a micro-batch through all stages with their newest weights, in the mode that the module is in.

        The pipeline drains before; the first evaluation after a round does so, others find it drained. In a pipeline
        random states are put back afterwards.

        Returns:
            What the module's forward returns for this rank's micro-batch.
        """
        self.drain("evaluation")
        self._evaluations += 1
        # Buffers and weights that an evaluation touches are used in training afterwards.
        with torch.inference_mode(False), torch.no_grad(), self._aborting():
            self.state.doing = "evaluation"
            packed = self.module.pack(args, kwargs)
            if self._alike(packed):
                return self._evaluated(packed)
            calls = self._of_all_stages(as_bytes((args, kwargs)), "the micro-batches of all ranks to evaluate")
            given = [from_bytes(call, self.device) for call in calls]
            return [self._evaluated(self.module.pack(*call)) for call in given][self.stage_id]

    def _alike(self, packed: Any) -> bool:
        """Whether all stages of this pipeline have been handed the same micro-batch; all of them ask."""
        if self.num_stages == 1:
            return True
        first, *others = self._of_all_stages(digest(packed), "all stages to compare what they are handed")
        return all(torch.equal(first, other) for other in others)

    def _evaluated(self, packed: Any) -> Any:
        micro_offset, iterator = self.module.micro_offset, self.data_iterator
        self._compute_loss, self.eval_return_logits = True, False
        try:
            with self._states_kept(), self._newest_ties(), torch.no_grad():
                self.data_iterator = iter([(packed, None)])
                self._exec_schedule(self._inference_schedule(1))
                output = self._everywhere(self._output() if self.is_last_stage() else None)
            if self.neighbours.eval_out is not None:
                self.neighbours.eval_out.flush()
        finally:
            self.module.micro_offset, self.data_iterator = micro_offset, iterator
            self.fwd_outputs = []
        return output

    @contextmanager
    def _states_kept(self) -> Iterator[None]:
        """Random numbers that are others in every evaluation and on every stage; afterwards all states are as before.

        Without other stages they are the script's, as with DeepSpeed.
        """
        if self.num_stages == 1:
            yield
            return
        with self.random_states.kept(self.device), self._random_numbers("evaluation", self._evaluations):
            yield

    def _output(self) -> Any:
        take_output = getattr(self.module, "take_output", None)
        return self.fwd_outputs[0] if take_output is None else take_output()

    def _everywhere(self, output: Any) -> Any:
        """The last stage's ``output`` on all stages."""
        if self.num_stages == 1:
            return output
        if not self.is_last_stage():
            return from_bytes(self._handed_back(None), self.device)
        try:
            copied = as_bytes(output)
        except Exception as error:  # whatever pickle makes of classes of the user's
            reason = " ".join(str(error).split())
            raise VPipeError(
                f"evaluation: forward returned a {type(output).__name__} that cannot be copied to the other stages "
                f"({type(error).__name__}: {reason}); allowed is what pickle copies; return tensors, tuples and dicts"
            ) from error
        self._handed_back(copied)
        return output
