"""Turn a pipeline checkpoint into a folder that Hugging Face's ``from_pretrained`` loads.

Usage::

    python -m ds_vpipe.models.export CHECKPOINT_DIR OUTPUT_DIR [--tag TAG] [--dtype DTYPE] [--config CONFIG]

Tensors have the names of ``BertForPreTraining``, ``RobertaForMaskedLM`` or ``GPT2LMHeadModel``, tied ones once; weights
are the fp32 master weights where training kept some. Which model it is says the checkpoint, where
``save_checkpoint()`` was given ``client_state=model_state(config)``, or else ``--config``. A checkpoint consists of
pickles: export only those that you trust.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_vpipe.checkpoints.pipeline_checkpoint import PipelineCheckpoint, checkpoint_folder
from ds_vpipe.errors import Refusal, VPipeError
from ds_vpipe.export import DTYPES, full_state_dict
from ds_vpipe.models.architecture import MODEL_CONFIG, Architecture, full_name
from ds_vpipe.models.bert.architecture import BERT
from ds_vpipe.models.gpt2.architecture import GPT2
from ds_vpipe.models.roberta.architecture import ROBERTA
from ds_vpipe.models.weight_folder import config_of, read_config

ARCHITECTURES = (BERT, ROBERTA, GPT2)


def export(
    checkpoint: PipelineCheckpoint,
    output: Path,
    config: Path | None = None,
    dtype: torch.dtype = torch.float32,
    architectures: Iterable[Architecture] = ARCHITECTURES,
) -> None:
    """Write ``output``, which appears when it is complete.

    Args:
        checkpoint: where from.
        output: a folder that does not exist or is empty.
        config: ``config.json``, or a folder with one; default: as the checkpoint says.
        dtype: of the tensors.
        architectures: which models it may be.

    Raises:
        VPipeError: the configuration does not fit the checkpoint, or the folder cannot be written.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise Refusal("OUTPUT_DIR", str(output), "a new folder", "name another one, or remove it").error()
    if config is not None:
        architecture, settings = read_config(config, architectures)
    else:
        fields = checkpoint.stages[0].get(MODEL_CONFIG)
        if fields is None:
            remedy = "give --config with the model's config.json"
            raise Refusal("--config", None, "the model's configuration, which this checkpoint lacks", remedy).error()
        architecture, settings = config_of(fields, f"checkpoint {checkpoint.folder}", architectures)
    with torch.device("meta"):
        settings.tie_word_embeddings = _is_tied(architecture, settings, checkpoint)
        model: Any = architecture.model(settings)
    weights = _renamed(architecture, settings, checkpoint, dtype)
    _check(weights, model.state_dict(), checkpoint)
    model.load_state_dict(weights, assign=True, strict=False)
    model.tie_weights()
    part = output.with_name(f".{output.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.parent.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(part)
        if output.is_dir():
            output.rmdir()
        part.rename(output)
    except OSError as error:
        raise Refusal("OUTPUT_DIR", str(output), "a path to write to", "correct the path", str(error)).error() from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _is_tied(architecture: Architecture, config: Any, checkpoint: PipelineCheckpoint) -> bool:
    """Whether the checkpoint's layers are those of the model with a tied decoder, or with one of its own."""
    for tied in (True, False):
        names = architecture.names(config, tied)
        known = [index for index in checkpoint.layers if index < len(names)]
        if known == checkpoint.layers and len(names) - known[-1] <= 2 and all(
            full_name(names[index], name) for index in known for name in checkpoint.layer(index)
        ):  # fmt: skip
            return tied
    raise VPipeError(
        f"checkpoint {str(checkpoint.folder)!r}: got {checkpoint.layers[-1] + 1} layers, which are not those of a "
        f"{architecture.model_type} with num_hidden_layers {config.num_hidden_layers}; allowed are the layers that "
        f"ds_vpipe.models has for it; correct --config"
    )


def _renamed(
    architecture: Architecture, config: Any, checkpoint: PipelineCheckpoint, dtype: torch.dtype
) -> dict[str, Tensor]:
    names = architecture.names(config, config.tie_word_embeddings)
    weights: dict[str, Tensor] = {}
    for name, tensor in full_state_dict(checkpoint, dtype, by_layer=True).items():
        layer, _, own = name.partition(".")
        theirs = full_name(names[int(layer)], own) if layer.isdecimal() else None
        if theirs is not None:
            weights[theirs] = tensor
    pairs = {**architecture.same, **(architecture.tied if config.tie_word_embeddings else {})}
    for one, other in pairs.items():
        for name, source in ((one, other), (other, one)):
            if name not in weights and source in weights:
                weights[name] = weights[source].clone()
    return weights


def _check(weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor], checkpoint: PipelineCheckpoint) -> None:
    where = f"checkpoint {checkpoint.folder}"
    for name, tensor in wanted.items():
        if name not in weights:
            raise Refusal(where, name, "all weights of the model", "correct --config", "no layer has it").error()
        if weights[name].shape != tensor.shape:
            given, allowed = list(weights[name].shape), f"{list(tensor.shape)}, as config.json has it"
            raise Refusal(f"tensor {name} in {where}", given, allowed, "correct --config").error()


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit status is 2 for a wrong command line or checkpoint."""
    parser = argparse.ArgumentParser(
        prog="python -m ds_vpipe.models.export", description="Export a pipeline checkpoint for Hugging Face."
    )
    parser.add_argument("checkpoint_dir", help="directory given to save_checkpoint(), or one checkpoint's folder")
    parser.add_argument("output", type=Path, help="folder to write: config.json and model.safetensors")
    parser.add_argument("--tag", help="which checkpoint; default: the latest")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the tensors")
    parser.add_argument("--config", type=Path, help="config.json of the model; default: as the checkpoint says")
    given = parser.parse_args(argv)
    try:
        checkpoint = PipelineCheckpoint(checkpoint_folder(given.checkpoint_dir, given.tag))
        export(checkpoint, given.output, given.config, DTYPES[given.dtype])
    except VPipeError as error:
        print(f"ds_vpipe.models.export: {error}", file=sys.stderr)
        return 2
    print(f"{given.output}: {given.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
