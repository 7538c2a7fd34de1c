"""Evaluation of one micro-batch for scripts that call the engine in ``eval()`` mode or without gradients."""

from __future__ import annotations

from typing import Any

import torch

from ds_vpipe.engine.handed_loss import LossTensor, OutputElsewhere
from ds_vpipe.engine.loop_rest import LoopRestMixin
from ds_vpipe.engine.results import random_states_kept


class LoopEvaluationMixin(LoopRestMixin):
    """Evaluation between two rounds."""

    fwd_outputs: list[Any]

    def _evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a micro-batch through all stages with their newest weights, in the mode that the module is in.

        The pipeline drains before; the first evaluation after a round does so, others find it drained. Random states
        are put back afterwards.

        Returns:
            The loss of the micro-batch; on the last stage what the module returned, if that is more or has no loss.
        """
        self.drain("evaluation")
        # Buffers and weights that an evaluation touches are used in training afterwards.
        with torch.inference_mode(False), torch.no_grad():
            return self._evaluated(args, kwargs)

    def _evaluated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.state.doing = "evaluation"
        micro_offset, iterator = self.module.micro_offset, self.data_iterator
        self._compute_loss, self.eval_return_logits = True, False
        with self._aborting():
            item = (self.module.pack(args, kwargs), None)
            try:
                with random_states_kept(self.device), self._newest_ties(), torch.no_grad():
                    self.data_iterator = iter([item])
                    self._exec_schedule(self._inference_schedule(1))
                    loss = self._bcast_pipe_scalar(self.fwd_outputs[0] if self.is_last_stage() else None)
                if self.neighbours.eval_out is not None:
                    self.neighbours.eval_out.flush()
            finally:
                self.module.micro_offset, self.data_iterator = micro_offset, iterator
                self.fwd_outputs = []
        take_output = getattr(self.module, "take_output", None)
        whole = take_output() if take_output is not None and self.is_last_stage() else None
        if isinstance(loss, torch.Tensor) and (whole is None or isinstance(whole, torch.Tensor)):
            return loss.as_subclass(LossTensor)
        return OutputElsewhere() if whole is None else whole
