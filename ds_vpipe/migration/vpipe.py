"""A vPipe or PipeDream run in DeepSpeed's terms: JSON, hostfile, command, and what became of every field.

What vPipe does is taken from its code: apex's FusedLAMB with its defaults for what the YAML cannot say, and the
defaults of its training script for what the YAML does not.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.block import spread
from ds_vpipe.errors import Refusal, read_json, show
from ds_vpipe.migration.vpipe_files import StageMaps, VPipeFile

MODEL_OF_LAYERS = {49: "large", 97: "large-48l"}
"""Sizes of this project's BERT that have as many layers as vPipe's models."""

LAYERS_OF_MODEL = {"tiny": 9, "mini": 9, "base": 25, **{name: count for count, name in MODEL_OF_LAYERS.items()}}
"""Layers of all sizes of this project's BERT."""

LOCAL = ("localhost", "127.0.0.1")
BSP_MICRO_BATCHES = 32
MACROBATCH_VERSIONS = 2
TOTAL_STEPS = 36320  # updates of the schedule that vPipe's BERT always trains with, whatever the YAML says; in its code
WARMUP_STEPS = TOTAL_STEPS // 5

_SCRIPT = Path("models/bert/train.py")
_DEFAULTS = {"batch_size": 8, "learning_rate": 0.1, "weight_decay": 1e-4, "epochs": 100, "print_frequency": 10}
# What vPipe and PipeDream train each type of model with; apex's FusedLAMB also clips at norm 1.
_OPTIMIZERS: dict[str, tuple[str, dict[str, Any], float]] = {
    "bert": ("Lamb", {"betas": [0.9, 0.999], "eps": 1e-6}, 1.0),
    "translation": ("Adam", {"betas": [0.9, 0.999], "adam_w_mode": False}, 0.0),
    "image_classification": ("SGD", {"momentum": 0.9}, 0.0),
}
_WARMUP = {"warmup_num_steps": WARMUP_STEPS}
_ENDING = {"total_num_steps": TOTAL_STEPS, **_WARMUP}
_BERT_POLICIES: dict[str, dict[str, Any]] = {
    "polynomial": {"type": "PolyWarmupLR", "params": {**_ENDING, "degree": 0.5}},
    "linear": {"type": "LinearWarmupLR", "params": _ENDING},
    "cosine": {"type": "CosineWarmupLR", "params": _ENDING},
    "constant": {"type": "ConstantWarmupLR", "params": _WARMUP},
}
_EPOCH_POLICIES = {
    "step": '{"type": "StepWarmupLR", "params": {"step_size": UPDATES OF 30 EPOCHS, "gamma": 0.1}}',
    "polynomial": '{"type": "PolyWarmupLR", "params": {"total_num_steps": UPDATES OF ALL EPOCHS, "degree": 2}}',
    "exponential_decay": '{"type": "StepWarmupLR", "params": {"step_size": UPDATES OF ONE EPOCH, "gamma": 0.97}}',
}
Kind = Literal["kept", "changed", "dropped"]
Row = tuple[Any, ...]
"""Whether it holds, then kind, field, new setting and reason of a remark, and its value if it is not the YAML's."""


@dataclass(frozen=True)
class Remark:
    """One field of the files that were read, and its counterpart."""

    kind: Kind  # kept if it means the same, changed if it does not quite, dropped if it has no counterpart
    field: str  # with the file's name where it is not the YAML
    value: object  # as written; None if it is absent
    becomes: str  # the new setting; empty if there is none
    why: str = ""  # the difference, or what to do instead

    def __str__(self) -> str:
        value = "absent" if self.value is None else show(self.value)
        why = f"; {self.why}" if self.why else ""
        return " ".join(f"{self.kind}: {self.field} {value} -> {self.becomes or 'nothing'}{why}".split())


class Hosts(dict[str, tuple[int, ...]]):
    """Devices of every host, hosts in the order of their first rank, devices in the order of their numbers.

    This is the order in which DeepSpeed's launcher numbers ranks; vPipe's driver did the same.
    """

    @classmethod
    def of(cls, machines: list[str]) -> Hosts:
        """Collect vPipe's ``HOST:GPU`` per rank."""
        pairs = [machine.split(":") for machine in machines]
        return cls({host: tuple(sorted(int(gpu) for name, gpu in pairs if name == host)) for host, _ in pairs})

    @property
    def first_devices(self) -> bool:
        """Whether every host's devices are numbered from 0 without a gap."""
        return all(gpus == tuple(range(len(gpus))) for gpus in self.values())

    def hostfile(self) -> str:
        """DeepSpeed's hostfile: a line ``HOST slots=N`` per host, N large enough for the highest device."""
        return "".join(f"{host} slots={max(gpus) + 1}\n" for host, gpus in self.items())

    def include(self) -> str:
        """The value of the launcher's ``--include``: ``HOST:GPU,GPU@HOST:GPU``."""
        return "@".join(f"{host}:{','.join(map(str, gpus))}" for host, gpus in self.items())


def _layers_in(path: str) -> int:
    """Pipeline layers of the BERT in a file."""
    sizes, allowed = ", ".join(LAYERS_OF_MODEL), "a JSON file with the fields of BertConfig"
    fields = read_json(path, "--bert-config", f"{sizes}, or {allowed}", "correct the name")
    count = fields.get("num_hidden_layers")
    if type(count) is not int or count < 1:
        raise Refusal(f"num_hidden_layers in {path}", count, "an int >= 1", "correct it").error()
    return 2 * count + 1


class Conversion:
    """A converted run.

    Args:
        file: the YAML.
        split: its partition file, if it names one.
        maps: its ``config_file``, if it names one. One of the two is needed.
        output: folder for the converted files.
        root: folder in which vPipe's driver was started; None if it is to be looked for.
        model: size or JSON file of the BERT; default: the size with as many layers as ``split`` has.

    Raises:
        VPipeConfigError: the files contradict each other.
    """

    def __init__(
        self,
        file: VPipeFile,
        split: VPipeConfig | None,
        maps: StageMaps | None,
        output: Path,
        root: Path | None = None,
        model: str | None = None,
    ) -> None:
        self._file, self._maps, self._output = file, maps, output
        self._layers = list(split.partition) if split and isinstance(split.partition, tuple) else None
        self.num_stages = len(self._layers or (maps.modules if maps else ()))  # the other ranks are replicas
        self._replicas = self._check_ranks()
        self._bsp, self._bert = file.sync_mode == "bsp", file.model_type == "bert"
        self._alone = file.no_input_pipelining and not self._bsp
        self._asp = not self._bsp and not self._alone
        self._ahead = maps.depth[0] if maps and maps.depth else self.num_stages - 1
        self._batches = self._micro_batches()
        self._given_ratios = self._ratios(split)
        self._scheduler = self._find_scheduler()
        self.hosts = Hosts.of(file.machines)
        self._model = self._find_model(model) if self._bert else ""
        folders = list(file.folders(root))
        home = next((folder for folder in folders if folder.is_dir()), folders[0])
        tried = [folder / str(file.data_dir) for folder in folders]
        self._data = next((path for path in tried if path.is_dir()), home / str(file.data_dir))
        self._runs = home / (file.log_directory or "runs") / file.path.stem
        self.ds_config = self._json()
        self.command = self._command()
        remarks = [self._remark(*row[1:]) for row in self._rows() if row[0]]
        place = {key: index for index, key in enumerate(file.given)}
        # In the order of the file, then those on what is not in it.
        self.remarks = sorted(remarks, key=lambda remark: place.get(remark.field, len(place)))

    def _remark(self, kind: Kind, field: str, becomes: str, why: str = "", *value: object) -> Remark:
        return Remark(kind, field, value[0] if value else self._file.given.get(field), becomes, why)

    def _value(self, key: str) -> Any:
        value = getattr(self._file, key)
        return _DEFAULTS[key] if value is None else value

    def _check_ranks(self) -> int:
        """Replicas of every stage."""
        file, count, name = self._file, len(self._file.machines), f"{self._file.path}: machines"
        if self._maps is None:
            if count % self.num_stages:
                allowed = f"a multiple of {self.num_stages}, the stages of the partition"
                raise Refusal(name, count, allowed, "name so many devices, or give a config_file").error()
            return count // self.num_stages
        stages, replicas = len(self._maps.modules), len(self._maps.ranks[0])
        if stages != self.num_stages:
            reason = f"it has {stages} stages and the partition {self.num_stages}"
            where, allowed = f"{file.path}: config_file", "as many stages in both files"
            raise Refusal(where, file.config_file, allowed, "correct one of them", reason).error()
        if count != stages * replicas:
            reason = f"stage_to_rank_map in {file.config_file} has {stages * replicas} ranks"
            raise Refusal(name, count, "one device per rank", f"name {stages * replicas} devices", reason).error()
        return replicas

    def _micro_batches(self) -> int:
        """Micro-batches per update."""
        if self._bsp:
            return BSP_MICRO_BATCHES
        return min(MACROBATCH_VERSIONS, self._ahead + 1) if self._file.macrobatch and not self._alone else 1

    def _ratios(self, split: VPipeConfig | None) -> list[float]:
        """Ratios in the partition file, empty if there are none."""
        if split is None or "recompute_ratio" not in split.model_fields_set or split.recompute_ratio == "auto":
            return []
        return [int(r) if r == int(r) else r for r in spread(split.recompute_ratio, self.num_stages)]

    def _find_scheduler(self) -> dict[str, Any] | None:
        """The ``"scheduler"``, None where it depends on the size of the data."""
        policy = self._file.learning_rate_policy
        if policy not in (None, *_BERT_POLICIES, *_EPOCH_POLICIES):
            known = ", ".join(_BERT_POLICIES if self._bert else _EPOCH_POLICIES)
            raise Refusal(f"{self._file.path}: learning_rate_policy", policy, known, "write one of them").error()
        return _BERT_POLICIES.get(policy or "polynomial") if self._bert else None

    def _find_model(self, given: str | None) -> str:
        layers = sum(self._layers) if self._layers else None
        model = given or MODEL_OF_LAYERS.get(layers or 0)
        if model is None:
            sizes = ", ".join(f"{count} ({name})" for count, name in MODEL_OF_LAYERS.items())
            remedy = "name the model: --bert-config SIZE or FILE"
            where = f"{self._file.partition or self._file.config_file}: layers"
            raise Refusal(where, layers, sizes, remedy).error()
        if given is not None:
            found = LAYERS_OF_MODEL.get(given) or _layers_in(given)
            if layers not in (None, found):
                allowed = f"a BERT of {layers} layers, as the split has: num_hidden_layers {layers // 2}"
                raise Refusal("--bert-config", given, allowed, "name another one", f"it has {found} layers").error()
        return model

    def _json(self) -> dict[str, Any]:
        file, maps = self._file, self._maps
        optimizer: dict[str, Any] = {"gradient_clipping": 0.0}
        if file.model_type in _OPTIMIZERS:
            kind, params, clipping = _OPTIMIZERS[file.model_type]
            params = {"lr": self._value("learning_rate"), **params, "weight_decay": self._value("weight_decay")}
            optimizer = {"gradient_clipping": clipping, "optimizer": {"type": kind, "params": params}}
        # Without the key Adam would get settings against late gradients, which vPipe does nothing about.
        asp: dict[str, Any] = {"sync_mode": "asp", "weight_sync": "stash", "staleness": "off"}
        block: dict[str, Any] = asp if self._asp else {"sync_mode": "bsp"}
        modules = maps.modules if maps else [1]
        block["partition"] = self._layers or (modules if max(modules) > 1 else "parameters")
        ratios = self._given_ratios or [0] * self.num_stages
        if file.recompute:
            ratios = [1] * (self.num_stages - 1) + [ratios[-1]]
        if any(ratios):
            block["recompute_ratio"] = ratios
        if maps and maps.depth and self._asp:
            block["stage_to_depth_map"] = maps.depth
        return {
            "train_micro_batch_size_per_gpu": self._value("batch_size"),
            "gradient_accumulation_steps": self._batches,
            "steps_per_print": max(1, self._value("print_frequency") // self._batches),
            **optimizer,
            **({} if self._scheduler is None else {"scheduler": self._scheduler}),
            "vpipe": block,
        }

    def _rows(self) -> Iterator[Row]:
        """Remarks on the fields of the YAML and its files."""
        yield from self._mode_rows()
        yield from self._split_rows()
        yield from self._optimizer_rows()
        yield from self._schedule_rows()
        yield from self._device_rows()
        yield from self._script_rows()

    def _mode_rows(self) -> Iterator[Row]:
        file, bsp, bert, asp = self._file, self._bsp, self._bert, self._asp
        steps, batches = "gradient_accumulation_steps", self._batches
        why = "vPipe flushes and updates after so many"
        mean = f"{why}; its gradients were 4 times the mean, which LAMB notices only in clipping"
        yield bsp, "kept", "sync_mode", 'vpipe.sync_mode "bsp"', "1F1B with a flush, as vPipe's"
        yield bsp and bert, "changed", "sync_mode", f"{steps} {batches}", mean
        yield bsp and not bert, "kept", "sync_mode", f"{steps} {batches}", why
        yield bsp and file.macrobatch, "dropped", "macrobatch", "", "bsp keeps one version of the weights anyway"
        why = "a batch gives the same update in any order of its micro-batches"
        yield bsp and file.no_input_pipelining, "dropped", "no_input_pipelining", "", why
        why = "one micro-batch at a time is a synchronous pipeline with batches of one"
        yield self._alone, "changed", "no_input_pipelining", f'vpipe.sync_mode "bsp", {steps} 1', why
        why = "PipeDream knows no other" if file.of_pipedream else ""
        yield asp, "kept", "sync_mode", 'vpipe.sync_mode "asp", weight_sync "stash"', why
        why = "late gradients are left as they are; without it Adam and AdamW would be trained otherwise than by vPipe"
        yield asp, "kept", "sync_mode", 'vpipe.staleness "off"', why
        why = "an update after every micro-batch"
        yield asp and not file.macrobatch, "kept", "sync_mode", f"{steps} 1", why
        copies = 1 + -(-self._ahead // batches)
        why = "an update after every two micro-batches, at the last stage too, which vPipe updated after every one"
        if copies > MACROBATCH_VERSIONS:
            why += (
                f"; stage 0 keeps {copies} versions, because vPipe's two are not those that micro-batches in flight"
                f" used: write {self._ahead} for two exact versions and a batch that is larger"
            )
        yield asp and file.macrobatch, "changed", "macrobatch", f"{steps} {batches}", why

    def _split_rows(self) -> Iterator[Row]:
        file, maps, block, asp = self._file, self._maps, self.ds_config["vpipe"], self._asp
        field, partition = "module_to_stage_map", block["partition"]
        yield self._layers, "kept", "partition", f"vpipe.partition {partition}"
        if not self._layers and maps:
            why = f"taken for layers; the model has to have {sum(maps.modules)}"
            counted = partition != "parameters"
            yield counted, "changed", field, f"vpipe.partition {partition}", why, maps.modules
            why = "the modules are whole stages, so how many layers each has is not known; "
            why += "python -m ds_vpipe plan finds out"
            yield not counted, "changed", field, 'vpipe.partition "parameters"', why
        ratios, name = self._given_ratios, f"recompute_ratio in {file.partition}"
        why, shares = "a share of layers here, of lines of code in vPipe", any(0 < ratio < 1 for ratio in ratios)
        yield shares, "changed", name, f"vpipe.recompute_ratio {ratios}", why, ratios
        becomes = f"vpipe.recompute_ratio {ratios if any(ratios) else '0, its default'}"
        yield ratios and not shares, "kept", name, becomes, "", ratios
        becomes, why = f"vpipe.recompute_ratio {block.get('recompute_ratio')}", "every stage but the last, whole"
        yield file.recompute, "kept", "recompute", becomes, why
        field, depth = "stage_to_depth_map", maps and maps.depth
        why = "a pipeline that drains after every batch has no depth to choose"
        yield depth and not asp, "dropped", field, "", why, depth
        yield depth and asp, "kept", field, "vpipe.stage_to_depth_map", "", depth

    def _optimizer_rows(self) -> Iterator[Row]:
        file, given, bsp, bert, batches = self._file, self._file.given, self._bsp, self._bert, self._batches
        for field, becomes in (
            ("batch_size", f"train_micro_batch_size_per_gpu {self._value('batch_size')}"),
            ("learning_rate", f"optimizer.params.lr {self._value('learning_rate'):g}"),
            ("weight_decay", f"optimizer.params.weight_decay {self._value('weight_decay'):g}"),
        ):
            yield True, "kept", field, becomes, "" if field in given else "vPipe's default"
        why = "" if "print_frequency" in given else "vPipe's default"
        why = f"in updates of {batches} micro-batches" if batches > 1 else why
        yield True, "kept", "print_frequency", f"steps_per_print {self.ds_config['steps_per_print']}", why
        kind, _, clipping = _OPTIMIZERS.get(file.model_type, ("", {}, 0.0))
        why = 'no public code says what these models were trained with: add an "optimizer"'
        yield not kind, "dropped", "model_type", "", why
        why = "what vPipe and PipeDream train this type of model with, in their code"
        yield kind, "kept", "model_type", f"optimizer {kind}", why
        decay = self._value("weight_decay")
        why = (
            "apex's FusedLAMB does not scale weights without weight decay by their norm, which makes it Adam; Lamb "
            'does scale them: write "AdamW" for the same updates'
        )
        yield bert and not decay, "changed", "weight_decay", f"optimizer {kind}", why, decay
        why, becomes = "FusedLAMB's default, by ", f"gradient_clipping {clipping:g}"
        theirs = "the norm of the whole model here and of each stage in vPipe"
        yield clipping and bsp, "changed", "model_type", becomes, f"{why}{theirs}"
        yield clipping and not bsp, "kept", "model_type", becomes, f"{why}each stage's own norm as in vPipe"

    def _script_rows(self) -> Iterator[Row]:
        file, given, bert, maps = self._file, self._file.given, self._bert, self._maps
        why = "layers are vPipe's blocks; the decoder has a bias and the loss next-sentence prediction, unlike vPipe's"
        yield bert, "changed", "module", f"--config_name {self._model}", why
        why = "an epoch is all files with 'training' in their names; vPipe's was the first of them"
        yield bert, "changed", "epochs", f"--num_train_epochs {self._value('epochs')}", why
        yield "directory" in given, "dropped", "directory", "", "paths in the file begin there"
        yield "config_file" in given, "kept", "config_file", "the stages and their ranks, below"
        yield "container" in given, "dropped", "container", "", "start the command inside of it, on every host"
        for key in ("compress_activations", "compress_in_gpu"):
            yield key in given, "dropped", key, "", "vPipe does not read it either"
        why = "metrics.jsonl has each stage's statistics, with every line"
        why += '; "timeline": {"enabled": true} records every pass' if file.verbose_frequency else ""
        yield file.verbose_frequency is not None, "dropped", "verbose_frequency", "", why
        for key in ("macrobatch", "recompute", "no_input_pipelining", "synthetic_data"):
            yield given.get(key) is False, "kept", key, "the default"
        for key in given:
            yield key not in VPipeFile.model_fields, "dropped", key, "", "neither vPipe nor PipeDream reads it"
        other = not bert and file.module is not None
        yield other, "dropped", "module", "", "write the model as a PipelineModule: docs/migrating.md"
        yield other, "dropped", "epochs", "", "your script decides"
        for key, value in ((maps and maps.model_extra) or {}).items():
            why = "not split over tensors here" if key == "mp_size" else "vPipe does not read it"
            yield True, "dropped", f"{key} in {file.config_file}", "", why, value
        random = file.synthetic_data
        yield random, "kept", "synthetic_data", "--synthetic", "", True
        yield random and file.data_dir is not None, "dropped", "data_dir", "", "the tokens are random"
        yield not random and not bert, "dropped", "data_dir", "", "your script reads the data"
        becomes, there = f"--data_dir {self._data}", self._data.is_dir()
        yield bert and not random and there, "kept", "data_dir", becomes
        why = "which is not on this machine: correct it in launch.sh"
        yield bert and not random and not there, "changed", "data_dir", becomes, why
        why = "without a folder for the time of the start; go on after a stop with: launch.sh --resume_from_checkpoint"
        yield bert, "changed", "log_directory", f"--output_dir {self._runs}", why
        yield not bert, "dropped", "log_directory", "", "your script decides"

    def _schedule_rows(self) -> Iterator[Row]:
        file, found, field = self._file, self._scheduler, "learning_rate_policy"
        policy, warms_up = file.learning_rate_policy, "lr_warmup" in file.given
        if self._bert:
            usual = policy in ("polynomial", None)
            why = f"warm-up {WARMUP_STEPS} of {TOTAL_STEPS} updates, as in vPipe's code"
            why += "" if usual else "; vPipe's BERT did not read the field and trained with polynomial"
            yield found, "kept" if usual else "changed", field, f"scheduler {found and found['type']}", why
            why = f"it falls by epochs, whose updates are not known here: add {_EPOCH_POLICIES.get(policy or '')}"
            yield not found, "dropped", field, "", why
            why = "vPipe's BERT has no such option; the schedule has a warm-up of its own"
            yield warms_up, "dropped", "lr_warmup", "", why
            return
        entry = _EPOCH_POLICIES.get(policy or "step")
        yield not entry, "dropped", field, "", "vPipe knows this policy for BERT only"
        why = f'it goes by epochs, whose updates are not known here: add "scheduler": {entry}'
        yield entry, "dropped", field, "", why
        why = "it lasts five epochs: add warmup_num_steps to the scheduler" if file.lr_warmup else "it is off"
        yield entry and warms_up, "dropped", "lr_warmup", "", why

    def _device_rows(self) -> Iterator[Row]:
        """Remarks on hosts, devices and backends."""
        hosts = self.hosts
        becomes, first = ", ".join(hosts.hostfile().splitlines()), next(iter(hosts))
        yield hosts.first_devices, "kept", "machines", becomes
        why = "vPipe did not read the GPU's number and took 0, 1, ...; here it is what you wrote"
        yield not hosts.first_devices, "changed", "machines", f"{becomes}; --include {hosts.include()}", why
        why, away = "a single machine needs neither hostfile nor ssh", len(hosts) == 1 and first not in LOCAL
        yield away, "kept", "machines", f"start the command on {first}", why, first
        why = "the other hosts cannot reach it by that name: write the name that they know"
        mixed = len(hosts) > 1 and any(host in LOCAL for host in hosts)
        yield mixed, "changed", "machines", "a line of the hostfile", why, "localhost"
        if self._maps is not None:
            ranks = list(chain(*self._maps.ranks))
            usual, value = ranks == sorted(ranks), {str(stage): each for stage, each in enumerate(self._maps.ranks)}
            becomes = f"{self.num_stages} stages of {self._replicas} rank(s)"
            why = "" if usual else "stage s has the ranks sR .. sR+R-1 here: order the lines of the hostfile by stage"
            yield True, "kept" if usual else "changed", "stage_to_rank_map", becomes, why, value
        field, why = "distributed_backend", "between stages; replicas reduce over NCCL on GPUs"
        gloo = self._file.distributed_backend == "gloo"
        yield gloo, "kept", field, "Gloo", f"{why}, over Gloo on CPUs"
        yield not gloo, "changed", field, "Gloo", f"{why} as before. Several interfaces: set GLOO_SOCKET_IFNAME"

    def _command(self) -> list[str]:
        """The command that starts training on all devices.

        One machine needs neither hostfile nor ssh: the command is for that machine. The launcher's own options come
        first.
        """
        hosts, words, first = self.hosts, ["deepspeed"], next(iter(self.hosts))
        if len(hosts) > 1:
            words += ["--hostfile", str(self._output / "hostfile")]
            words += [] if hosts.first_devices else ["--include", hosts.include()]
            words += [] if first in LOCAL else ["--master_addr", first]
        elif hosts.first_devices:
            words += ["--num_accelerators", str(len(self._file.machines))]
        else:
            words += ["--include", f"localhost:{hosts.include().rpartition(':')[2]}"]
        config = ["--deepspeed_config", str(self._output / "ds_config.json")]
        if not self._bert:
            return [*words, "--module", "ds_vpipe.run", "YOUR_SCRIPT.py", *config]
        script = _SCRIPT if _SCRIPT.is_file() else Path(__file__).parents[1] / _SCRIPT
        words += [str(script), *config, "--config_name", self._model]
        words += ["--num_stages", str(self.num_stages)] if self._replicas > 1 else []
        words += ["--num_train_epochs", str(self._value("epochs"))]
        words += ["--synthetic"] if self._file.synthetic_data else ["--data_dir", str(self._data)]
        return [*words, "--output_dir", str(self._runs), "--save_strategy", "epoch"]

    def files(self) -> dict[str, str]:
        """Names and contents of the files to write."""
        several = len(self.hosts) > 1
        environment = (
            "# Variables for the other hosts, if there is no file of your own.\n"
            f"[[ -e ~/.deepspeed_env || -e .deepspeed_env || -v DS_ENV_FILE ]] ||\n"
            f"    export DS_ENV_FILE={shlex.quote(str((self._output / 'deepspeed_env').resolve()))}\n"
        )
        launch = (
            "#!/usr/bin/env bash\n"
            f"# Trains what {show(self._file.path.name)} describes. Arguments go to the training script.\n"
            f"set -euo pipefail\ncd {shlex.quote(str(Path.cwd()))}\n"
            'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"\n'
            f"{environment if several else ''}"
            f'exec {shlex.join(self.command)} "$@"\n'
        )
        return {
            "ds_config.json": _text(self.ds_config) + "\n",
            "hostfile": self.hosts.hostfile(),
            "conversion.txt": "".join(f"{remark}\n" for remark in self.remarks),
            "launch.sh": launch,
            **({"deepspeed_env": "OMP_NUM_THREADS=1\n"} if several else {}),  # the launcher hands it on to other hosts
        }


def _text(value: object, indent: str = "") -> str:
    """JSON with lists on one line, as people write them."""
    if not isinstance(value, dict):
        return json.dumps(value)
    inner = ",\n".join(f"{indent}  {json.dumps(key)}: {_text(item, indent + '  ')}" for key, item in value.items())
    return f"{{\n{inner}\n{indent}}}"
