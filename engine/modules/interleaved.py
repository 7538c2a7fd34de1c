"""Pipeline modules with several virtual stages on every rank, for the interleaved schedule.

DeepSpeed's ``PipelineModule`` holds one run of layers. Here ``forward_funcs`` has several, and ``forward()`` goes
through the chosen one. Layers keep their numbers in the model, in names of parameters and of checkpoint files.
"""

from bisect import bisect
from collections.abc import Sequence
from typing import Any

from deepspeed.pipe import PipelineModule

from ds_vpipe.engine.modules.recompute import Segment
from ds_vpipe.errors import VPipeConfigError


class InterleavedMixin(PipelineModule):
    """Module with several parts, made by :func:`interleave`.

    It was the user's module, which may have attributes of any name.
    """

    _vpipe_numbers: list[int]  # numbers in the model of this rank's layers
    _vpipe_chunk: int  # which of this rank's parts forward() runs, from 0
    _vpipe_ends: list[int]  # of each part in forward_funcs
    _vpipe_segments: list[Segment]  # which run each part
    _vpipe_offsets: list[int]

    @property
    def micro_offset(self) -> int:
        """Forward passes of every part so far, which seed layers. Read while nothing is in flight."""
        return self._vpipe_offsets[0]

    @micro_offset.setter
    def micro_offset(self, value: int) -> None:
        self._vpipe_offsets = [value] * len(self._vpipe_ends)

    def forward(self, forward_input: Any) -> Any:
        """Run the layers of part :attr:`_vpipe_chunk`."""
        chunk, offsets = self._vpipe_chunk, self._vpipe_offsets
        offsets[chunk] += 1
        return self._vpipe_segments[chunk].run_part(self, forward_input, offsets[chunk] + 1)

    def set_checkpoint_interval(self, interval: int) -> None:
        """Refused: virtual stages run their layers themselves."""
        if interval != 0:
            raise VPipeConfigError(
                f"set_checkpoint_interval(): got {interval}, allowed is 0 next to vpipe.virtual_stages, which run one "
                f"by one; use vpipe.recompute_ratio"
            )

    def stage_owner(self, layer_idx: int) -> int:
        """The rank that holds a layer."""
        return int((bisect(self.parts, layer_idx) - 1) % self.num_stages)

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """The layer's file, by its number in the model."""
        return str(super().ckpt_layer_path(ckpt_dir, self._vpipe_numbers[local_layer_idx]))

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        """The layer's files, by its number in the model."""
        return list(super().ckpt_layer_path_list(ckpt_dir, self._vpipe_numbers[local_layer_idx]))


def interleave(module: PipelineModule, numbers: Sequence[int], ends: Sequence[int]) -> None:
    """Let ``module`` run its layers part by part.

    ``numbers`` are those of this rank's layers in the model; ``ends`` is where each part ends in ``forward_funcs``.
    """
    kind = type(module)
    offset = module.__dict__.pop("micro_offset", 0)
    module.__class__ = type(f"Interleaved{kind.__name__}", (InterleavedMixin, kind), {})
    module._vpipe_numbers, module._vpipe_ends, module._vpipe_chunk = list(numbers), list(ends), 0
    module.micro_offset = offset
    module._local_start = 0  # DeepSpeed adds it to positions
