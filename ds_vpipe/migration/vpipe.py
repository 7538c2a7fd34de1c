"""A vPipe or PipeDream run in DeepSpeed's terms: JSON, hostfile, command, and what became of every field.

What vPipe does is taken from its code: apex's FusedLAMB with its defaults for what the YAML cannot say, and the
defaults of its training script for what the YAML does not.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ds_vpipe.errors import Refusal, show
from ds_vpipe.migration.vpipe_files import Split, StageMaps, VPipeFile

MODEL_OF_LAYERS = {49: "large", 97: "large-48l"}
"""Sizes of this project's BERT that have as many layers as vPipe's models."""

LOCAL = ("localhost", "127.0.0.1")
BSP_MICRO_BATCHES = 32
MACROBATCH_VERSIONS = 2
TOTAL_STEPS = 36320
"""Updates of the schedule that vPipe's BERT always trains with, whatever the YAML says; in its code."""
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
# What becomes of fields whose value does not matter: kind, new setting, reason.
_FIXED: dict[str, tuple[Kind, str, str]] = {
    "directory": ("dropped", "", "paths in the file begin there"),
    "config_file": ("kept", "the stages and their ranks, below", ""),
    "container": ("dropped", "", "start the command inside of it, on every host"),
    "compress_activations": ("dropped", "", "vPipe does not read it either"),
    "compress_in_gpu": ("dropped", "", "vPipe does not read it either"),
}


@dataclass(frozen=True)
class Remark:
    """One field of the files that were read, and its counterpart.

    Attributes:
        kind: ``kept`` if it means the same, ``changed`` if it does not quite, ``dropped`` if it has no counterpart.
        field: its name, with the file's where it is not the YAML.
        value: as written; None if it is absent.
        becomes: the new setting; empty if there is none.
        why: the difference, or what to do instead.
    """

    kind: Kind
    field: str
    value: object
    becomes: str
    why: str = ""

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


class Conversion:
    """A converted run.

    Args:
        file: the YAML.
        split: its partition file, if it names one.
        maps: its ``config_file``, if it names one. One of the two is needed.
        output: folder for the converted files.
        root: folder in which vPipe's driver was started; None if it is to be looked for.
        model: size or JSON file of the BERT; default: the size with as many layers as ``split`` has.

    Attributes:
        ds_config: the DeepSpeed JSON.
        hosts: the devices.
        num_stages: pipeline stages; the other ranks are replicas.
        command: words of the command that trains.
        remarks: what became of every field, in the order of the file, then those on what is not in it.

    Raises:
        VPipeConfigError: the files contradict each other.
    """

    def __init__(
        self,
        file: VPipeFile,
        split: Split | None,
        maps: StageMaps | None,
        output: Path,
        root: Path | None = None,
        model: str | None = None,
    ) -> None:
        self._file, self._split, self._maps, self._output = file, split, maps, output
        self.remarks: list[Remark] = []
        self.num_stages = len(split.partition) if split else len(maps.modules) if maps else 1
        self._replicas = self._check_ranks()
        batches = self._micro_batches()
        block = self._block()
        self.ds_config = {**self._training(batches), "vpipe": block}
        self.hosts = self._hosts()
        bert = file.model_type == "bert"
        arguments = self._arguments(model) if bert else []
        self._others()
        arguments += self._paths(root) if bert else []
        if not bert:
            self._say("dropped", "log_directory", "", "your script decides")
        self.command = self._command(arguments)
        place = {key: index for index, key in enumerate(file.given)}
        self.remarks.sort(key=lambda remark: place.get(remark.field, len(place)))

    def _say(self, kind: Kind, field: str, becomes: str, why: str = "") -> None:
        self.remarks.append(Remark(kind, field, self._file.given.get(field), becomes, why))

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
        ranks = stages * replicas
        if count != ranks:
            reason = f"stage_to_rank_map in {file.config_file} has {ranks} ranks"
            raise Refusal(name, count, "one device per rank", f"name {ranks} devices", reason).error()
        return replicas

    def _micro_batches(self) -> int:
        """Micro-batches per update."""
        file, key = self._file, "gradient_accumulation_steps"
        if file.sync_mode == "bsp":
            why, kind = "vPipe flushes and updates after so many", "kept"
            if file.model_type == "bert":
                why, kind = (
                    f"{why}; its gradients were 4 times the mean, which LAMB notices only in clipping",
                    "changed",
                )
            self._say("kept", "sync_mode", 'vpipe.sync_mode "bsp"', "1F1B with a flush, as vPipe's")
            self._say(kind, "sync_mode", f"{key} {BSP_MICRO_BATCHES}", why)  # type: ignore[arg-type]
            if file.macrobatch:
                self._say("dropped", "macrobatch", "", "bsp keeps one version of the weights anyway")
            if file.no_input_pipelining:
                why = "a batch gives the same update in any order of its micro-batches"
                self._say("dropped", "no_input_pipelining", "", why)
            return BSP_MICRO_BATCHES
        if file.no_input_pipelining:
            why = "one micro-batch at a time is a synchronous pipeline with batches of one"
            self._say("changed", "no_input_pipelining", f'vpipe.sync_mode "bsp", {key} 1', why)
            return 1
        why = "PipeDream knows no other" if file.of_pipedream else ""
        self._say("kept", "sync_mode", 'vpipe.sync_mode "asp", weight_sync "stash"', why)
        if not file.macrobatch:
            self._say("kept", "sync_mode", f"{key} 1", "an update after every micro-batch")
            return 1
        ahead = self._maps.depth[0] if self._maps and self._maps.depth else self.num_stages - 1
        batches = min(MACROBATCH_VERSIONS, ahead + 1)
        copies = 1 + -(-ahead // batches)
        why = "an update after every two micro-batches, at the last stage too, which vPipe updated after every one"
        if copies > MACROBATCH_VERSIONS:
            why += (
                f"; stage 0 keeps {copies} versions, because vPipe's two are not those that micro-batches in flight"
                f" used: write {ahead} for two exact versions and a batch that is larger"
            )
        self._say("changed", "macrobatch", f"{key} {batches}", why)
        return batches

    def _block(self) -> dict[str, Any]:
        """The ``"vpipe"`` block."""
        file, split, maps = self._file, self._split, self._maps
        synchronous = file.sync_mode == "bsp" or file.no_input_pipelining
        block: dict[str, Any] = {"sync_mode": "bsp"} if synchronous else {"sync_mode": "asp", "weight_sync": "stash"}
        field = "module_to_stage_map"
        if split is not None:
            block["partition"] = split.partition
            self._say("kept", "partition", f"vpipe.partition {split.partition}")
        elif maps is not None and max(maps.modules) > 1:
            block["partition"] = maps.modules
            why = f"taken for layers; the model has to have {sum(maps.modules)}"
            self.remarks.append(Remark("changed", field, maps.modules, f"vpipe.partition {maps.modules}", why))
        else:
            block["partition"] = "parameters"
            why = "the modules are whole stages, so how many layers each has is not known; "
            why += "python -m ds_vpipe plan finds out"
            self._say("changed", field, 'vpipe.partition "parameters"', why)
        ratios = self._ratios()
        if any(ratios):
            block["recompute_ratio"] = ratios
        if maps is not None and maps.depth is not None:
            kind: Kind = "dropped" if synchronous else "kept"
            becomes = "" if synchronous else "vpipe.stage_to_depth_map"
            why = "a pipeline that drains after every batch has no depth to choose" if synchronous else ""
            self.remarks.append(Remark(kind, "stage_to_depth_map", maps.depth, becomes, why))
            if not synchronous:
                block["stage_to_depth_map"] = maps.depth
        return block

    def _ratios(self) -> list[float]:
        given = self._split.recompute_ratio if self._split else None
        ratios: list[float] = [0] * self.num_stages
        if given is not None:
            ratios = [int(ratio) if ratio == int(ratio) else ratio for ratio in given]
            why = "a share of layers here, of lines of code in vPipe" if any(0 < ratio < 1 for ratio in ratios) else ""
            becomes = f"vpipe.recompute_ratio {ratios}" if any(ratios) else "vpipe.recompute_ratio 0, its default"
            name = f"recompute_ratio in {self._file.partition}"
            self.remarks.append(Remark("changed" if why else "kept", name, given, becomes, why))
        if self._file.recompute:
            ratios = [1] * (self.num_stages - 1) + [ratios[-1]]
            self._say("kept", "recompute", f"vpipe.recompute_ratio {ratios}", "every stage but the last, whole")
        return ratios

    def _training(self, batches: int) -> dict[str, Any]:
        """The JSON but for the ``"vpipe"`` block."""
        every = max(1, self._value("print_frequency") // batches)
        for key, becomes in (
            ("batch_size", f"train_micro_batch_size_per_gpu {self._value('batch_size')}"),
            ("learning_rate", f"optimizer.params.lr {self._value('learning_rate'):g}"),
            ("weight_decay", f"optimizer.params.weight_decay {self._value('weight_decay'):g}"),
            ("print_frequency", f"steps_per_print {every}"),
        ):
            why = f"in updates of {batches} micro-batches" if key == "print_frequency" and batches > 1 else ""
            self._say("kept", key, becomes, why or ("" if key in self._file.given else "vPipe's default"))
        optimizer = self._optimizer()
        scheduler = self._scheduler()
        return {
            "train_micro_batch_size_per_gpu": self._value("batch_size"),
            "gradient_accumulation_steps": batches,
            "steps_per_print": every,
            **optimizer,
            **({} if scheduler is None else {"scheduler": scheduler}),
        }

    def _optimizer(self) -> dict[str, Any]:
        file = self._file
        if file.model_type not in _OPTIMIZERS:
            why = 'no public code says what these models were trained with: add an "optimizer"'
            self._say("dropped", "model_type", "", why)
            return {"gradient_clipping": 0.0}
        kind, params, clipping = _OPTIMIZERS[file.model_type]
        why = "what vPipe and PipeDream train this type of model with, in their code"
        self._say("kept", "model_type", f"optimizer {kind}", why)
        rate, decay = self._value("learning_rate"), self._value("weight_decay")
        if file.model_type == "bert" and not decay:
            why = (
                "apex's FusedLAMB does not scale weights without weight decay by their norm, which makes it Adam; Lamb "
                'does scale them: write "AdamW" for the same updates'
            )
            self.remarks.append(Remark("changed", "weight_decay", decay, f"optimizer {kind}", why))
        if clipping:
            bsp = file.sync_mode == "bsp"
            norm = "the norm of the whole model here and of each stage in vPipe" if bsp else ""
            norm = norm or "each stage's own norm as in vPipe"
            why = f"FusedLAMB's default, by {norm}"
            self._say("changed" if bsp else "kept", "model_type", f"gradient_clipping {clipping:g}", why)
        optimizer = {"type": kind, "params": {"lr": rate, **params, "weight_decay": decay}}
        return {"gradient_clipping": clipping, "optimizer": optimizer}

    def _scheduler(self) -> dict[str, Any] | None:
        """The ``"scheduler"``, None where it depends on the size of the data."""
        file, field, policy = self._file, "learning_rate_policy", self._file.learning_rate_policy
        known: Any = _BERT_POLICIES if file.model_type == "bert" else _EPOCH_POLICIES
        if policy not in (None, *_BERT_POLICIES, *_EPOCH_POLICIES):
            raise Refusal(f"{file.path}: {field}", policy, ", ".join(known), "write one of them").error()
        if file.model_type == "bert":
            found = _BERT_POLICIES.get(policy or "polynomial")
            if found is None:
                why = f"it falls by epochs, whose updates are not known here: add {_EPOCH_POLICIES[policy or '']}"
                self._say("dropped", field, "", why)
            else:
                usual = policy in ("polynomial", None)
                why = f"warm-up {WARMUP_STEPS} of {TOTAL_STEPS} updates, as in vPipe's code"
                why += "" if usual else "; vPipe's BERT did not read the field and trained with polynomial"
                self._say("kept" if usual else "changed", field, f"scheduler {found['type']}", why)
            if "lr_warmup" in file.given:
                why = "vPipe's BERT has no such option; the schedule has a warm-up of its own"
                self._say("dropped", "lr_warmup", "", why)
            return found
        if (policy or "step") not in _EPOCH_POLICIES:
            self._say("dropped", field, "", "vPipe knows this policy for BERT only")
            return None
        why = "it goes by epochs, whose updates are not known here: "
        self._say("dropped", field, "", f'{why}add "scheduler": {_EPOCH_POLICIES[policy or "step"]}')
        if "lr_warmup" in file.given:
            why = "it lasts five epochs: add warmup_num_steps to the scheduler" if file.lr_warmup else "it is off"
            self._say("dropped", "lr_warmup", "", why)
        return None

    def _hosts(self) -> Hosts:
        hosts = Hosts.of(self._file.machines)
        becomes = ", ".join(hosts.hostfile().splitlines())
        if hosts.first_devices:
            self._say("kept", "machines", becomes)
        else:
            why = "vPipe did not read the GPU's number and took 0, 1, ...; here it is what you wrote"
            self._say("changed", "machines", f"{becomes}; --include {hosts.include()}", why)
        first = next(iter(hosts))
        if len(hosts) == 1 and first not in LOCAL:
            why = "a single machine needs neither hostfile nor ssh"
            self.remarks.append(Remark("kept", "machines", first, f"start the command on {first}", why))
        if len(hosts) > 1 and any(host in LOCAL for host in hosts):
            why = "the other hosts cannot reach it by that name: write the name that they know"
            self.remarks.append(Remark("changed", "machines", "localhost", "a line of the hostfile", why))
        if self._maps is not None:
            ranks = self._maps.ranks
            usual = [rank for each in ranks for rank in each] == sorted(rank for each in ranks for rank in each)
            becomes = f"{self.num_stages} stages of {self._replicas} rank(s)"
            why = "" if usual else "stage s has the ranks sR .. sR+R-1 here: order the lines of the hostfile by stage"
            value = {str(stage): each for stage, each in enumerate(ranks)}
            self.remarks.append(Remark("kept" if usual else "changed", "stage_to_rank_map", value, becomes, why))
        return hosts

    def _arguments(self, model: str | None) -> list[str]:
        """Arguments of ``models/bert/train.py`` but for paths."""
        file = self._file
        layers = sum(self._split.partition) if self._split else None
        model = model or MODEL_OF_LAYERS.get(layers or 0)
        if model is None:
            sizes = ", ".join(f"{count} ({name})" for count, name in MODEL_OF_LAYERS.items())
            remedy = "name the model: --bert-config SIZE or FILE"
            raise Refusal(f"{file.partition or file.config_file}: layers", layers, sizes, remedy).error()
        why = "layers are vPipe's blocks; the decoder has a bias and the loss next-sentence prediction, unlike vPipe's"
        self._say("changed", "module", f"--config_name {model}", why)
        epochs = str(self._value("epochs"))
        why = "an epoch is all files with 'training' in their names; vPipe's was the first of them"
        self._say("changed", "epochs", f"--num_train_epochs {epochs}", why)
        stages = ["--num_stages", str(self.num_stages)] if self._replicas > 1 else []
        return ["--config_name", model, *stages, "--num_train_epochs", epochs]

    def _others(self) -> None:
        """Remarks on fields that change nothing of what is written."""
        file, given = self._file, self._file.given
        for key, fixed in _FIXED.items():
            if key in given:
                self._say(*(fixed[0], key, *fixed[1:]))
        why = "between stages; replicas reduce over NCCL on GPUs"
        if file.distributed_backend == "gloo":
            self._say("kept", "distributed_backend", "Gloo", f"{why}, over Gloo on CPUs")
        else:
            why += " as before. Several interfaces: set GLOO_SOCKET_IFNAME"
            self._say("changed", "distributed_backend", "Gloo", why)
        if file.verbose_frequency is not None:
            why = "metrics.jsonl has each stage's statistics, with every line"
            why += '; "timeline": {"enabled": true} records every pass' if file.verbose_frequency else ""
            self._say("dropped", "verbose_frequency", "", why)
        for key in ("macrobatch", "recompute", "no_input_pipelining", "synthetic_data"):
            if given.get(key) is False:
                self._say("kept", key, "the default")
        for key in given:
            if key not in VPipeFile.model_fields:
                self._say("dropped", key, "", "neither vPipe nor PipeDream reads it")
        if file.module is not None and file.model_type != "bert":
            self._say("dropped", "module", "", "write the model as a PipelineModule: docs/migrating.md")
            self._say("dropped", "epochs", "", "your script decides")
        for key, value in ((self._maps and self._maps.model_extra) or {}).items():
            why = "not split over tensors here" if key == "mp_size" else "vPipe does not read it"
            self.remarks.append(Remark("dropped", f"{key} in {file.config_file}", value, "", why))
        if file.synthetic_data:
            self.remarks.append(Remark("kept", "synthetic_data", True, "--synthetic"))
            if file.data_dir is not None:
                self._say("dropped", "data_dir", "", "the tokens are random")
        elif file.model_type != "bert":
            self._say("dropped", "data_dir", "", "your script reads the data")

    def _paths(self, root: Path | None) -> list[str]:
        """Arguments of ``models/bert/train.py`` that are paths: below the first folder that vPipe may mean."""
        file, folders = self._file, list(self._file.folders(root))
        home = next((folder for folder in folders if folder.is_dir()), folders[0])
        words = ["--synthetic"]
        if not file.synthetic_data:
            tried = [folder / str(file.data_dir) for folder in folders]
            data = next((path for path in tried if path.is_dir()), home / str(file.data_dir))
            why = "" if data.is_dir() else "which is not on this machine: correct it in launch.sh"
            self._say("changed" if why else "kept", "data_dir", f"--data_dir {data}", why)
            words = ["--data_dir", str(data)]
        output = home / (file.log_directory or "runs") / file.path.stem
        why = "without a folder for the time of the start; go on after a stop with: launch.sh --resume_from_checkpoint"
        self._say("changed", "log_directory", f"--output_dir {output}", why)
        return [*words, "--output_dir", str(output), "--save_strategy", "epoch"]

    def _command(self, arguments: list[str]) -> list[str]:
        """The command that starts training on all devices.

        One machine needs neither hostfile nor ssh: the command is for that machine. The launcher's own options come
        first.
        """
        hosts, words = self.hosts, ["deepspeed"]
        if len(hosts) > 1:
            words += ["--hostfile", str(self._output / "hostfile")]
            words += [] if hosts.first_devices else ["--include", hosts.include()]
            first = next(iter(hosts))
            words += [] if first in LOCAL else ["--master_addr", first]
        elif hosts.first_devices:
            words += ["--num_accelerators", str(len(self._file.machines))]
        else:
            words += ["--include", f"localhost:{hosts.include().rpartition(':')[2]}"]
        config = ["--deepspeed_config", str(self._output / "ds_config.json")]
        if not arguments:
            return [*words, "--module", "ds_vpipe.run", "YOUR_SCRIPT.py", *config]
        script = _SCRIPT if _SCRIPT.is_file() else Path(__file__).parents[1] / _SCRIPT
        return [*words, str(script), *config, *arguments]

    def files(self) -> dict[str, str]:
        """Names and contents of the files to write."""
        launch = (
            "#!/usr/bin/env bash\n"
            f"# Trains what {show(self._file.path.name)} describes. Arguments go to the training script.\n"
            f"set -euo pipefail\ncd {shlex.quote(str(Path.cwd()))}\n"
            'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"\n'
        )
        several = len(self.hosts) > 1
        if several:
            launch += (
                "# Variables for the other hosts, if there is no file of your own.\n"
                f"[[ -e ~/.deepspeed_env || -e .deepspeed_env || -v DS_ENV_FILE ]] ||\n"
                f"    export DS_ENV_FILE={shlex.quote(str((self._output / 'deepspeed_env').resolve()))}\n"
            )
        return {
            "ds_config.json": _text(self.ds_config) + "\n",
            "hostfile": self.hosts.hostfile(),
            "conversion.txt": "".join(f"{remark}\n" for remark in self.remarks),
            "launch.sh": f'{launch}exec {shlex.join(self.command)} "$@"\n',
            **({"deepspeed_env": "OMP_NUM_THREADS=1\n"} if several else {}),  # the launcher hands it on to other hosts
        }


def _text(value: object, indent: str = "") -> str:
    """JSON with lists on one line, as people write them."""
    if not isinstance(value, dict):
        return json.dumps(value)
    inner = ",\n".join(f"{indent}  {json.dumps(key)}: {_text(item, indent + '  ')}" for key, item in value.items())
    return f"{{\n{inner}\n{indent}}}"
