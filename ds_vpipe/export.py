"""Export of a pipeline checkpoint to one state dict.

Usage::

    python -m ds_vpipe.export CHECKPOINT_DIR OUTPUT [--tag TAG] [--dtype DTYPE] [--names NAMES]

``OUTPUT`` ends in ``.pt`` (``torch.save``) or ``.safetensors``. Weights are the fp32 master weights where
training kept some. A checkpoint consists of pickles: export only those that you trust.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ds_vpipe.checkpoints.damage import files_of, refuse_damage
from ds_vpipe.checkpoints.pipeline_checkpoint import PipelineCheckpoint, checkpoint_folder
from ds_vpipe.command_line import Parser, print_answer
from ds_vpipe.errors import VPipeError, one_line
from ds_vpipe.whole_file import whole_file

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def full_state_dict(
    checkpoint: PipelineCheckpoint, dtype: torch.dtype = torch.float32, *, by_layer: bool = False
) -> dict[str, Any]:
    """State dict of the whole model. A plain module's names are those of its own.

    Args:
        checkpoint: the checkpoint.
        dtype: of floating-point tensors.
        by_layer: name tied layers ``LAYER.NAME`` like any other, once per layer, instead of ``tied_modules.KEY.NAME``
            once. Names that mean the same parameter have the same tensor.

    Raises:
        VPipeError: weights are missing, or several master weights have one name.
    """
    if frozen := checkpoint.left_out():
        raise VPipeError(
            f"checkpoint {str(checkpoint.folder)!r}: got no weights of {frozen[0]} (and {len(frozen) - 1} more), saved "
            f"with exclude_frozen_parameters, allowed are those of the whole model; load it into the model with "
            f"load_module_strict=False and save all"
        )
    masters, copies = checkpoint.masters(), checkpoint.copies
    unique: dict[str, Any] = {}

    def add(name: str, found: Any) -> Any:
        own = checkpoint.unique_name(name)
        if own not in unique:
            value = masters.get(own, found)
            if isinstance(value, torch.Tensor):
                wanted = dtype if value.is_floating_point() else value.dtype
                value = value.to(wanted, copy=True, memory_format=torch.contiguous_format)
            unique[own] = value
        return unique[own]

    result: dict[str, Any] = {}
    for index in checkpoint.layers:
        tie = checkpoint.ties.get(index)
        for name, tensor in checkpoint.layer(index).items():
            here, tied = f"{index}.{name}", f"tied_modules.{tie}.{name}"
            if copies is not None:
                result[here if by_layer else name] = add(copies.get(here, here), tensor)
                continue
            own = here if tie is None or tied in checkpoint.untied else tied
            if own is here and tied in masters:
                raise VPipeError(
                    f"checkpoint {str(checkpoint.folder)!r}: got master weights {tied} of several layers that differ, "
                    f"allowed are checkpoints that name them by layer; load it and save it with ds_vpipe"
                )
            result[here if by_layer else own] = add(own, tensor)
    for name, tensor in {**masters, **checkpoint.outside}.items():  # of DeepSpeed's engine only masters
        if name not in unique and name not in (copies or ()):
            result[name] = add(name, tensor)
    for index, tie in checkpoint.ties.items():
        if by_layer and index not in checkpoint.layers:  # it runs a forward_fn
            own = f"tied_modules.{tie}."
            result |= {f"{index}.{name[len(own) :]}": unique[name] for name in unique if name.startswith(own)}
    lost = [name for name in checkpoint.trained if name.startswith("tied_modules.") and name not in unique]
    if lost:
        raise VPipeError(
            f"checkpoint {str(checkpoint.folder)!r}: got no weights of {lost[0]} (and {len(lost) - 1} more), allowed "
            f"is at least one layer per tie without forward_fn, which is the one that DeepSpeed saves"
        )
    return result


def write(state_dict: dict[str, Any], output: Path) -> None:
    """Write a state dict atomically, in the format of ``output``'s suffix.

    Raises:
        VPipeError: another suffix, or the file cannot be written.
    """
    save = _WRITERS.get(output.suffix)
    if save is None:
        raise VPipeError(f"OUTPUT: got {str(output)!r}; allowed: a name that ends in {' or '.join(_WRITERS)}")
    try:
        with whole_file(output) as part:
            save(state_dict, part)
    except (OSError, RuntimeError, SafetensorError) as error:
        text = " ".join(str(error).split())
        raise VPipeError(f"OUTPUT: got {str(output)!r}, which cannot be written: {text}; correct the path") from None


def _save_safetensors(state_dict: dict[str, Any], path: Path) -> None:
    """The format knows no shared tensors: every name gets its own copy."""
    others = [name for name, value in state_dict.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise VPipeError(
            f"OUTPUT: got a safetensors for {others[0]}, which is no tensor; allowed: a name that ends in .pt"
        )
    first = {id(tensor): name for name, tensor in reversed(state_dict.items())}
    alone = {name: t if first[id(t)] == name else t.clone() for name, t in state_dict.items()}
    save_file(alone, path, metadata={"format": "pt"})


_WRITERS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    ".pt": torch.save,
    ".safetensors": _save_safetensors,
}


@contextmanager
def expecting_a_pipeline(folder: Path) -> Iterator[None]:
    """Context that reads a checkpoint's folder, whatever its files hold.

    Raises:
        VPipeError: they are not those of a checkpoint of a pipeline.
    """
    try:
        yield
    except VPipeError:
        raise
    except Exception as error:
        raise VPipeError(
            f"checkpoint {str(folder)!r}: got contents that no pipeline writes ({one_line(error)}), allowed are those "
            f"of save_checkpoint(); copy it anew, or name another tag"
        ) from error


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Its exit status is 2 for a wrong command line or checkpoint."""
    parser = Parser(prog="python -m ds_vpipe.export", description="Export a pipeline checkpoint.")
    parser.add_argument("checkpoint_dir", help="directory given to save_checkpoint(), or one checkpoint's folder")
    parser.add_argument("output", type=Path, help="file to write: .pt or .safetensors")
    parser.add_argument("--tag", help="which checkpoint; default: the latest")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of floating-point tensors")
    parser.add_argument(
        "--names",
        choices=("module", "layers"),
        default="module",
        help="of a plain module its own, else LAYER.NAME with tied layers once, as tied_modules.KEY.NAME; or "
        "LAYER.NAME in each place",
    )
    given = parser.parse_args(argv)
    try:
        if given.output.suffix not in _WRITERS:
            write({}, given.output)
        folder = checkpoint_folder(given.checkpoint_dir, given.tag)
        refuse_damage(folder, files_of(folder))
        with expecting_a_pipeline(folder):
            checkpoint = PipelineCheckpoint(folder)
            state_dict = full_state_dict(checkpoint, DTYPES[given.dtype], by_layer=given.names == "layers")
        write(state_dict, given.output)
    except VPipeError as error:
        print(f"ds_vpipe.export: {error}", file=sys.stderr)
        return 2
    tensors = {id(value): value for value in state_dict.values() if isinstance(value, torch.Tensor)}
    elements = sum(tensor.numel() for tensor in tensors.values())
    print_answer(f"{given.output}: {len(state_dict)} tensors, {elements} elements, {given.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
