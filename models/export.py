"""Turn a pipeline checkpoint into a folder that Hugging Face's ``from_pretrained`` loads.

Usage::

    python -m ds_vpipe.models.export CHECKPOINT_DIR OUTPUT_DIR [--tag TAG] [--dtype DTYPE] [--config CONFIG]

For checkpoints of ``models/bert/train.py``, written as ``BertForPreTraining``, and of plain Hugging Face models, whose
scripts may also call ``save_pretrained()`` at their end. Weights are the fp32 master weights where training kept some.
The configuration is the checkpoint's, where ``save_checkpoint()`` was given ``client_state=model_state(model)``, or
that of ``--config``, with the ``generation_config.json`` beside it. A checkpoint consists of pickles: export only those
that you trust.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, BertForPreTraining, PreTrainedModel

from ds_vpipe.checkpoints.damage import files_of, refuse_damage
from ds_vpipe.checkpoints.pipeline_checkpoint import PipelineCheckpoint, checkpoint_folder
from ds_vpipe.command_line import Parser, print_answer
from ds_vpipe.errors import Refusal, VPipeError, show
from ds_vpipe.export import DTYPES, expecting_a_pipeline, full_state_dict
from ds_vpipe.models.bert.layers import hugging_face_name, layer_names
from ds_vpipe.models.hugging_face import MODEL_CONFIG, build_meta, model_class, read_config, read_generation_config
from ds_vpipe.whole_file import whole_file


def export(
    checkpoint: PipelineCheckpoint, output: Path, config: Path | None = None, dtype: torch.dtype = torch.float32
) -> None:
    """Write ``output``, a new or empty folder, which appears when complete.

    Raises:
        VPipeError: the configuration does not fit the checkpoint, or the folder cannot be written.
    """
    where = f"checkpoint {checkpoint.folder}"
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise Refusal("OUTPUT_DIR", str(output), "a new folder", "name another one, or remove it").error()
    fields: Any = checkpoint.stages[0].get(MODEL_CONFIG, {})
    settings = None if config is None else read_config(config)
    try:
        settings = settings or AutoConfig.for_model(**fields)
    except (TypeError, ValueError, StrictDataclassError) as error:
        allowed, remedy = "the model's configuration, which this checkpoint lacks", "give the model's config.json"
        raise Refusal("--config", None, allowed, remedy, show(str(error)) if fields else "").error() from error
    ours = checkpoint.copies is None
    make: Callable[[Any], PreTrainedModel] = BertForPreTraining if ours else model_class(settings, str(config or where))
    with expecting_a_pipeline(checkpoint.folder):
        weights = _bert_weights(settings, checkpoint, dtype) if ours else full_state_dict(checkpoint, dtype)
    model = build_meta(make, settings, str(config or where))
    _check(weights, model.state_dict(), where)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    if config is not None:
        read_generation_config(model, config if config.is_dir() else config.parent)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(output) as part:
            model.save_pretrained(part)
    except OSError as error:
        raise Refusal("OUTPUT_DIR", str(output), "a path to write to", "correct the path", str(error)).error() from None


def _bert_weights(config: Any, checkpoint: PipelineCheckpoint, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights of the layers of :mod:`ds_vpipe.models.bert.layers`, under Hugging Face's names."""
    if config.model_type != "bert":
        allowed = "layers of models/bert/train.py, or of a plain model"
        remedy = "export it with python -m ds_vpipe.export, under the names of its own layers"
        raise Refusal(f"checkpoint {checkpoint.folder}", f"layers of a {config.model_type}", allowed, remedy).error()
    config.tie_word_embeddings = "decoder.weight" not in checkpoint.layer(checkpoint.layers[-1])
    names = layer_names(config)
    weights: dict[str, Tensor] = {}
    try:
        if checkpoint.layers != list(range(len(names))):
            raise LookupError(f"{len(checkpoint.layers)} layers")
        for name, tensor in full_state_dict(checkpoint, dtype, by_layer=True).items():
            layer, _, own = name.partition(".")
            if layer.isdecimal():
                weights[hugging_face_name(names[int(layer)], own)] = tensor
    except LookupError as error:
        raise VPipeError(
            f"checkpoint {str(checkpoint.folder)!r}: got {error}, allowed are the {len(names)} layers of a bert with "
            f"num_hidden_layers {config.num_hidden_layers}; correct --config"
        ) from None
    for one, other in (("bias", "decoder.bias"), ("decoder.bias", "bias")):
        if f"cls.predictions.{one}" in weights:
            weights.setdefault(f"cls.predictions.{other}", weights[f"cls.predictions.{one}"].clone())
    if config.tie_word_embeddings:
        weights["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"]
    return weights


def _check(weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: str) -> None:
    for name, tensor in wanted.items():
        if name not in weights:
            raise Refusal(where, name, "all weights of the model", "correct --config", "no layer has it").error()
        if weights[name].shape != tensor.shape:
            given, allowed = list(weights[name].shape), f"{list(tensor.shape)}, as config.json has it"
            raise Refusal(f"tensor {name} in {where}", given, allowed, "correct --config").error()
    for name in sorted(weights.keys() - wanted.keys()):
        remedy = "correct --config, or export it with python -m ds_vpipe.export"
        raise Refusal(where, name, "weights of the model alone", remedy, "the model has no such weight").error()


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Its exit status is 2 for a wrong command line or checkpoint."""
    parser = Parser(
        prog="python -m ds_vpipe.models.export", description="Export a pipeline checkpoint for Hugging Face."
    )
    parser.add_argument("checkpoint_dir", help="directory given to save_checkpoint(), or one checkpoint's folder")
    parser.add_argument("output", type=Path, help="folder to write: config.json and model.safetensors")
    parser.add_argument("--tag", help="which checkpoint; default: the latest")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the tensors")
    parser.add_argument("--config", type=Path, help="config.json of the model; default: as the checkpoint says")
    given = parser.parse_args(argv)
    try:
        folder = checkpoint_folder(given.checkpoint_dir, given.tag)
        refuse_damage(folder, files_of(folder))
        with expecting_a_pipeline(folder):
            checkpoint = PipelineCheckpoint(folder)
        export(checkpoint, given.output, given.config, DTYPES[given.dtype])
    except VPipeError as error:
        print(f"ds_vpipe.models.export: {error}", file=sys.stderr)
        return 2
    print_answer(f"{given.output}: {given.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
