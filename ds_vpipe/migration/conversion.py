"""From what vPipe's files say to a DeepSpeed JSON, the devices, the arguments of training, and what was lost.

Nothing here reads or writes files. What vPipe does is taken from its code: apex's FusedLAMB with its defaults for what
the YAML cannot say, and the defaults of its training script for what the YAML does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds_vpipe.errors import Refusal
from ds_vpipe.migration.learning_rate import scheduler
from ds_vpipe.migration.machines import LOCAL, Hosts
from ds_vpipe.migration.remark import Remark
from ds_vpipe.migration.stage_files import Split, StageMaps
from ds_vpipe.migration.vpipe_block import micro_batches, vpipe_block
from ds_vpipe.migration.vpipe_file import VPipeFile

MODEL_OF_LAYERS = {49: "large", 97: "large-48l"}
"""Sizes of this project's BERT that have as many layers as vPipe's models."""

_DEFAULTS = {"batch_size": 8, "learning_rate": 0.1, "weight_decay": 1e-4, "epochs": 100, "print_frequency": 10}
# What vPipe and PipeDream train each type of model with; apex's FusedLAMB also clips at norm 1.
_OPTIMIZERS: dict[str, tuple[str, dict[str, Any], float]] = {
    "bert": ("Lamb", {"betas": [0.9, 0.999], "eps": 1e-6}, 1.0),
    "translation": ("Adam", {"betas": [0.9, 0.999], "adam_w_mode": False}, 0.0),
    "image_classification": ("SGD", {"momentum": 0.9}, 0.0),
}


@dataclass(frozen=True)
class Conversion:
    """The result.

    Attributes:
        ds_config: the DeepSpeed JSON.
        hosts: the devices.
        num_stages: pipeline stages; the other ranks are replicas.
        arguments: of ``models/bert/train.py``; without paths, which the writer knows. None for other models.
        remarks: what became of every field.
    """

    ds_config: dict[str, Any]
    hosts: Hosts
    num_stages: int
    arguments: tuple[str, ...] | None
    remarks: tuple[Remark, ...]


def convert(file: VPipeFile, split: Split | None, maps: StageMaps | None, model: str | None = None) -> Conversion:
    """Convert one run.

    Args:
        file: the YAML.
        split: its partition file, if it names one.
        maps: its ``config_file``, if it names one. One of the two is needed.
        model: size or JSON file of the BERT; default: the size with as many layers as ``split`` has.

    Raises:
        VPipeConfigError: the files contradict each other.
    """
    num_stages = len(split.partition) if split is not None else len(maps.modules) if maps is not None else 1
    replicas = _check_ranks(file, maps, num_stages)
    remarks: list[Remark] = []
    ahead = num_stages - 1 if maps is None or maps.depth is None else maps.depth[0]
    batches = micro_batches(file, ahead, remarks)
    block = vpipe_block(file, split, maps, num_stages, remarks)
    ds_config = _ds_config(file, batches, remarks)
    ds_config["vpipe"] = block
    hosts = _hosts(file, maps, num_stages, replicas, remarks)
    arguments = _arguments(file, split, num_stages, replicas, model, remarks) if file.model_type == "bert" else None
    _rest(file, maps, remarks)
    return Conversion(ds_config, hosts, num_stages, arguments, in_order(file, remarks))


def _check_ranks(file: VPipeFile, maps: StageMaps | None, num_stages: int) -> int:
    count, name = len(file.machines), f"{file.path}: machines"
    if maps is None:
        if count % num_stages:
            allowed = f"a multiple of {num_stages}, the stages of the partition"
            raise Refusal(name, count, allowed, "name so many devices, or give a config_file").error()
        return count // num_stages
    if len(maps.modules) != num_stages:
        where, reason = f"{file.path}: config_file", f"it has {len(maps.modules)} stages and the partition {num_stages}"
        raise Refusal(where, file.config_file, "as many stages in both files", "correct one of them", reason).error()
    ranks = num_stages * maps.replicas
    if count != ranks:
        reason = f"stage_to_rank_map in {file.config_file} has {ranks} ranks"
        raise Refusal(name, count, "one device per rank", f"name {ranks} devices", reason).error()
    return maps.replicas


def _ds_config(file: VPipeFile, batches: int, remarks: list[Remark]) -> dict[str, Any]:
    def value(key: str) -> Any:
        given = getattr(file, key)
        return _DEFAULTS[key] if given is None else given

    def keep(key: str, becomes: str, why: str = "") -> None:
        why = why or ("" if key in file.given else "vPipe's default")
        remarks.append(Remark("kept", key, file.given.get(key), becomes, why))

    keep("batch_size", f"train_micro_batch_size_per_gpu {value('batch_size')}")
    keep("learning_rate", f"optimizer.params.lr {value('learning_rate'):g}")
    keep("weight_decay", f"optimizer.params.weight_decay {value('weight_decay'):g}")
    every = max(1, value("print_frequency") // batches)
    why = "" if batches == 1 else f"in updates of {batches} micro-batches"
    keep("print_frequency", f"steps_per_print {every}", why)
    optimizer, clipping = _optimizer(file, value("learning_rate"), value("weight_decay"), remarks)
    entry, found = scheduler(file)
    remarks.extend(found)
    return {
        "train_micro_batch_size_per_gpu": value("batch_size"),
        "gradient_accumulation_steps": batches,
        "steps_per_print": every,
        "gradient_clipping": clipping,
        **optimizer,
        **({} if entry is None else {"scheduler": entry}),
    }


def _optimizer(file: VPipeFile, rate: float, decay: float, remarks: list[Remark]) -> tuple[dict[str, Any], float]:
    if file.model_type not in _OPTIMIZERS:
        why = 'no public code says what these models were trained with: add an "optimizer"'
        remarks.append(Remark("dropped", "model_type", file.model_type, "", why))
        return {}, 0.0
    kind, params, clipping = _OPTIMIZERS[file.model_type]
    why = "what vPipe and PipeDream train this type of model with, in their code"
    remarks.append(Remark("kept", "model_type", file.model_type, f"optimizer {kind}", why))
    if file.model_type == "bert" and not decay:
        why = (
            "apex's FusedLAMB does not scale weights without weight decay by their norm, which makes it Adam; Lamb "
            'does scale them: write "AdamW" for the same updates'
        )
        remarks.append(Remark("changed", "weight_decay", decay, f"optimizer {kind}", why))
    if clipping and file.sync_mode == "bsp":
        why = "FusedLAMB's default, by the norm of the whole model here and of each stage in vPipe"
        remarks.append(Remark("changed", "model_type", file.model_type, f"gradient_clipping {clipping:g}", why))
    elif clipping:
        why = "FusedLAMB's default, by each stage's own norm as in vPipe"
        remarks.append(Remark("kept", "model_type", file.model_type, f"gradient_clipping {clipping:g}", why))
    return {"optimizer": {"type": kind, "params": {"lr": rate, **params, "weight_decay": decay}}}, clipping


def _hosts(file: VPipeFile, maps: StageMaps | None, num_stages: int, replicas: int, remarks: list[Remark]) -> Hosts:
    hosts = Hosts.of(file.machines)
    becomes = ", ".join(hosts.hostfile().splitlines())
    if not hosts.first_devices:
        becomes += f"; --include {hosts.include()}"
        why = "vPipe did not read the GPU's number and took 0, 1, ...; here it is what you wrote"
        remarks.append(Remark("changed", "machines", file.given["machines"], becomes, why))
    else:
        remarks.append(Remark("kept", "machines", file.given["machines"], becomes))
    first = next(iter(hosts.gpus))
    if len(hosts.gpus) == 1 and first not in LOCAL:
        why = "a single machine needs neither hostfile nor ssh"
        remarks.append(Remark("kept", "machines", first, f"start the command on {first}", why))
    if len(hosts.gpus) > 1 and any(host in LOCAL for host in hosts.gpus):
        why = "the other hosts cannot reach it by that name: write the name that they know"
        remarks.append(Remark("changed", "machines", "localhost", "a line of the hostfile", why))
    if maps is not None:
        usual = tuple(tuple(range(stage * replicas, (stage + 1) * replicas)) for stage in range(num_stages))
        value = {str(stage): list(ranks) for stage, ranks in enumerate(maps.ranks)}
        becomes = f"{num_stages} stages of {replicas} rank(s)"
        if maps.ranks == usual:
            remarks.append(Remark("kept", "stage_to_rank_map", value, becomes))
        else:
            why = "stage s has the ranks sR .. sR+R-1 here: order the lines of the hostfile by stage"
            remarks.append(Remark("changed", "stage_to_rank_map", value, becomes, why))
    return hosts


def _arguments(
    file: VPipeFile, split: Split | None, num_stages: int, replicas: int, model: str | None, remarks: list[Remark]
) -> tuple[str, ...]:
    layers = sum(split.partition) if split is not None else None
    if model is None and layers is not None:
        model = MODEL_OF_LAYERS.get(layers)
    if model is None:
        sizes = ", ".join(f"{count} ({name})" for count, name in MODEL_OF_LAYERS.items())
        remedy = "name the model: --bert-config SIZE or FILE"
        raise Refusal(f"{file.partition or file.config_file}: layers", layers, sizes, remedy).error()
    arguments = ["--config_name", model]
    why = "layers are vPipe's blocks; the decoder has a bias and the loss next-sentence prediction, unlike vPipe's"
    remarks.append(Remark("changed", "module", file.module, f"--config_name {model}", why))
    if replicas > 1:
        arguments += ["--num_stages", str(num_stages)]
    epochs = _DEFAULTS["epochs"] if file.epochs is None else file.epochs
    arguments += ["--num_train_epochs", str(epochs)]
    why = "an epoch is all files with 'training' in their names; vPipe's was the first of them"
    remarks.append(Remark("changed", "epochs", file.epochs, f"--num_train_epochs {epochs}", why))
    return tuple(arguments)


def _rest(file: VPipeFile, maps: StageMaps | None, remarks: list[Remark]) -> None:
    given = file.given
    if file.directory is not None:
        remarks.append(Remark("dropped", "directory", file.directory, "", "paths in the file begin there"))
    if file.config_file is not None:
        remarks.append(Remark("kept", "config_file", file.config_file, "the stages and their ranks, below"))
    if file.distributed_backend == "gloo":
        why = "between stages; replicas reduce over NCCL on GPUs, over Gloo on CPUs"
        remarks.append(Remark("kept", "distributed_backend", "gloo", "Gloo", why))
    else:
        why = "between stages; replicas reduce over NCCL on GPUs as before. Several interfaces: set GLOO_SOCKET_IFNAME"
        remarks.append(Remark("changed", "distributed_backend", file.distributed_backend, "Gloo", why))
    if file.container is not None:
        why = "start the command inside of it, on every host"
        remarks.append(Remark("dropped", "container", file.container, "", why))
    if "verbose_frequency" in given:
        why = "metrics.jsonl has each stage's statistics, with every line"
        if file.verbose_frequency:
            why += '; "timeline": {"enabled": true} records every pass'
        remarks.append(Remark("dropped", "verbose_frequency", file.verbose_frequency, "", why))
    for key in ("compress_activations", "compress_in_gpu"):
        if key in given:
            remarks.append(Remark("dropped", key, given[key], "", "vPipe does not read it either"))
    for key in ("macrobatch", "recompute", "no_input_pipelining", "synthetic_data"):
        if given.get(key) is False:
            remarks.append(Remark("kept", key, False, "the default"))
    for key, value in file.unknown.items():
        remarks.append(Remark("dropped", key, value, "", "neither vPipe nor PipeDream reads it"))
    if file.module is not None and file.model_type != "bert":
        why = "write the model as a PipelineModule: docs/migrating.md"
        remarks.append(Remark("dropped", "module", file.module, "", why))
        remarks.append(Remark("dropped", "epochs", file.epochs, "", "your script decides"))
    for key, value in ({} if maps is None else maps.unknown).items():
        why = "not split over tensors here" if key == "mp_size" else "vPipe does not read it"
        remarks.append(Remark("dropped", f"{key} in {file.config_file}", value, "", why))


def in_order(file: VPipeFile, remarks: Sequence[Remark]) -> tuple[Remark, ...]:
    """Remarks in the order of the file, then those on what is not in it."""
    place = {key: index for index, key in enumerate(file.given)}
    return tuple(sorted(remarks, key=lambda remark: place.get(remark.field, len(place))))
